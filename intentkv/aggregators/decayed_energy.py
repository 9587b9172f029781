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
        if captured.span.role != "assistant" or captured.positions.numel() == 0:
            return
        end = captured.span.end
        visible = keys.live_before(end)
        memory = torch.zeros(end, dtype=torch.float32, device=visible.device)
        past = state.memory.get(_MEMORY)
        if past is not None:
            n = min(end, past.shape[0])
            memory[:n] = math.exp(-self.decay) * past[:n]
        memory[visible] += keys.scores(captured.queries, visible, "energy", captured.positions)
        state.memory[_MEMORY] = memory
        state.scored_length = end

    def score(
        self, state: SessionState, history: torch.Tensor, captured: Sequence[Captured], keys: KeyReader, prompt: Prompt
    ) -> torch.Tensor:
        unseen = history >= state.scored_length
        scores = torch.zeros(history.shape[0], dtype=torch.float32, device=history.device)
        memory = state.memory.get(_MEMORY)
        if memory is not None and memory.numel():
            scores = torch.where(unseen, 0.0, memory[history.clamp(max=memory.shape[0] - 1)])
        # On a GPU the window is scored in any case: asking whether somebody needs it would wait for the device.
        if history.is_cuda or bool(unseen.any()):
            at = torch.searchsorted(keys.live, history)
            for window in (c for c in captured if c.span.role != "assistant"):
                energy = keys.scores(window.queries, keys.live, "energy", window.positions)
                scores = scores + torch.where(unseen, energy[at], 0.0)
        return scores
