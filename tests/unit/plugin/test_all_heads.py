"""Two ranks with half of the heads each score and remember what one reader of all heads does, whatever is not linear in heads.

Run as a script, this file is one rank.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from intentkv.config import Config
from intentkv.head import HeadConfig, ModelShape, ResidualHead, save_head
from intentkv.methods import Method, build_method
from intentkv.protocols import Captured, CaptureRequest, KeyReader
from intentkv.scoring import LayerwiseKeys
from intentkv.sessions import SessionState
from intentkv.spans import Prompt, Span
from intentkv_sglang.ranks import RankGroup, needs_all_heads

pytestmark = pytest.mark.unit

RANKS, Q_HEADS, DIM = 2, 4, 8
LAYERS = (1, 3)
TURNS = [
    [("system", 6), ("user", 12), ("tool", 20)],
    [("system", 6), ("user", 12), ("tool", 20), ("assistant", 12), ("tool", 15), ("user", 7)],
]
GENERATION = 3
LENGTH = 90
HEADS = [
    (rule, features, residual)
    for rule in ("assistant", "intentkv")
    for features, residual in (("published", "additive"), ("extended", "log"), ("layered", "log"))
]
RULES = ["assistant", "intentkv", "snapkv"]


@dataclass
class Share(LayerwiseKeys):
    """The query heads and KV heads of one rank, or all of them; positions in ``dead`` are evicted."""

    queries: torch.Tensor
    """[L, n, H_q, D]."""
    all_keys: torch.Tensor
    """[L, n, H_kv, D]."""
    all_values: torch.Tensor
    length: int
    dead: frozenset[int] = frozenset()
    layers: tuple[int, ...] = LAYERS
    scaling: float = DIM**-0.5

    @classmethod
    def of(cls, kv_heads: int, rank: int | None, length: int, dead: frozenset[int] = frozenset()) -> Share:
        """Of ``rank`` as SGLang divides a model, a KV head on both ranks when there is one only; of all heads when it is None."""
        generator = torch.Generator().manual_seed(kv_heads)
        queries, keys, values = (2 * torch.randn(2, LENGTH, heads, DIM, generator=generator) for heads in (Q_HEADS, kv_heads, kv_heads))
        if rank is not None:
            queries = queries[:, :, 2 * rank : 2 * rank + 2]
            mine = slice(rank, rank + 1) if kv_heads == RANKS else slice(0, 1)
            keys, values = keys[:, :, mine], values[:, :, mine]
        return cls(queries, keys, values, length, dead)

    def keys(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        return self.all_keys[self.layers.index(layer), positions]

    def values(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        return self.all_values[self.layers.index(layer), positions]

    @property
    def live(self) -> torch.Tensor:
        return torch.tensor([p for p in range(self.length) if p not in self.dead])

    def live_before(self, end: int) -> torch.Tensor:
        return self.live[self.live < end]

    def capture(self, wanted: CaptureRequest) -> Captured:
        span = wanted.span
        if wanted.form == "mean":
            return Captured(span, "mean", torch.empty(0, dtype=torch.int64), self.queries[:, span.start : span.end].mean(1))
        at = torch.tensor(wanted.sampled(span.start))
        return Captured(span, "raw", at, self.queries[:, at])


def configs(folder: Path) -> list[tuple[str, Config]]:
    """Every method under test; rules once with a head on the server, which makes them read all heads, too."""
    learned = [(f"{head[0]}-learned", Config(head=folder / "-".join(head), window=5, turn_queries=6)) for head in HEADS]
    return learned + [(name, Config(head=learned[0][1].head, window=5)) for name in RULES] + [("snapkv", Config(window=5))]


def session(method: Method, kv_heads: int, rank: int | None, group: RankGroup, whole: bool) -> dict[str, object]:
    """Two turns: prompt, generated answer, eviction of some positions, the next prompt, and an eviction in the middle of its answer."""
    state = SessionState("s")
    assert method.aggregator is not None
    scores, dead = [], frozenset[int]()

    def reader(length: int) -> tuple[Share, KeyReader]:
        own = Share.of(kv_heads, rank, length, dead)
        return own, group.reader(own, whole)

    for messages in TURNS:
        spans, end = [], 0
        for role, size in messages:
            spans.append(Span(role, end, end + size))
            end += size
        prompt = Prompt(end + GENERATION, tuple(spans), end, True)
        own, keys = reader(prompt.length)
        captured = [own.capture(wanted) for wanted in method.queries.requests(prompt)]
        for part in captured:
            method.aggregator.absorb(state, part, keys, prompt)
        history = own.live[: prompt.generation_start]
        scores.append(method.aggregator.score(state, history, captured, keys, prompt).tolist())
        dead = frozenset({8, 9, 15, 21, 22, 23})
        own, keys = reader(prompt.length + 9)
        if method.queries.decode:
            said = own.capture(CaptureRequest(Span("assistant", end, prompt.length + 9), "raw", method.queries.decode_limit))
            method.aggregator.absorb(state, said, keys, prompt)
        rule = method.decode_rule or method.aggregator
        scores.append(rule.score(state, own.live, (), keys, prompt).tolist())
    return {"scores": scores, "memory": {name: value.tolist() for name, value in state.memory.items()}}


def sessions(folder: Path, kv_heads: int, rank: int | None, group: RankGroup) -> list[dict[str, object]]:
    """Of every method; ``rank`` None: of one reader of all heads."""
    return [
        session(build_method(name, config), kv_heads, rank, group, needs_all_heads(build_method(name, config), config))
        for name, config in configs(folder)
    ]


def one_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=RANKS)
    group = RankGroup(RANKS, rank, dist.group.WORLD)
    results = {kv_heads: sessions(folder, kv_heads, rank, group) for kv_heads in (1, 2)}
    dist.destroy_process_group()
    print(json.dumps(results))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random head for each rule and feature set."""
    made = tmp_path_factory.mktemp("heads")
    torch.manual_seed(5)
    for rule, features, residual in HEADS:
        shape = ModelShape(model_type="fake", layers=len(LAYERS), query_heads=Q_HEADS, kv_heads=2, head_dim=DIM)
        head = ResidualHead(HeadConfig(rule=rule, feature_set=features, residual=residual, shape=shape))
        torch.nn.init.normal_(head.output.weight, std=0.5)
        save_head(head, made / f"{rule}-{features}-{residual}")
    return made


@pytest.fixture(scope="module")
def ranks(two_processes: Callable[[str, Path], list[Any]], folder: Path) -> list[dict[str, list[dict[str, list[list[float]]]]]]:
    """What each of two processes found."""
    return two_processes(__file__, folder)


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_ranks_score_and_remember_what_one_reader_does(folder, ranks, kv_heads):
    """With 1 KV head both ranks hold it. Catches: features of a rank's own heads, a mean taken for a sum, a largest of parts, a memory that
    holds one rank's share, collectives that ranks call in different order (they would wait for ever)."""
    expected = sessions(folder, kv_heads, None, RankGroup(1, 0, None))
    for index, rank in enumerate(ranks):
        for (name, config), found, whole in zip(configs(folder), rank[str(kv_heads)], expected, strict=True):
            assert found["memory"].keys() == whole["memory"].keys()
            pairs = list(zip(found["scores"], whole["scores"], strict=True))
            pairs += [(found["memory"][key], value) for key, value in whole["memory"].items()]
            for ours, all_heads in ((torch.tensor(a), torch.tensor(b)) for a, b in pairs):
                # query memory [L, H_q, D] is kept head by head: a rank has that of its own
                wanted = all_heads[:, 2 * index : 2 * index + 2] if all_heads.dim() == 3 else all_heads
                torch.testing.assert_close(ours, wanted, rtol=1e-3, atol=1e-5, msg=f"{name} {config.head}")


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_a_share_alone_says_something_else(folder, kv_heads):
    """The case tells: no rank's own heads give the scores of all of them."""
    alone = RankGroup(1, 0, None)
    for whole, part in zip(sessions(folder, kv_heads, None, alone), sessions(folder, kv_heads, 1, alone), strict=True):
        for all_heads, own in zip(whole["scores"], part["scores"], strict=True):
            apart = (torch.tensor(all_heads) - 2 * torch.tensor(own)).abs().max()
            assert apart > 0.05 * torch.tensor(all_heads).abs().max() or not any(all_heads)


if __name__ == "__main__":
    one_rank(int(sys.argv[1]), Path(sys.argv[2]))
