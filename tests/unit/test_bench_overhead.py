"""Cost of a plugin that prunes nothing: pairs, their order, and the interval of the median."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import groupby
from typing import Any

import httpx
import pytest

from intentkv.templates import TEMPLATES
from intentkv_eval import bench_overhead, bench_steps
from intentkv_eval.bench_arms import Connection, Endpoint, parse_arm
from intentkv_eval.bench_overhead import Comparison, Options, compare, median_interval
from intentkv_eval.bench_prompts import Frames, make_frames
from intentkv_eval.client import ServerClient

from .test_bench_decode import Whole
from .test_replay import FIGURES, ids

pytestmark = pytest.mark.unit


def test_interval_holds_the_median_and_narrows_with_more_pairs() -> None:
    """Catches an interval of the mean, which one slow pair moves, and one that does not depend on the data."""
    draw = random.Random(1)
    few = [draw.gauss(1.0, 0.05) for _ in range(9)]
    many = [draw.gauss(1.0, 0.05) for _ in range(400)]
    narrow, wide = median_interval(many, 0), median_interval(few, 0)
    for values, interval in ((many, narrow), (few, wide)):
        assert interval.median == statistics.median(values)
        assert min(values) <= interval.low <= interval.median <= interval.high <= max(values)
    # the textbook: standard error of a normal sample's median is 1.2533 sigma / sqrt(n)
    assert narrow.high - narrow.low == pytest.approx(2 * 1.96 * 1.2533 * 0.05 / 20, rel=0.35)
    assert wide.high - wide.low > narrow.high - narrow.low
    assert median_interval([*many, 50.0], 0).high < 1.1
    assert median_interval(few, 3) == median_interval(few, 3)


class Clocked(Whole):
    """Takes its time on a clock that all servers share; never prunes unless told."""

    def __init__(self, name: str, slow: float, clock: list[float], order: list[str]) -> None:
        super().__init__(plugin=name == "plugin")
        self.name, self.slow, self.clock, self.order = name, slow, clock, order
        self.pruned = 0

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        self.order.append(self.name)
        async for chunk in super()._stream(body):
            self.clock[0] += self.slow
            yield chunk.replace(f'"pruned_tokens": {FIGURES["pruned_tokens"]},'.encode(), f'"pruned_tokens": {self.pruned},'.encode())


def run(monkeypatch: pytest.MonkeyPatch, pruned: int = 0) -> tuple[Comparison, list[str], dict[str, Clocked]]:
    clock, order = [0.0], []
    servers = {"http://stock": Clocked("stock", 1.0, clock, order), "http://plugin": Clocked("plugin", 1.25, clock, order)}
    servers["http://plugin"].pruned = pruned

    @asynccontextmanager
    async def connection(url: str, timeout_s: float, concurrency: int) -> AsyncIterator[Connection]:
        async with httpx.AsyncClient(transport=servers[url].transport(), base_url=url) as http:
            yield Connection(ServerClient(http), http)

    async def tokenize(texts: Sequence[str]) -> list[list[int]]:
        return [ids(text) for text in texts]

    async def go() -> Comparison:
        frames: Frames = await make_frames(TEMPLATES["chatml"], tokenize)
        stock, plugin = Endpoint("http://stock", None), Endpoint("http://plugin", None)
        options = Options(model="m", arms=[], lengths=[], batch=1, pairs=4, tokens=16)
        return await compare(stock, plugin, frames, parse_arm("assistant:100000"), 1024, options)

    monkeypatch.setattr(bench_overhead, "connection", connection)
    monkeypatch.setattr(bench_steps.time, "perf_counter", lambda: clock[0])
    return asyncio.run(go()), order, servers


def test_servers_take_turns_in_alternating_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches blocks of one server, an order that always favours the same one, and ratios upside down."""
    found, order, _ = run(monkeypatch)
    assert [name for name, _ in groupby(order)] == ["plugin", "stock", "plugin", "stock", "plugin", "stock"]
    assert order == ["plugin"] * 2 + ["stock"] * 4 + ["plugin"] * 4 + ["stock"] * 4 + ["plugin"] * 4 + ["stock"] * 2
    assert len(found.pairs) == 4  # the first pair warms up
    assert (found.step.median, found.step.low, found.step.high) == (1.25, 1.25, 1.25)
    assert found.prefill.median == 1.25
    assert found.pruned_tokens == 0


def test_both_servers_get_the_same_prompts_and_prefills_are_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a comparison of different work, and a prefill that is a cache hit."""
    _, _, servers = run(monkeypatch)
    stock, plugin = servers.values()
    assert [body["input_ids"] for body in stock.bodies] == [body["input_ids"] for body in plugin.bodies]
    cold = [body["input_ids"] for body in stock.bodies if body.get("stream") and body["sampling_params"]["max_new_tokens"] == 1]
    assert len(cold) == 5
    assert {len(prompt) for prompt in cold} == {1024}
    assert len({tuple(prompt[:20]) for prompt in cold}) == 5
    assert all("custom_params" not in body["sampling_params"] for body in stock.bodies)
    assert all(body["sampling_params"]["custom_params"]["intentkv"]["budget"] == 100000 for body in plugin.bodies)


def test_pruning_voids_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a budget that was reached after all and is reported as the cost of nothing."""
    found, _, _ = run(monkeypatch, pruned=7)
    assert found.pruned_tokens > 0
