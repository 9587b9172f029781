"""Recording a server's pool over time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from intentkv import cli
from intentkv_eval import samples
from intentkv_eval.client import ServerClient
from intentkv_eval.runs import load
from intentkv_eval.samples import Sample, sampling

from .test_replay import FakeServer

pytestmark = pytest.mark.unit


def test_gaps_do_not_end_a_recording(tmp_path: Path) -> None:
    """Catches a run that fails because one status did, and a recording that stops there."""
    server = FakeServer(plugin=True)
    asked = 0

    async def flaky(request: httpx.Request) -> httpx.Response:
        nonlocal asked
        asked += 1
        return httpx.Response(500) if asked == 3 else httpx.Response(200, json=server.status())

    async def go() -> None:
        http = httpx.AsyncClient(transport=httpx.MockTransport(flaky), base_url="http://fake")
        async with http, sampling(ServerClient(http), tmp_path, every_s=0.01):
            while asked < 5:
                await asyncio.sleep(0.01)

    asyncio.run(go())
    lines = [Sample.model_validate_json(line) for line in (tmp_path / "pool.jsonl").read_text().splitlines()]
    # the first question only finds out whether there is a status at all
    assert len(lines) == asked - 2
    assert [line.time_s for line in lines] == sorted(line.time_s for line in lines)


def connected_to(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def connected(*_: object, **__: object) -> AsyncIterator[ServerClient]:
        async with httpx.AsyncClient(transport=server.transport(), base_url="http://fake") as http:
            yield ServerClient(http)

    monkeypatch.setattr(samples, "connect", connected)


def test_watch_writes_what_the_report_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a command that does not end, and a recording that is overwritten."""
    connected_to(FakeServer(plugin=True), monkeypatch)
    arguments = ["watch", "--out", str(tmp_path / "w"), "--seconds", "0.3", "--every", "0.1"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    (run,) = load([tmp_path / "w"]).runs
    assert run.label == "assistant 64"
    assert len(run.samples) >= 2
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 2
    assert "holds a recording already" in result.output


def test_stock_server_cannot_be_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an empty recording instead of a sentence."""
    connected_to(FakeServer(), monkeypatch)
    result = CliRunner().invoke(cli.app, ["watch", "--out", str(tmp_path / "w")])
    assert result.exit_code == 2
    assert "runs without IntentKV" in result.output
    assert not (tmp_path / "w").exists()
