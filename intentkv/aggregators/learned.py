"""A rule score with a learned residual, and the features that the residual is computed from.

Serving and training go through :class:`HeadFeatures`, so a head sees in training what it sees in the server.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from intentkv.aggregators.decayed_energy import DecayedEnergy, decayed, remembered, turn_energy, window_energy
from intentkv.aggregators.query_memory import QueryMemoryRule
from intentkv.head import QUERY_KEYS, FeatureSet, HeadInputs, ResidualHead, RuleName
from intentkv.protocols import Captured, KeyReader, QuerySource
from intentkv.queries.actionable import ActionableMeans
from intentkv.queries.assistant import AssistantTurns
from intentkv.queries.union import Union
from intentkv.sessions import SessionState
from intentkv.spans import Prompt, Span
from intentkv.templates import Role
from intentkv.transfer import to_device

_MEAN = "query_memory"
_PAST = "turn_energies"
"""[m, 2]: energy under the last assistant turn, and the largest of any turn; ``layered`` [m, 2 + 2 L]: then that of the last turn and that
decayed over turns, layer by layer."""
_ROLES: tuple[Role, ...] = ("system", "user", "tool", "assistant", "unknown")
_NEIGHBOURHOOD = 15
"""Candidates that the ``neighbourhood`` feature averages over."""


def head_queries(rule: RuleName, feature_set: FeatureSet, turn_queries: int, window: int) -> QuerySource:
    """What must be captured for ``rule`` and the features."""
    if rule == "intentkv" and feature_set == "published":
        return ActionableMeans()
    return Union((AssistantTurns(turn_queries, window), ActionableMeans()))


@dataclass(frozen=True)
class HeadFeatures:
    """Session memories behind the features: both rules', the last assistant turn's energy, and the largest of any turn."""

    decay: float
    floor: float
    layered: bool
    """Also keep energies layer by layer: 2 L floats a position."""

    @property
    def _energy(self) -> DecayedEnergy:
        return DecayedEnergy(self.decay)

    @property
    def _means(self) -> QueryMemoryRule:
        return QueryMemoryRule(self.decay)

    def absorb(self, state: SessionState, captured: Captured, keys: KeyReader, prompt: Prompt) -> None:
        if captured.form == "mean":
            self._means.absorb(state, captured, keys, prompt)
            return
        energy = turn_energy(captured, keys, self.layered)
        if energy is None:
            return
        total = energy.sum(1) if self.layered else energy
        self._energy.fold(state, total)
        past, peak = state.memory.get(_PAST), total.clone()
        if past is not None:
            n = min(total.shape[0], past.shape[0])
            peak[:n] = torch.maximum(peak[:n], past[:n, 1])
        columns = [torch.stack([total, peak], 1)]
        if self.layered:
            columns += [energy, decayed(None if past is None else past[:, 2 + keys.n_layers :], energy, self.decay)]
        state.memory[_PAST] = torch.cat(columns, 1)

    def inputs(
        self,
        rule: RuleName,
        feature_set: FeatureSet,
        state: SessionState,
        history: torch.Tensor,
        captured: Sequence[Captured],
        keys: KeyReader,
        prompt: Prompt,
    ) -> HeadInputs:
        """Features of ``history`` ([n] int64 live candidates, n > 0)."""
        device = history.device
        observed = [c for c in captured if c.form == "raw"]
        extended = feature_set != "published"
        by_layer = window_energy(history, observed, keys, by_layer=True) if feature_set == "layered" else None
        if by_layer is not None:
            window = by_layer.sum(1)
        elif extended or rule == "assistant":
            window = window_energy(history, observed, keys)
        else:
            window = None
        mass = self._means.score(state, history, (), keys, prompt) if extended or rule == "intentkv" else None
        # the rule's own memory: it knows turns that a session's requests gave to the rule alone, too
        memory = self._energy.memory(state, history)
        scores = self._energy.combined(state, history, memory, window) if rule == "assistant" else mass
        assert scores is not None
        candidate_keys = keys.mean_keys(history)
        queries = state.memory.get(_MEAN)
        mean = keys.mean_over_heads(queries) if queries is not None else torch.zeros(candidate_keys.shape[1], device=device)
        columns: list[torch.Tensor] = []
        if extended and window is not None and mass is not None:
            width = 2 if by_layer is None else 2 + 2 * keys.n_layers
            past = remembered(state.memory.get(_PAST, torch.zeros(0, width, device=device)), history)
            columns += [self._energies(scores, past, memory, window, mass), _places(history, state.scored_length, prompt)]
            if by_layer is not None:
                columns.append(torch.log(torch.cat([past[:, 2:], by_layer], 1) + self.floor / keys.n_layers))
                columns.append(torch.log(keys.value_norms(history) + self.floor))
        extra = torch.cat(columns, 1) if columns else torch.zeros(history.shape[0], 0, device=device)
        return HeadInputs(candidate_keys, mean, self._query_keys(keys, prompt, candidate_keys), scores, extra)

    def _query_keys(self, keys: KeyReader, prompt: Prompt, like: torch.Tensor) -> torch.Tensor:
        span = prompt.actionable
        if span is None:
            return like.new_zeros(0, like.shape[1])
        stride = -(-len(span) // QUERY_KEYS)
        # the newest message is always kept, so all of it is live
        return keys.mean_keys(torch.arange(span.start, span.end, stride, device=like.device))

    def _energies(
        self, rule: torch.Tensor, past: torch.Tensor, memory: torch.Tensor, window: torch.Tensor, mass: torch.Tensor
    ) -> torch.Tensor:
        """[n, 7] logarithms of scores: the first columns of :data:`intentkv.head.EXTENDED`."""
        last, peak = past[:, :2].unbind(1)
        smooth = torch.nn.functional.avg_pool1d(
            memory[None, None], _NEIGHBOURHOOD, 1, _NEIGHBOURHOOD // 2, count_include_pad=False
        )[0, 0]  # fmt: skip
        return torch.log(torch.stack([rule, last, memory, peak, window, mass, smooth], 1).clamp_min(0) + self.floor)


def _places(history: torch.Tensor, scored_length: int, prompt: Prompt) -> torch.Tensor:
    """[n, 10]: age in tokens and turns, whether an assistant turn has seen it, place in its message, the message's length and role."""
    # What messages have is made on the host and sent over once; a position in front of the first message counts to it.
    spans = prompt.messages or (Span("unknown", 0, prompt.length),)
    rows = []
    turns_after = 0
    for span in reversed(spans):
        rows.append(
            [span.start, max(1, len(span)), math.log1p(turns_after), math.log1p(len(span)), *(span.role == role for role in _ROLES)]
        )
        turns_after += span.role == "assistant"
    table = to_device(torch.tensor(rows[::-1], dtype=torch.float32), history.device)
    place = history.float()
    row = table[(torch.bucketize(place, table[:, 0].contiguous(), right=True) - 1).clamp_min(0)]
    age, seen = torch.log1p(prompt.length - place), history < scored_length
    offset = (place - row[:, 0]) / row[:, 1]
    return torch.cat([age[:, None], row[:, 2:3], seen[:, None], offset[:, None], row[:, 3:]], 1)


@dataclass(frozen=True)
class Learned:
    """s_j = rule_j with the head's residual (see :class:`intentkv.head.ResidualHead`)."""

    rule: RuleName
    head: ResidualHead
    decay: float

    @property
    def features(self) -> HeadFeatures:
        """What the head is told, and the session's memory behind it."""
        return HeadFeatures(self.decay, self.head.config.floor, self.head.config.feature_set == "layered")

    def absorb(self, state: SessionState, captured: Captured, keys: KeyReader, prompt: Prompt) -> None:
        self.features.absorb(state, captured, keys, prompt)

    def score(
        self, state: SessionState, history: torch.Tensor, captured: Sequence[Captured], keys: KeyReader, prompt: Prompt
    ) -> torch.Tensor:
        if not history.numel():
            return torch.zeros(0, dtype=torch.float32, device=history.device)
        inputs = self.features.inputs(self.rule, self.head.config.feature_set, state, history, captured, keys, prompt)
        return self.head.to(history.device).scores(inputs)
