"""Decayed energy of the assistant's own queries: a session memory in score space."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from intentkv.protocols import Captured, KeyReader
from intentkv.sessions import SessionState
from intentkv.spans import Prompt

_MEMORY = "assistant_energy"


def turn_energy(captured: Captured, keys: KeyReader, by_layer: bool = False) -> torch.Tensor | None:
    """Energy of one assistant turn's queries, 0 at dead positions; None when it is no such turn.

    Returns:
        [end of the turn] float32; with ``by_layer`` [end, L].
    """
    if captured.span.role != "assistant" or captured.positions.numel() == 0:
        return None
    end = captured.span.end
    visible = keys.live_before(end)
    found = _energy(captured, keys, visible, by_layer)
    energy = torch.zeros(end, *found.shape[1:], dtype=torch.float32, device=visible.device)
    energy[visible] = found
    return energy


def decayed(past: torch.Tensor | None, energy: torch.Tensor, decay: float) -> torch.Tensor:
    """e^-decay past + energy, per position: the shape of ``energy``, whose first rows ``past`` covers."""
    memory = energy.clone()
    if past is not None:
        n = min(energy.shape[0], past.shape[0])
        memory[:n] += math.exp(-decay) * past[:n]
    return memory


def _energy(captured: Captured, keys: KeyReader, positions: torch.Tensor, by_layer: bool) -> torch.Tensor:
    """Energy of ``positions`` ([n] int64 live) under captured queries: [n] float32; with ``by_layer`` [n, L]."""
    if by_layer:
        return keys.layer_scores(captured.queries, positions, "energy", captured.positions).T
    return keys.scores(captured.queries, positions, "energy", captured.positions)


def window_energy(history: torch.Tensor, captured: Sequence[Captured], keys: KeyReader, by_layer: bool = False) -> torch.Tensor:
    """Energy of ``history`` ([n] int64) under the captured queries that no assistant wrote, such as the observation window's.

    Returns:
        [n] float32, 0 without any; with ``by_layer`` [n, L].
    """
    at = torch.searchsorted(keys.live, history)
    shape = (history.shape[0], keys.n_layers) if by_layer else (history.shape[0],)
    total = torch.zeros(shape, dtype=torch.float32, device=history.device)
    for window in (c for c in captured if c.span.role != "assistant"):
        total = total + _energy(window, keys, keys.live, by_layer)[at]
    return total


def remembered(memory: torch.Tensor | None, history: torch.Tensor) -> torch.Tensor:
    """Values of a per-position ``memory`` ([m] or [m, L]) at ``history`` ([n] int64): [n] or [n, L] float32, 0 behind its end."""
    if memory is None or not memory.numel():
        shape = (history.shape[0], *(memory.shape[1:] if memory is not None else ()))
        return torch.zeros(shape, dtype=torch.float32, device=history.device)
    unseen = (history >= memory.shape[0]).view(-1, *[1] * (memory.dim() - 1))
    return torch.where(unseen, 0.0, memory[history.clamp(max=memory.shape[0] - 1)])


@dataclass(frozen=True)
class DecayedEnergy:
    """s <- e^-lambda s + sum over heads of mean_i alpha_ij^2, once per assistant turn.

    Averaging queries before the softmax loses what single queries point at; per-position scores keep it and cost one float a token.
    alpha is the model's own attention: it runs over every live position a query sees, the system prefix and its sinks among them
    (docs/results.md: as good as over the history alone at 10 %, better at 25 %).
    Positions behind the newest assistant turn were seen by none of its queries; the observation window at the end of the prompt
    scores them.
    """

    decay: float

    def absorb(self, state: SessionState, captured: Captured, keys: KeyReader, prompt: Prompt) -> None:
        energy = turn_energy(captured, keys)
        if energy is not None:
            self.fold(state, energy)

    def fold(self, state: SessionState, energy: torch.Tensor) -> None:
        """Add one turn's ``energy`` ([end of the turn] float32) to the session's memory."""
        state.memory[_MEMORY] = decayed(state.memory.get(_MEMORY), energy, self.decay)
        state.scored_length = energy.shape[0]

    def memory(self, state: SessionState, history: torch.Tensor) -> torch.Tensor:
        """The session's memory at ``history`` ([n] int64): [n] float32, 0 where no assistant turn has seen the position."""
        return remembered(state.memory.get(_MEMORY), history)

    def score(
        self, state: SessionState, history: torch.Tensor, captured: Sequence[Captured], keys: KeyReader, prompt: Prompt
    ) -> torch.Tensor:
        unseen = history >= state.scored_length
        # On a GPU the window is scored in any case: asking whether somebody needs it would wait for the device.
        window = window_energy(history, captured, keys) if history.is_cuda or bool(unseen.any()) else None
        return self.combined(state, history, self.memory(state, history), window)

    def combined(self, state: SessionState, history: torch.Tensor, memory: torch.Tensor, window: torch.Tensor | None) -> torch.Tensor:
        """``memory`` ([n] float32, of :meth:`memory`) where an assistant turn has seen the position, else ``window`` ([n] float32)."""
        unseen = history >= state.scored_length
        scores = torch.where(unseen, 0.0, memory)
        return scores if window is None else scores + torch.where(unseen, window, 0.0)
