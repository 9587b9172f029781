"""Cost of one eviction: which turns are compared, and what counts as one event."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from intentkv.config import ConfigError
from intentkv.templates import TEMPLATES
from intentkv_eval import bench_prune
from intentkv_eval.bench_arms import Connection, parse_arm
from intentkv_eval.bench_prompts import make_frames
from intentkv_eval.bench_prune import Event, Options, costs, measure_event
from intentkv_eval.client import ServerClient

from .test_replay import FakeServer, ids

pytestmark = pytest.mark.unit


class Evicting(FakeServer):
    """Evicts ``each`` times in every request whose budget its prompt passes; has evicted 3 times before."""

    def __init__(self, each: int = 1) -> None:
        super().__init__(plugin=True)
        self.each = each

    async def _route(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/intentkv/status":
            over = [b for b in self.bodies if len(b["input_ids"]) > b["sampling_params"]["custom_params"]["intentkv"]["budget"]]
            evicted = sum(len(b["input_ids"]) - b["sampling_params"]["custom_params"]["intentkv"]["budget"] for b in over)
            counters = {
                "prune_events": 3 + self.each * len(over),
                "pruned_tokens": 77 + evicted,
                "prune_seconds": 8 + 0.5 * len(over),
                "declined": {},
            }
            return httpx.Response(200, json={"counters": counters})
        return await super()._route(request)


def measure(server: FakeServer, arm: str = "snapkv:500") -> Event:
    async def tokenize(texts: Sequence[str]) -> list[list[int]]:
        return [ids(text) for text in texts]

    async def go() -> Event:
        options = Options(model="m", arms=[], lengths=[], repeats=1, added=64, tokens=16)
        async with httpx.AsyncClient(transport=server.transport(), base_url="http://fake") as http:
            frames = await make_frames(TEMPLATES["chatml"], tokenize)
            return await measure_event(Connection(ServerClient(http), http), frames, parse_arm(arm), 3000, options, "seed")

    return asyncio.run(go())


def test_one_turn_evicts_and_the_one_before_is_its_twin() -> None:
    """Catches an eviction during the build, and twins of different sizes."""
    server = Evicting()
    event = measure(server)
    assert (event.length, event.evicted_tokens, event.event_s) == (3000, 2500, 0.5)
    build, plain, pruned = server.bodies
    assert [len(body["input_ids"]) for body in (build, plain, pruned)] == [2840, 2920, 3000]
    assert len({body["sampling_params"]["max_new_tokens"] for body in server.bodies}) == 1
    assert {body["session_id"] for body in server.bodies} == {"seed"}
    options = [body["sampling_params"]["custom_params"]["intentkv"] for body in server.bodies]
    assert [o["method"] for o in options] == ["snapkv"] * 3
    assert options[2]["budget"] == 500
    assert min(options[0]["budget"], options[1]["budget"]) > 10**6
    # each prompt continues the one before, so only the new tokens are computed
    assert plain["input_ids"][:2840] == build["input_ids"]
    assert pruned["input_ids"][:2920] == plain["input_ids"]


@pytest.mark.parametrize(("server", "arm"), [(Evicting(each=2), "snapkv:500"), (Evicting(), "snapkv:5000"), (Evicting(each=0), "snapkv:9")])
def test_anything_but_one_eviction_is_no_measurement(server: Evicting, arm: str) -> None:
    """Catches a time of no event, or of several, reported as that of one."""
    with pytest.raises(ConfigError, match="not once"):
        measure(server, arm)


def test_stock_server_is_one_sentence() -> None:
    """Catches a traceback, or figures of a server that cannot evict."""
    with pytest.raises(ConfigError, match="has no plugin"):
        measure(FakeServer())


def test_costs_are_medians_of_each_arm_and_length() -> None:
    """Catches arms or lengths thrown together, and a share of mean times that one slow turn decides."""

    def event(arm: str, length: int, event_s: float, turn_s: float) -> Event:
        return Event(arm=arm, length=length, evicted_tokens=length // 2, event_s=event_s, turn_s=turn_s, plain_turn_s=1.0)

    events = [event("a", 100, s, t) for s, t in ((0.01, 2.0), (0.02, 1.0), (0.09, 100.0))] + [
        event("a", 200, 1.0, 2.0),
        event("b", 100, 3.0, 4.0),
    ]
    found = {(cost.arm, cost.length): cost for cost in costs(events)}
    assert len(found) == 3
    cost = found["a", 100]
    assert (cost.events, cost.p50_s, cost.max_s, cost.added_s, cost.evicted_tokens) == (3, 0.02, 0.09, 1.0, 50)
    assert cost.share_of_turn == pytest.approx(0.005)


@pytest.mark.parametrize(("arguments", "message"), [(["--arm", "snapkv"], "has no budget"), (["--length", "2000"], "no history")])
def test_impossible_measurement_is_found_before_a_server_starts(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a server start for arms that evict nothing, or lengths that are all forced keep."""

    async def open_frames(model: str) -> Any:
        raise AssertionError("too late")

    monkeypatch.setattr(bench_prune, "open_frames", open_frames)
    result = CliRunner().invoke(bench_prune.app, ["--model", "m", "--out", str(tmp_path), *arguments])
    assert result.exit_code == 2
    assert message in result.output
