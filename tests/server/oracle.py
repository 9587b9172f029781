"""What the server must compute, computed again with transformers: textbook attention under any mask, and each method from its formula.

Nothing here uses the code under test.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from .harness import Answer, Chat

NEVER = 1 << 40
FIRST_STEP = 1
"""A prompt's eviction is applied when its prefill has been processed. With overlap scheduling SGLang has launched the first decode step by
then, so that step still reads everything."""
DECAY, WINDOW, POOL, TURN_QUERIES, NEWEST_TURNS = 0.5, 32, 7, 64, 8
"""The servers' settings (their defaults)."""


class Pass(NamedTuple):
    """One forward pass over a whole sequence."""

    logprobs: torch.Tensor
    """[n - first, V] float32, of the token behind each position from ``first`` on."""
    first: int
    queries: torch.Tensor
    """[L, n, H_q, D] float64, after RoPE."""
    keys: torch.Tensor
    """[L, n, H_kv, D] float64, after RoPE."""

    def of_tokens(self, ids: list[int], start: int) -> torch.Tensor:
        """Log-probabilities of the tokens at positions ``start`` and later."""
        rows = torch.arange(start - 1 - self.first, len(ids) - 1 - self.first)
        return self.logprobs[rows, torch.tensor(ids[start:])]


class DenseModel:
    """A transformers model in float32 whose attention reads exactly what it is told to."""

    def __init__(self, folder: Path) -> None:
        # Not before torchvision imports on this machine, which making the model has seen to.
        from transformers import AttentionInterface, AutoModelForCausalLM

        AttentionInterface.register("intentkv_test_oracle", self._attend)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="intentkv_test_oracle")
        self._visible = torch.empty(0)
        self._queries: list[torch.Tensor] = []
        self._keys: list[torch.Tensor] = []

    def _attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[torch.Tensor, None]:
        self._queries.append(query[0].transpose(0, 1))
        self._keys.append(key[0].transpose(0, 1))
        group = query.shape[1] // key.shape[1]
        logits = query @ key.repeat_interleave(group, 1).transpose(2, 3) * scaling
        weights = torch.softmax(logits.masked_fill(~self._visible, float("-inf")), -1)
        return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2), None

    @torch.no_grad()
    def forward(self, ids: list[int], hidden_from: dict[int, int] | None = None, first: int = 0) -> Pass:
        """Compute ``ids`` as one dense pass.

        Args:
            hidden_from: position j -> first position whose query does not see j any more. Keys and values of j itself, and what earlier
                positions took from it, stay as they were.
            first: log-probabilities are wanted from this position on.
        """
        n = len(ids)
        hidden = torch.full((n,), NEVER)
        for position, since in (hidden_from or {}).items():
            if position < n:
                hidden[position] = since
        at = torch.arange(n)
        self._visible = (at[None, :] <= at[:, None]) & (at[:, None] < hidden[None, :])
        self._queries, self._keys = [], []
        logits = self.model(input_ids=torch.tensor([ids]), use_cache=False, logits_to_keep=n - first).logits[0]
        return Pass(logits.log_softmax(-1), first, torch.stack(self._queries).double(), torch.stack(self._keys).double())


def attention(queries: torch.Tensor, keys: torch.Tensor, causal: torch.Tensor | None = None) -> torch.Tensor:
    """Softmax over keys: [L, q, H_q, D] and [L, k, H_kv, D] give [L, H_q, q, k]; ``causal`` is [q, k] bool, True where visible."""
    group = queries.shape[2] // keys.shape[2]
    logits = torch.einsum("lqhd,lkhd->lhqk", queries, keys.repeat_interleave(group, 2)) / math.sqrt(queries.shape[-1])
    if causal is not None:
        logits = logits.masked_fill(~causal, float("-inf"))
    return torch.softmax(logits, -1).nan_to_num(0.0)


def causal_attention(computed: Pass, of: list[int], over: list[int]) -> torch.Tensor:
    """[L, H_q, q, k] attention of positions ``of`` over positions ``over``."""
    visible = torch.tensor(over)[None, :] <= torch.tensor(of)[:, None]
    return attention(computed.queries[:, of], computed.keys[:, over], visible)


@dataclass(frozen=True)
class Turn:
    """A prompt and what the server found cached of it."""

    chat: Chat
    length: int
    cached: int

    @property
    def system_end(self) -> int:
        first = self.chat.spans[0]
        return first.end if first.role == "system" else 0

    @property
    def window(self) -> list[int]:
        return list(range(max(self.cached, self.length - WINDOW, 0), self.length))


class Rule(Protocol):
    """A method's scores, from its formula. Most keep nothing between turns."""

    def answered(self, computed: Pass, generated: list[int], live: list[int], turn: Turn) -> None:
        """Positions ``generated`` were decoded by the server while it held ``live``."""

    def forget(self, length: int) -> None:
        """Other tokens than before stand at ``length`` and behind."""

    def prompted(self, computed: Pass, turn: Turn, live: list[int]) -> None:
        """A prompt was prefilled from ``turn.cached`` on while the server held ``live``."""

    def scores(self, computed: Pass, turn: Turn, live: list[int], candidates: list[int]) -> torch.Tensor:
        """[n] float64, one a candidate; the best stay."""
        ...


@dataclass
class IntentKVRule(Rule):
    """M <- unit(e^-lambda M + mean query of the span), span by span; score: softmax mass of M over the candidates."""

    memory: torch.Tensor | None = None

    def prompted(self, computed: Pass, turn: Turn, live: list[int]) -> None:
        for role, start, end in turn.chat.spans:
            if role in ("user", "tool") and end > turn.cached:
                mixed = computed.queries[:, max(start, turn.cached) : end].mean(1)
                if self.memory is not None:
                    mixed = mixed + math.exp(-DECAY) * self.memory
                self.memory = mixed / mixed.norm(dim=-1, keepdim=True)

    def scores(self, computed: Pass, turn: Turn, live: list[int], candidates: list[int]) -> torch.Tensor:
        assert self.memory is not None
        return attention(self.memory[:, None], computed.keys[:, candidates]).sum((0, 1, 2))


@dataclass
class AssistantRule(Rule):
    """s <- e^-lambda s + sum over heads of mean over queries of alpha^2, once an assistant turn; the window scores what no turn saw."""

    energy: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))

    def _absorb(self, computed: Pass, queries: list[int], end: int, live: list[int]) -> None:
        past, self.energy = self.energy[:end], torch.zeros(end, dtype=torch.float64)
        self.energy[: len(past)] = math.exp(-DECAY) * past
        visible = [j for j in live if j < end]
        self.energy[visible] += causal_attention(computed, queries, visible).square().mean(2).sum((0, 1))

    def answered(self, computed: Pass, generated: list[int], live: list[int], turn: Turn) -> None:
        assert len(generated) <= TURN_QUERIES, "longer turns are sampled"
        self._absorb(computed, generated, generated[-1] + 1, live)

    def forget(self, length: int) -> None:
        self.energy = self.energy[:length]

    def prompted(self, computed: Pass, turn: Turn, live: list[int]) -> None:
        recorded = [s for s in turn.chat.spans if s.role == "assistant"][-NEWEST_TURNS:]
        for _, start, end in recorded:
            if start >= turn.cached:
                stride = math.ceil((end - start) / TURN_QUERIES)
                self._absorb(computed, list(range(end - 1, start - 1, -stride))[::-1], end, live)

    def scores(self, computed: Pass, turn: Turn, live: list[int], candidates: list[int]) -> torch.Tensor:
        window = causal_attention(computed, turn.window, live).square().mean(2).sum((0, 1))
        unseen = dict(zip(live, window.tolist(), strict=True))
        return torch.tensor([float(self.energy[j]) if j < len(self.energy) else unseen[j] for j in candidates], dtype=torch.float64)


@dataclass
class SnapKVRule(Rule):
    """Mass that the observation window puts on all it sees, summed over layers and heads, max-pooled over neighbouring live positions."""

    def scores(self, computed: Pass, turn: Turn, live: list[int], candidates: list[int]) -> torch.Tensor:
        mass = causal_attention(computed, turn.window, live).sum((0, 1, 2))
        half = POOL // 2
        pooled = [mass[max(0, i - half) : i + half + 1].max() for i in range(len(live))]
        return torch.stack([pooled[live.index(j)] for j in candidates])


@dataclass
class StreamingRule(Rule):
    """The newest stay."""

    def scores(self, computed: Pass, turn: Turn, live: list[int], candidates: list[int]) -> torch.Tensor:
        return torch.tensor(candidates, dtype=torch.float64)


RULES: dict[str, Callable[[], Rule]] = {
    "intentkv": IntentKVRule,
    "assistant": AssistantRule,
    "snapkv": SnapKVRule,
    "streamingllm": StreamingRule,
}
SINKS = {"streamingllm": 4}
RECENT = {"snapkv": WINDOW}
"""First and last tokens of the prompt that a method always keeps."""


def check_selection(scores: torch.Tensor, candidates: list[int], keep: int, evicted: set[int]) -> None:
    """``evicted`` must be the candidates without the ``keep`` best; equal scores leave the earlier position.

    Rounding may swap two positions whose scores differ by less than 1e-4 of their size, and only those.
    """
    assert len(evicted) == len(candidates) - keep
    assert evicted <= set(candidates), f"not evictable, but evicted: {sorted(evicted - set(candidates))}"
    gone = torch.tensor([j in evicted for j in candidates])
    position = torch.tensor(candidates)
    lost, kept = scores[gone][:, None], scores[~gone][None, :]
    wrong = (lost > kept * (1 + 1e-4)) | ((lost == kept) & (position[gone][:, None] > position[~gone][None, :]))
    assert not wrong.any(), [
        f"{position[gone][i]} (score {lost[i, 0]:.6g}) was evicted, {position[~gone][k]} (score {kept[0, k]:.6g}) was kept"
        for i, k in wrong.nonzero()[:5].tolist()
    ]


@dataclass
class SessionOracle:
    """Follows one session turn by turn and says what must die. Only what the server really evicted hides anything in later turns."""

    model: DenseModel
    method: str
    budget: int | None = None
    ratio: float = 1.0
    """Share of the history to keep where no budget is set."""
    protected: tuple[tuple[int, int], ...] = ()
    shared: int = 0
    """The first positions, when other sessions use them too."""
    hidden_from: dict[int, int] = field(default_factory=dict)
    _prompt_end: int = 0
    _past: list[int] = field(default_factory=list)
    """Tokens of the previous turn, its answer included."""

    def __post_init__(self) -> None:
        self.rule = RULES[self.method]()

    @property
    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"method": self.method, "hysteresis": 0, "keep": [list(span) for span in self.protected]}
        return options | ({"budget": self.budget} if self.budget is not None else {"budget_ratio": self.ratio})

    def _always_kept(self, turn: Turn) -> set[int]:
        newest = next(s for s in reversed(turn.chat.spans) if s.role in ("user", "tool"))
        spans = [(0, turn.system_end), (newest.start, newest.end), (turn.chat.generation_start, turn.length)]
        spans += [(0, SINKS.get(self.method, 0)), (turn.length - RECENT.get(self.method, 0), turn.length)]
        spans += [(0, self.shared), *self.protected]
        return {j for start, end in spans for j in range(start, min(end, turn.length))}

    def _kept_history(self, history: int, forced: int) -> int:
        wanted = max(0, self.budget - forced) if self.budget is not None else max(1, round(self.ratio * history))
        return min(history, wanted)

    def _absorb_answer(self, turn: Turn) -> None:
        end = len(self._past)
        if turn.cached == end - 1:
            # The newest token was not fed back before the request ended.
            end = turn.cached
        computed = self.model.forward(self._past[:end], self.hidden_from, first=end - 1)
        live = [j for j in range(end) if j not in self.hidden_from]
        self.rule.answered(computed, list(range(self._prompt_end, end)), live, turn)
        self.rule.forget(turn.cached)

    def check_turn(self, chat: Chat, answer: Answer, dead: set[int]) -> int:
        """Compare what the server evicted after the prefill of ``chat``'s prompt; ``chat`` is as it was when it was sent.

        Returns:
            How many positions had to be evicted.
        """
        ids, n = list(chat.ids), len(chat.ids)
        turn = Turn(chat, n, answer.cached_tokens)
        if self._past:
            self._absorb_answer(turn)
        computed = self.model.forward(ids, self.hidden_from, first=n - 1)
        live = [j for j in range(n) if j not in self.hidden_from]
        self.rule.prompted(computed, turn, live)

        kept = self._always_kept(turn)
        candidates = [j for j in live if j not in kept]
        forced = len(live) - len(candidates)
        keep = self._kept_history(n - len(kept), forced)
        due = max(0, len(candidates) - keep)
        gone = dead - set(self.hidden_from)
        assert set(self.hidden_from) <= dead, "an evicted position came back"
        if due:
            check_selection(self.rule.scores(computed, turn, live, candidates), candidates, keep, gone)
            assert answer.figures["forced_tokens"] == forced
            assert answer.figures["target_tokens"] == len(live) - due
        assert len(gone) == answer.figures["pruned_tokens"] == due
        self.hidden_from |= dict.fromkeys(gone, n + FIRST_STEP)
        self._prompt_end, self._past = n, ids + answer.output_ids
        check_greedy(self.model, ids, answer.output_ids, self.hidden_from)
        return due


def greedy_gap(model: DenseModel, prompt: list[int], output_ids: list[int], hidden_from: dict[int, int] | None = None) -> float:
    """How far the least greedy of ``output_ids`` is behind the most likely token, in log-probability (teacher-forced: one pass)."""
    computed = model.forward(prompt + output_ids[:-1], hidden_from, first=len(prompt) - 1)
    chosen = computed.logprobs[torch.arange(len(output_ids)), torch.tensor(output_ids)]
    return float((computed.logprobs.max(-1).values - chosen).max())


def check_greedy(model: DenseModel, prompt: list[int], output_ids: list[int], hidden_from: dict[int, int] | None = None) -> None:
    """Every token of ``output_ids`` must be the most likely one behind those before it, up to rounding."""
    gap = greedy_gap(model, prompt, output_ids, hidden_from)
    assert gap < 1e-3, f"a token is {gap:.4f} behind the greedy one"
