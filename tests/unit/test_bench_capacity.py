"""Throughput at equal memory: what is played, what the window counts, what is compared. Servers are replaced by one in process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from intentkv.config import ConfigError
from intentkv.templates import TEMPLATES
from intentkv_eval import bench_arms, bench_capacity
from intentkv_eval.bench_arms import Connection, Endpoint, parse_arm
from intentkv_eval.bench_capacity import Cell, Options, Pool, Traffic, Turn, Window, make_cell, observe, pool_tokens, ratios, recomputed
from intentkv_eval.bench_counters import PruneCounters
from intentkv_eval.bench_prompts import Frames, MessageSize, Session, TurnSize, make_frames
from intentkv_eval.client import ServerClient
from intentkv_eval.provenance import Provenance
from intentkv_eval.server import Server, ServerError
from intentkv_eval.turns import Percentiles

from .test_replay import FakeServer, _common, ids

pytestmark = pytest.mark.unit


async def tokenize(texts: Sequence[str]) -> list[list[int]]:
    return [ids(text) for text in texts]


@pytest.fixture(scope="module")
def frames() -> Frames:
    return asyncio.run(make_frames(TEMPLATES["chatml"], tokenize))


def session(name: str, turns: int, tool: int = 40) -> Session:
    first = (MessageSize("system", 30), MessageSize("user", 35))
    sizes = [TurnSize(first if k == 0 else (MessageSize("tool", tool + k),), 3 + k % 4) for k in range(turns)]
    markers = len(ids("<|im_start|>assistant\n"))
    total = sum(sum(m.tokens for m in size.added) + markers + size.completion_tokens + 2 for size in sizes)
    return Session(name, tuple(sizes), total - 2)


SESSIONS = [session("a", 4), session("b", 6, tool=50), session("c", 3, tool=60)]


class Stalling(FakeServer):
    """Answers the first requests and leaves all later ones without an end."""

    def __init__(self, answers: int, **options: Any) -> None:
        super().__init__(**options)
        self.answers = answers
        self.abandoned = 0

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        if len(self.bodies) > self.answers:
            try:
                await asyncio.Event().wait()
            finally:
                self.abandoned += 1
        async for chunk in super()._stream(body):
            yield chunk


def play(
    server: FakeServer, frames: Frames, sessions: Sequence[Session] = SESSIONS, arm: str = "assistant:64", **options: Any
) -> tuple[list[Turn], Window]:
    settings = Options(**{"input": [], "model": "m", "arms": [arm], "concurrent": 2, "seconds": 0.2, "warmup_s": 5, **options})
    turns: list[Turn] = []

    async def go() -> Window:
        async with httpx.AsyncClient(transport=server.transport(), base_url="http://fake") as http:
            client = ServerClient(http)
            traffic = Traffic(client, frames, sessions, parse_arm(arm), settings, turns.append)
            return await asyncio.wait_for(observe(Connection(client, http), traffic, settings), 60)

    return turns, asyncio.run(go())


def test_turn_in_flight_at_the_end_is_given_up_and_not_counted(frames: Frames) -> None:
    """Catches a window that waits for the last turns, or counts what they have so far, or takes given-up lanes for lost ones."""
    server = Stalling(answers=9)
    turns, window = play(server, frames)
    assert len(server.bodies) == 11  # both lanes hang in their next request
    assert server.abandoned == 2
    assert len(turns) == 9
    assert all(turn.ok and turn.finished_s <= window.closed for turn in turns)
    assert (window.warm, window.lanes_lost) == (True, 0)


def turn(finished_s: float, **fields: Any) -> Turn:
    values: dict[str, Any] = {"trajectory": "0/0/a", "source": "bench", "turn": 0, "arm": "x", "status": "ok", "prompt_tokens": 100}
    return Turn(**{**values, "finished_s": finished_s, **fields})


def test_window_counts_what_finished_inside_it() -> None:
    """Catches turns of the warm-up or of the end in the throughput, and failed turns that leave the denominators."""
    turns = [
        turn(10.0, generated=50, cached_tokens=100),  # as the window opened: the warm-up's
        turn(10.1, generated=20, cached_tokens=60, last=True, logical=120, new_tokens=30),
        turn(11.0, status="error: full"),
        turn(15.0, generated=30, cached_tokens=90, logical=130, new_tokens=10),  # as it closed
        turn(15.1, generated=70, cached_tokens=100, last=True, status="error: late"),
    ]
    cell = make_cell("x", Pool(0.3, 900), 1, Window(10.0, 15.0, True, 0, None), turns, ["Traceback"])
    assert (cell.turns, cell.failed_turns, cell.tasks) == (2, 1, 1)
    assert (cell.turns_per_s, cell.tasks_per_s, cell.generated_tokens_per_s) == (0.4, 0.2, 10.0)
    assert cell.prefix_hit_rate == (60 + 90) / 300
    assert (cell.new_tokens, cell.recomputed_tokens, cell.mean_logical_tokens) == (40, 10, 125)
    assert cell.ample_hit_rate == 1 - 40 / cell.prompt_tokens
    assert cell.errors == ["error: full", "error: late"]
    assert (cell.pool_share, cell.pool_tokens, cell.round, cell.prune, cell.server_errors) == (0.3, 900, 1, None, ["Traceback"])


def test_evictions_are_those_of_the_window() -> None:
    """Catches sums in place of means, and percentiles of the wrong histogram."""
    prune = PruneCounters(events=4, tokens=40, seconds=0.1, declined={"shared": 1}, buckets={0.01: 2, 0.05: 4, float("inf"): 4})
    figures = make_cell("x", Pool(0.3, 900), 0, Window(0, 1, True, 0, prune), [], None).prune
    assert figures is not None
    assert (figures.events, figures.tokens, figures.mean_s, figures.p50_s) == (4, 40, 0.025, 0.01)
    assert figures.p99_s == pytest.approx(0.01 + 0.04 * (3.96 - 2) / 2)


class Forgetful(Stalling):
    """Loses its whole cache now and then; keeps a record of everything it ever computed."""

    def __init__(self, answers: int) -> None:
        super().__init__(answers)
        self.ever: list[list[int]] = []
        self.lost: list[int] = []
        """Tokens of each request that were computed before, by a turn of the same session, and are not cached."""

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        prompt = body["input_ids"]
        if len(self.bodies) % 3 == 0:
            self.cached.clear()
        if len(self.bodies) <= self.answers:
            before = max((_common(prompt, other) for other in self.ever), default=0)
            hit = max((_common(prompt, other) for other in self.cached), default=0)
            # all sessions share their system prompt and the frame behind it
            self.lost.append(before - hit if before > 30 + len(ids("<|im_start|>user")) + 2 else 0)
            self.ever.append(prompt + self.output(body["sampling_params"]["max_new_tokens"])[:-1])
        async for chunk in super()._stream(body):
            yield chunk


def test_recomputed_tokens_are_those_the_server_had_computed_before(frames: Frames) -> None:
    """Catches new tokens among the recomputed ones. Oracle: the server, which remembers every prefix it ever computed."""
    server = Forgetful(answers=24)
    turns, _ = play(server, frames, concurrent=1)
    assert len(turns) == 24
    assert sum(lost > 0 for lost in server.lost) > 4
    assert recomputed(turns) == sum(server.lost)
    assert [turn.new_tokens for turn in turns] == [
        turn.prompt_tokens - turn.cached_tokens - lost for turn, lost in zip(turns, server.lost, strict=True)
    ]


def test_token_of_the_overlap_does_not_hide_a_recomputed_one() -> None:
    """Catches negative counts: a server with overlap has computed one token more than can be known."""
    ahead = turn(0, prompt_tokens=100, cached_tokens=91, new_tokens=10)
    behind = turn(0, prompt_tokens=100, cached_tokens=80, new_tokens=10)
    assert recomputed([ahead, behind, turn(0, status="error: x", new_tokens=0)]) == 10


def test_lanes_start_spread_and_play_on(frames: Frames) -> None:
    """Catches lanes in step, sessions that repeat their content, and a session counted as done when it is not."""
    sessions = [session("a", 4), session("b", 4)]
    turns, _ = play(Stalling(answers=17), frames, sessions, concurrent=4)
    first = {}
    for recorded in turns:
        first.setdefault(recorded.trajectory, recorded.turn)
    assert {name: first[name] for name in ("0/0/a", "1/0/b", "2/0/a", "3/0/b")} == {"0/0/a": 0, "1/0/b": 1, "2/0/a": 2, "3/0/b": 3}
    assert all(number == 0 for name, number in first.items() if name.split("/")[1] != "0")
    assert [t.last for t in turns] == [t.turn == 3 for t in turns]


def test_all_arms_get_the_same_prompts(frames: Frames) -> None:
    """Catches arms that do different work; only options and session ids may differ."""
    stock, plugin = Stalling(answers=11), Stalling(answers=11)
    play(stock, frames, arm="stock", concurrent=1)
    play(plugin, frames, arm="snapkv:64", concurrent=1)
    assert [body["input_ids"] for body in stock.bodies] == [body["input_ids"] for body in plugin.bodies]
    assert len({tuple(body["input_ids"]) for body in stock.bodies}) == 12
    assert all("custom_params" not in body["sampling_params"] for body in stock.bodies)
    assert {json.dumps(b["sampling_params"]["custom_params"]) for b in plugin.bodies} == {
        '{"intentkv": {"method": "snapkv", "budget": 64}}'
    }
    assert len({body["session_id"] for body in plugin.bodies}) == 3  # of 4 + 6 + 3 turns


def test_server_that_only_refuses_ends_the_cell(frames: Frames) -> None:
    """Catches a dead server that is asked thousands of times, or that passes for a slow one."""
    server = FakeServer()
    server.fail = {k: httpx.Response(500) for k in range(100)}
    turns, window = play(server, frames, seconds=50)
    assert len(turns) == len(server.bodies) == 6
    assert window.lanes_lost == 2
    cell = make_cell("x", Pool(1, 1), 0, window, turns, None)
    assert cell.errors == ["error: HTTP 500: Internal Server Error"]


def test_pool_is_a_share_of_what_runs_at_a_time() -> None:
    """Catches a working set of all sessions, and a pool that cannot hold the longest one."""
    sessions = [Session("a", (), 1000), Session("b", (), 3000)]
    assert pool_tokens(sessions, 4, 0.5) == 4000
    with pytest.raises(ConfigError, match=r"3000 tokens, a pool of 0\.3 has 2400"):
        pool_tokens(sessions, 4, 0.3)


def cell(arm: str, share: float, round_number: int, turns_per_s: float, ttft: float | None = 1.0) -> Cell:
    base = make_cell(arm, Pool(share, 1), round_number, Window(0, 1, True, 0, None), [], None)
    values = Percentiles(p50=ttft, p95=ttft, p99=ttft) if ttft is not None else None
    return base.model_copy(update={"turns_per_s": turns_per_s, "tasks_per_s": 0.0, "ttft_s": values})


def test_ratios_pair_arm_and_stock_of_one_pool_and_round() -> None:
    """Catches ratios across pools or rounds, means that one slow round spoils, and divisions by zero."""
    cells = [
        *(cell("stock", 0.3, n, value) for n, value in enumerate((1.0, 2.0, 4.0))),
        *(cell("a:1", 0.3, n, value) for n, value in enumerate((3.0, 2.0, 40.0))),
        cell("stock", 0.6, 0, 5.0, ttft=2.0),
        cell("a:1", 0.6, 0, 10.0, ttft=1.0),
        cell("a:1", 0.6, 1, 99.0),  # no stock in that round
        cell("b:1", 0.15, 0, 9.0),  # no stock with that pool
    ]
    found = {(ratio.arm, ratio.pool_share): ratio for ratio in ratios(cells)}
    assert set(found) == {("a:1", 0.3), ("a:1", 0.6)}
    assert found["a:1", 0.3].turns == 3.0
    assert (found["a:1", 0.6].turns, found["a:1", 0.6].ttft_p50) == (2.0, 0.5)
    assert found["a:1", 0.6].tasks is None
    assert found["a:1", 0.6].tpot_p50 is None


class Stage:
    """Replaces servers and measurements and notes what they are asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, frames: Frames) -> None:
        self.servers: list[str] = []
        self.up: set[str] = set()
        self.cells: list[tuple[str, float, int, int]] = []
        self.pool = 10**6
        self.fails = False
        self.lost = 0
        monkeypatch.setattr(bench_arms, "running_server", self._server)
        monkeypatch.setattr(bench_arms, "server_provenance", self._provenance)
        monkeypatch.setattr(bench_capacity, "run_cell", self._cell)
        monkeypatch.setattr(bench_capacity, "open_frames", self._open(frames))

    @contextmanager
    def _server(self, arguments: list[str], log: Path, timeout_s: float) -> Iterator[Server]:
        if self.fails:
            raise ServerError("The server exited with status 1.")
        self.servers.append(" ".join(arguments))
        url = f"http://{'stock' if '--stock' in arguments else 'plugin'}"
        self.up.add(url)
        yield Server(url, 0, log)
        self.up.remove(url)

    async def _provenance(self, url: str, timeout_s: float) -> Provenance:
        server = {"max_total_num_tokens": self.pool}
        return Provenance(command=[], started="", git_commit=None, python="", platform="", versions={}, server=server)

    def _open(self, frames: Frames) -> Callable[[str], Any]:
        async def open_frames(model: str) -> Any:
            return TEMPLATES["chatml"], tokenize, frames

        return open_frames

    async def _cell(self, endpoint: Endpoint, frames: Frames, sessions: Any, arm: Any, options: Any, pool: Pool, number: int) -> Any:
        assert not self.up or endpoint.url in self.up
        self.cells.append((arm.name, pool.share, pool.tokens, number))
        found = make_cell(arm.name, pool, number, Window(0, 1, True, self.lost, None), [turn(0.5)], None)
        return found, [turn(0.5)]


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, frames: Frames) -> Stage:
    return Stage(monkeypatch, frames)


def command(tmp_path: Path, *arguments: str) -> Result:
    data = tmp_path / "data.jsonl"
    messages = [{"role": role, "content": role * 9} for role in ("system", "user", "assistant", "tool", "assistant")]
    data.write_text("".join(json.dumps({"id": f"t{k}", "messages": messages}) + "\n" for k in range(3)))
    base = ["--input", str(data), "--model", "m", "--out", str(tmp_path / "out"), "--sessions", "2", "--concurrent", "10"]
    return CliRunner().invoke(bench_capacity.app, [*base, *arguments])


ARMS = ["--arm", "stock", "--arm", "snapkv:64", "--arm", "assistant:64"]


def test_one_server_for_each_kind_and_pool_and_arms_take_turns(stage: Stage, tmp_path: Path) -> None:
    """Catches a server start for every arm, arms in blocks, unequal flags, and results that cannot be traced."""
    result = command(tmp_path, *ARMS, "--pool", "0.5", "--pool", "0.25", "--rounds", "2", "--dtype", "x")
    assert result.exit_code == 0, result.output
    (size,) = {tokens for _, share, tokens, _ in stage.cells if share == 0.5}
    flags = f"--max-total-tokens {size} --dtype x"
    assert stage.servers[:2] == [f"--model m --stock {flags}", f"--model m --method assistant {flags}"]
    assert len(stage.servers) == 4
    assert [(arm, number) for arm, share, _, number in stage.cells if share == 0.5] == [
        ("stock", 0),
        ("stock", 1),
        *((arm, number) for number in range(2) for arm in ("snapkv:64", "assistant:64")),
    ]
    written = bench_capacity.Result.model_validate_json((tmp_path / "out" / "bench_capacity.json").read_text())
    assert len(written.cells) == 12
    assert {(r.arm, r.pool_share, r.turns) for r in written.ratios} == {
        (arm, share, 1.0) for arm in ("snapkv:64", "assistant:64") for share in (0.5, 0.25)
    }
    assert written.origin.data_sha256 is not None
    assert len(written.session_tokens) == 2
    assert len((tmp_path / "out" / "turns.jsonl").read_text().splitlines()) == 12
    assert command(tmp_path, *ARMS).exit_code == 2  # another run's results are kept


def test_together_stock_takes_turns_too(stage: Stage, tmp_path: Path) -> None:
    """Catches a drift of the machine that meets one kind of server only."""
    assert command(tmp_path, *ARMS, "--pool", "0.5", "--rounds", "2", "--together").exit_code == 0
    assert [(arm, number) for arm, _, _, number in stage.cells] == [
        (arm, number) for number in range(2) for arm in ("stock", "snapkv:64", "assistant:64")
    ]


def test_servers_that_run_already_are_used_as_they_are(stage: Stage, tmp_path: Path) -> None:
    """Catches a pool that is not what those servers have."""
    result = command(tmp_path, *ARMS, "--url-stock", "http://s", "--url-plugin", "http://p")
    assert result.exit_code == 0, result.output
    assert stage.servers == []
    assert {tokens for _, _, tokens, _ in stage.cells} == {stage.pool}


def test_failures_are_the_exit_status(stage: Stage, tmp_path: Path) -> None:
    """Catches a run without a result that looks like a good one to a script, and tracebacks for what a user can mend."""
    stage.pool = 10
    result = command(tmp_path, *ARMS, "--pool", "0.5")
    assert result.exit_code == 2
    assert "room for 10 tokens" in result.output
    stage.pool, stage.lost = 10**6, 1
    assert command(tmp_path, *ARMS, "--pool", "0.5").exit_code == 1
    stage.fails = True
    result = command(tmp_path, *ARMS, "--out", str(tmp_path / "other"))
    assert result.exit_code == 1
    assert "exited with status 1" in result.output
    assert "Traceback" not in result.output
    assert command(tmp_path, "--sessions", "9", "--out", str(tmp_path / "third")).exit_code == 2
