"""Decode step over length: what is asked of the server, and what a step is compared with."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from intentkv.templates import TEMPLATES
from intentkv_eval import bench_arms, bench_decode
from intentkv_eval.bench_arms import Connection, Endpoint, parse_arm
from intentkv_eval.bench_decode import LAST_TOKENS, Batch, Cell, make_cell, ratios, stock_step, tokens_needed
from intentkv_eval.bench_prompts import Frames, make_frames
from intentkv_eval.bench_steps import Steps, Timed
from intentkv_eval.client import ServerClient
from intentkv_eval.provenance import Provenance
from intentkv_eval.server import Server

from .test_replay import FakeServer, ids

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def frames() -> Frames:
    async def tokenize(texts: Sequence[str]) -> list[list[int]]:
        return [ids(text) for text in texts]

    return asyncio.run(make_frames(TEMPLATES["chatml"], tokenize))


class Whole(FakeServer):
    """Also answers without a stream."""

    async def _route(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/generate" and not json.loads(request.content).get("stream"):
            body = json.loads(request.content)
            self.bodies.append(body)
            self.cached.append(body["input_ids"])
            meta = {"prompt_tokens": len(body["input_ids"]), "cached_tokens": 0, "completion_tokens": 1, "finish_reason": None}
            return httpx.Response(200, json={"output_ids": [100], "meta_info": meta})
        return await super()._route(request)


def test_measured_prompts_are_exactly_as_long_as_asked_and_cached_but_for_their_end(frames: Frames) -> None:
    """Catches a prefill of the whole prompt beside the measured steps, and a length that is off."""
    server = Whole()
    arm = parse_arm("snapkv:64")

    async def go() -> list[Steps]:
        async with httpx.AsyncClient(transport=server.transport(), base_url="http://fake") as http:
            batch = Batch(Connection(ServerClient(http), http), frames, 3, arm.request, "seed")
            found = []
            for length in (1024, 3000):
                await batch.reach(length)
                found.append(await batch.decode(length, 16))
            return found

    for length, steps in zip((1024, 3000), asyncio.run(go()), strict=True):
        assert [request.prompt_tokens for request in steps.requests] == [length] * 3
        assert all(length - LAST_TOKENS <= request.cached_tokens < length for request in steps.requests)
    assert server.most_running == 3
    assert len({body["session_id"] for body in server.bodies}) == 3
    assert len({tuple(body["input_ids"]) for body in server.bodies}) == len(server.bodies) == 12
    assert all(body["sampling_params"]["custom_params"] == {"intentkv": {"method": "snapkv", "budget": 64}} for body in server.bodies)


def test_attended_tokens_are_the_live_ones_in_the_middle_of_the_decode() -> None:
    """Catches logical tokens taken for attended ones, and the two arms counted at different moments."""

    def steps(figures: dict[str, int] | None) -> Steps:
        return Steps(0.5, 0.6, 9, [Timed([1] * 100, 1000, 900, figures, 0.0, [(0.0, 1), (1.0, 2)])])

    assert make_cell(parse_arm("stock"), 1, 1000, steps(None)).attended_tokens == 1050
    assert make_cell(parse_arm("snapkv:64"), 1, 1000, steps({"live_tokens": 264})).attended_tokens == 214


def cell(arm: str, length: int, attended: float, step_s: float, batch: int = 1, skipped: str | None = None) -> Cell:
    return Cell(arm=arm, batch=batch, length=length, attended_tokens=attended, step_s=step_s, skipped=skipped)


def test_ratios_are_to_stock_at_the_same_logical_and_the_same_live_length() -> None:
    """Catches stock of another batch size, a length that was skipped, and live lengths compared with logical ones."""
    cells = [
        cell("stock", 4000, 4064, 4.0),
        cell("stock", 8000, 8064, 8.0),
        cell("stock", 4000, 4064, 400.0, batch=8),
        cell("stock", 64000, 0, 0.0, skipped="needs more"),
        cell("a:4000", 8000, 4064, 4.4),
        cell("a:6000", 8000, 6064, 6.6),
        cell("a:6000", 64000, 6064, 6.6),
        cell("a:1000", 8000, 1000, 1.0),
    ]
    found = {(ratio.arm, ratio.length): ratio for ratio in ratios(cells)}
    assert found["a:4000", 8000].same_logical == pytest.approx(0.55)
    assert found["a:4000", 8000].same_live == pytest.approx(1.1)
    assert found["a:6000", 8000].same_live == pytest.approx(6.6 / 6.0)  # half way between the two stock lengths
    assert found["a:6000", 64000].same_logical is None
    assert found["a:1000", 8000].same_live is None
    assert stock_step([], 5) is None


def test_pool_need_knows_what_is_pruned() -> None:
    """Catches a batch that is left out although it fits once pruned, and one that cannot fit while it is built."""
    stock, pruned = parse_arm("stock"), parse_arm("snapkv:4096")
    assert tokens_needed(stock, 32, 65536, 128) == 32 * (65536 + 128)
    assert tokens_needed(pruned, 32, 65536, 128) < 500_000
    assert tokens_needed(pruned, 1, 65536, 128) >= 65536 + 128
    assert tokens_needed(pruned, 8, 2048, 128) == tokens_needed(stock, 8, 2048, 128)


def test_command_measures_all_arms_and_lists_what_does_not_fit(frames: Frames, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches cells that vanish, a server start for each arm, and lengths that no conversation can walk through."""
    started: list[list[str]] = []

    @contextmanager
    def running(arguments: list[str], log: Path, timeout_s: float) -> Iterator[Server]:
        started.append(arguments)
        yield Server("http://x", 0, log)

    async def provenance(url: str, timeout_s: float) -> Provenance:
        server = {"max_total_num_tokens": 10_000}
        return Provenance(command=[], started="", git_commit=None, python="", platform="", versions={}, server=server)

    async def open_frames(model: str) -> Any:
        return None, None, frames

    async def measure(endpoint: Endpoint, frames: Frames, arm: Any, batch: int, options: Any, pool: int, progress: Any) -> list[Cell]:
        return [
            cell(arm.name, n, n, 1.0, batch, "full" if tokens_needed(arm, batch, n, options.tokens) > pool else None)
            for n in options.lengths
        ]

    monkeypatch.setattr(bench_arms, "running_server", running)
    monkeypatch.setattr(bench_arms, "server_provenance", provenance)
    monkeypatch.setattr(bench_decode, "open_frames", open_frames)
    monkeypatch.setattr(bench_decode, "measure", measure)
    arguments = ["--model", "m", "--out", str(tmp_path), "--arm", "stock", "--arm", "snapkv:1024", "--arm", "snapkv:2048"]
    lengths = ["--length", "2048", "--length", "4096"]
    result = CliRunner().invoke(bench_decode.app, [*arguments, *lengths, "--batch", "1", "--batch", "4"])
    assert result.exit_code == 0, result.output
    assert len(started) == 2
    written = bench_decode.Result.model_validate_json((tmp_path / "bench_decode.json").read_text())
    assert len(written.cells) == 12
    assert [(c.arm, c.batch, c.length) for c in written.cells if c.skipped] == [
        ("stock", 4, 4096),
        ("snapkv:1024", 4, 4096),
        ("snapkv:2048", 4, 4096),
    ]
    assert "does not fit" in result.output
    result = CliRunner().invoke(bench_decode.app, [*arguments, "--out", str(tmp_path / "b"), "--length", "2048", "--length", "2100"])
    assert result.exit_code == 2
    assert "too close" in result.output
