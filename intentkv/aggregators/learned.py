"""A rule score with a learned residual, and the features that the residual is computed from.

Serving and training go through :class:`HeadFeatures`, so a head sees in training what it sees in the server.
"""

from __future__ import annotations

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
from intentkv.spans import Prompt
from intentkv.templates import Role
from intentkv.transfer import to_device

_LAST, _PEAK, _DECAYED, _MEAN = "last_turn_energy", "peak_energy", "assistant_energy", "query_memory"
_LAST_BY_LAYER, _DECAYED_BY_LAYER = "last_turn_energy_by_layer", "assistant_energy_by_layer"
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
        if self.layered:
            state.memory[_LAST_BY_LAYER] = energy
            state.memory[_DECAYED_BY_LAYER] = decayed(state.memory.get(_DECAYED_BY_LAYER), energy, self.decay)
            energy = energy.sum(1)
        self._energy.fold(state, energy)
        state.memory[_LAST] = energy
        peak, past = energy.clone(), state.memory.get(_PEAK)
        if past is not None:
            n = min(peak.shape[0], past.shape[0])
            peak[:n] = torch.maximum(peak[:n], past[:n])
        state.memory[_PEAK] = peak

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
        by_layer = None
        window = None
        if feature_set == "layered":
            by_layer = window_energy(history, observed, keys, by_layer=True)
            window = by_layer.sum(1)
        elif extended or rule == "assistant":
            window = window_energy(history, observed, keys)
        mass = self._means.score(state, history, (), keys, prompt) if extended or rule == "intentkv" else None
        scores = self._energy.combined(state, history, window) if rule == "assistant" else mass
        assert scores is not None
        candidate_keys = keys.mean_keys(history)
        memory = state.memory.get(_MEAN)
        mean = keys.mean_over_heads(memory) if memory is not None else torch.zeros(candidate_keys.shape[1], device=device)
        extra = torch.zeros(history.shape[0], 0, device=device)
        if extended and window is not None and mass is not None:
            extra = self._extended(state, history, scores, window, mass, prompt)
            if by_layer is not None:
                by_layer = torch.cat([self._remembered_by_layer(state, history, keys), by_layer], 1)
                norms = torch.log(keys.value_norms(history) + self.floor)
                extra = torch.cat([extra, torch.log(by_layer + self.floor / keys.n_layers), norms], 1)
        return HeadInputs(candidate_keys, mean, self._query_keys(keys, prompt, candidate_keys), scores, extra)

    def _query_keys(self, keys: KeyReader, prompt: Prompt, like: torch.Tensor) -> torch.Tensor:
        span = prompt.actionable
        if span is None:
            return like.new_zeros(0, like.shape[1])
        stride = -(-len(span) // QUERY_KEYS)
        # the newest message is always kept, so all of it is live
        return keys.mean_keys(torch.arange(span.start, span.end, stride, device=like.device))

    def _extended(
        self, state: SessionState, history: torch.Tensor, rule: torch.Tensor, window: torch.Tensor, mass: torch.Tensor, prompt: Prompt
    ) -> torch.Tensor:
        memory = remembered(state.memory.get(_DECAYED), history)
        smooth = torch.nn.functional.avg_pool1d(
            memory[None, None], _NEIGHBOURHOOD, 1, _NEIGHBOURHOOD // 2, count_include_pad=False
        )[0, 0]  # fmt: skip
        energies = [rule, remembered(state.memory.get(_LAST), history), memory, remembered(state.memory.get(_PEAK), history)]
        logs = torch.log(torch.stack([*energies, window, mass, smooth], 1).clamp_min(0) + self.floor)
        return torch.cat([logs, _places(history, state.scored_length, prompt)], 1)

    def _remembered_by_layer(self, state: SessionState, history: torch.Tensor, keys: KeyReader) -> torch.Tensor:
        """[n, 2 L] energies of the last turn, then the decayed ones."""
        none = torch.zeros(0, keys.n_layers, device=history.device)
        names = (_LAST_BY_LAYER, _DECAYED_BY_LAYER)
        return torch.cat([remembered(state.memory.get(name, none), history) for name in names], 1)


def _places(history: torch.Tensor, scored_length: int, prompt: Prompt) -> torch.Tensor:
    """[n, 10]: age in tokens and turns, whether an assistant turn has seen it, place in its message, the message's role."""
    device = history.device
    # Made on the host, sent over once; a position in front of the first message counts to it.
    spans = prompt.messages
    turns_after = [sum(s.role == "assistant" for s in spans[i + 1 :]) for i in range(len(spans))]
    rows = [[float(s.start), float(len(s)), float(after), float(_ROLES.index(s.role))] for s, after in zip(spans, turns_after, strict=True)]
    table = torch.tensor(rows or [[0.0, float(prompt.length), 0.0, 4.0]], dtype=torch.float32)
    table = to_device(table, device)
    starts = table[:, 0].contiguous()
    place = history.float()
    row = table[(torch.bucketize(place, starts, right=True) - 1).clamp_min(0)]
    numbers = torch.stack(
        [
            torch.log1p((prompt.length - place).clamp_min(0)),
            torch.log1p(row[:, 2]),
            (history < scored_length).float(),
            (place - row[:, 0]) / row[:, 1].clamp_min(1),
            torch.log1p(row[:, 1]),
        ],
        1,
    )
    return torch.cat([numbers, torch.nn.functional.one_hot(row[:, 3].long(), len(_ROLES)).float()], 1)


@dataclass(frozen=True)
class Learned:
    """s_j = rule_j with the head's residual (see :class:`intentkv.head.ResidualHead`)."""

    rule: RuleName
    head: ResidualHead
    decay: float

    @property
    def _features(self) -> HeadFeatures:
        return HeadFeatures(self.decay, self.head.config.floor, self.head.config.feature_set == "layered")

    def absorb(self, state: SessionState, captured: Captured, keys: KeyReader, prompt: Prompt) -> None:
        self._features.absorb(state, captured, keys, prompt)

    def score(
        self, state: SessionState, history: torch.Tensor, captured: Sequence[Captured], keys: KeyReader, prompt: Prompt
    ) -> torch.Tensor:
        if not history.numel():
            return torch.zeros(0, dtype=torch.float32, device=history.device)
        inputs = self._features.inputs(self.rule, self.head.config.feature_set, state, history, captured, keys, prompt)
        return self.head.to(history.device).scores(inputs)
