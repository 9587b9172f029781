"""Arms, and what surrounds a measurement."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from intentkv.config import ConfigError
from intentkv_eval import bench_arms
from intentkv_eval.bench_arms import Endpoint, Existing, Servers, error_lines, flush_when_idle, parse_arm
from intentkv_eval.client import RequestFailed, ServerClient
from intentkv_eval.server import Server

pytestmark = pytest.mark.unit


def test_arm_says_server_and_options() -> None:
    """Catches options that would not be sent, and a stock arm with options that a stock server would refuse."""
    assert parse_arm("stock").request.model_fields_set == set()
    assert parse_arm("stock").kind == "stock"
    arm = parse_arm("snapkv:4096")
    assert (arm.kind, arm.request.method, arm.request.budget) == ("plugin", "snapkv", 4096)
    assert parse_arm("full").request.model_dump(exclude_unset=True) == {"method": "full"}


@pytest.mark.parametrize("text", ["", "no-such-method", "snapkv:", "snapkv:0", "snapkv:-1", "snapkv:many", "stock:8192"])
def test_bad_arm_is_one_sentence(text: str) -> None:
    """Catches an arm that is found to be wrong only after a server was started for it."""
    with pytest.raises(ConfigError):
        parse_arm(text)


def test_only_new_lines_that_look_like_errors_are_reported(tmp_path: Path) -> None:
    """Catches errors of an arm that are booked on the next one, and harmless lines that mention errors."""
    log = tmp_path / "server.log"
    assert error_lines(None) is None
    assert error_lines(log) is None
    log.write_text("[x] ERROR: old\n")
    start = bench_arms.log_size(log)
    with log.open("a") as file:
        file.write("INFO: no error\nRuntimeError: pool\nTraceback (most recent call last):\nerrors=0\n[x] ERROR new\n")
    assert error_lines(log, start) == ["RuntimeError: pool", "Traceback (most recent call last):", "[x] ERROR new"]
    assert error_lines(log, bench_arms.log_size(log)) == []


def flush(refusals: int, patience_s: float) -> int:
    """Flush a server that refuses so many times; how often it was asked."""
    asked = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal asked
        asked += 1
        return httpx.Response(400 if asked <= refusals else 200, text="requests are running")

    async def go() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://fake") as http:
            await flush_when_idle(ServerClient(http), patience_s)

    asyncio.run(go())
    return asked


def test_flush_waits_for_given_up_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an arm that starts with the cache of the one before, and a wait without end."""
    monkeypatch.setattr(bench_arms, "_POLL_S", 0.0)
    assert flush(refusals=3, patience_s=60) == 4
    with pytest.raises(RequestFailed, match="requests are running"):
        flush(refusals=10**9, patience_s=0)


def test_server_is_started_with_the_flags_of_its_kind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches kinds that differ in more than the plugin, a plugin server that captures nothing, and a second server beside a given one."""
    started: list[list[str]] = []

    @contextmanager
    def running(arguments: list[str], log: Path, timeout_s: float) -> Iterator[Server]:
        started.append(arguments)
        yield Server("http://new", 1, log)

    monkeypatch.setattr(bench_arms, "running_server", running)
    servers = Servers("m", ["--dtype", "x"], tmp_path, 1, Existing())
    with servers.serve("stock", flags=["--pool", "9"]) as stock, servers.serve("plugin", "-a", flags=["--pool", "9"]) as plugin:
        assert stock.log != plugin.log
    assert started[0] == ["--model", "m", "--stock", "--pool", "9", "--dtype", "x"]
    assert started[1] == ["--model", "m", "--method", "assistant", "--pool", "9", "--dtype", "x"]
    given = Endpoint("http://given", None)
    servers = servers._replace(existing=Existing(plugin=given))
    with servers.serve("plugin") as plugin:
        assert plugin == given
    with pytest.raises(ConfigError, match="--url-stock"), servers.serve("stock"):
        pass
    assert len(started) == 2


def test_picture_is_optional_where_plotly_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches measured results that are lost for want of a drawing library, and other missing modules that go unnoticed."""

    def missing(name: str) -> str:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    file = tmp_path / "bench_decode.json"
    bench_arms.write_picture(file, lambda: missing("plotly"))
    assert "bench_pictures" in capsys.readouterr().out
    with pytest.raises(ModuleNotFoundError):
        bench_arms.write_picture(file, lambda: missing("numpy"))
    bench_arms.write_picture(file, lambda: "page")
    assert (tmp_path / "bench_decode.html").read_text() == "page"
