"""Closed-loop replay, against a small server in process that speaks SGLang's protocol."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from intentkv.config import ConfigError
from intentkv.trajectories import Dataset, Message, ToolCall, Trajectory
from intentkv_eval import client as client_module
from intentkv_eval import replay as replay_module
from intentkv_eval.client import ServerClient, connect
from intentkv_eval.replay import ReplayOptions, Summary, make_plans, replay_plans, request_options, run
from intentkv_eval.samples import Sample
from intentkv_eval.turns import TurnRecord, aggregate, kv_reads

pytestmark = pytest.mark.unit

START, END, NEWLINE = 1, 2, 1010


def ids(text: str) -> list[int]:
    """The fake server's tokenizer: one id a character, ChatML's markers single ids."""
    markers = {"<|im_start|>": START, "<|im_end|>": END}
    return [markers.get(piece) or ord(piece) + 1000 for piece in re.findall(r"<\|im_start\|>|<\|im_end\|>|.", text, re.DOTALL)]


class FakeServer:
    """Answers like SGLang: the k-th generated token is 100 + k, hits are the longest prefix any earlier request left behind."""

    def __init__(self, incremental: bool = False, plugin: bool = False) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.incremental = incremental
        self.plugin = plugin
        self.cached: list[list[int]] = []
        self.flushed = 0
        self.now = 0.0
        self.running = self.most_running = 0
        self.output: Callable[[int], list[int]] = lambda n: [100 + k for k in range(n)]
        self.fail: dict[int, httpx.Response] = {}
        """Replies to /generate by number, instead of the stream."""

    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self._route)

    async def _route(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/tokenize":
            body = json.loads(request.content)
            assert body["add_special_tokens"] is False
            return httpx.Response(200, json={"tokens": [ids(text) for text in body["prompt"]]})
        if path == "/generate":
            self.bodies.append(json.loads(request.content))
            failure = self.fail.get(len(self.bodies) - 1)
            return failure or httpx.Response(200, content=self._stream(self.bodies[-1]))
        if path == "/flush_cache":
            self.flushed += 1
            return httpx.Response(200, text="Cache flushed.")
        if path == "/server_info":
            return httpx.Response(200, json={"version": "0.5.17", "random_seed": 7, "api_key": "secret", "model_path": "m"})
        if path == "/intentkv/status" and self.plugin:
            return httpx.Response(200, json=self.status())
        if path == "/metrics" and self.plugin:
            return httpx.Response(200, text=EXPOSITION.format(done=len(self.bodies)))
        return httpx.Response(404 if path != "/model_info" else 200, json={})

    def status(self) -> dict[str, Any]:
        """Ten milliseconds of eviction for every request so far, after 1.5 s for 6 of another run."""
        done = len(self.bodies)
        counters = {"prune_events": 6 + done, "pruned_tokens": 30 * done, "prune_seconds": 1.5 + 0.01 * done, "declined": {"busy": done}}
        counters |= {"prompt_tokens": 0, "cached_tokens": 0, "live_cached_tokens": 0, "freed_slots": 0}
        pool = {"total": 100, "available": 100 - done, "evictable": done, "protected": 0, "private": 0, "dead": 2 * done}
        return {"versions": {"intentkv": "x"}, "method": "assistant", "budget": 64, "pool": pool, "counters": counters}

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        prompt, n = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        output = self.output(n)
        hit = max((_common(prompt, other) for other in self.cached), default=0)
        for k in range(1, len(output) + 1):
            await asyncio.sleep(0)
            self.now += 1.0 if k == 1 else 0.25
            meta: dict[str, Any] = {"prompt_tokens": len(prompt), "cached_tokens": hit, "completion_tokens": k, "finish_reason": None}
            if self.plugin:
                done = k == len(output)
                meta["intentkv"] = [FIGURES] if done else []
            yield _event({"output_ids": output[k - 1 : k] if self.incremental else output[:k], "meta_info": meta})
        self.cached.append(prompt + output[:-1])
        self.running -= 1
        yield b"data: [DONE]\n\n"


EXPOSITION = """# TYPE intentkv_prune_seconds histogram
intentkv_prune_seconds_bucket{{le="0.02"}} {done}
intentkv_prune_seconds_bucket{{le="+Inf"}} {done}
intentkv_prune_seconds_count {done}
"""
FIGURES = {
    "logical_tokens": 90,
    "live_tokens": 60,
    "dead_tokens": 30,
    "pruned_tokens": 30,
    "forced_tokens": 20,
    "target_tokens": 50,
    "live_cached_tokens": 11,
    "peak_live_tokens": 80,
}


def _common(a: list[int], b: list[int]) -> int:
    return next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


AGENT = Trajectory(
    id="agent",
    source="made",
    group="g",
    messages=(
        Message(role="system", content="S"),
        Message(role="user", content="U"),
        Message(role="assistant", content="abc"),
        Message(role="tool", content="T1"),
        Message(role="user", content="more"),
        Message(role="assistant", content="de"),
        Message(role="tool", content="T2"),
        Message(role="assistant", content="fghi"),
        Message(role="tool", content="never sent"),
    ),
)
HEAD = ids("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n")


def play(server: FakeServer, *trajectories: Trajectory, max_context: int = 8000, max_tokens: int = 512, **options: Any) -> list[TurnRecord]:
    """Replay ``trajectories`` and return the records, checking that the file holds the same."""
    settings = ReplayOptions(url="http://fake", files=[], out=Path(), **options)
    file = io.StringIO()

    async def go() -> list[TurnRecord]:
        async with httpx.AsyncClient(transport=server.transport(), base_url="http://fake") as http:
            client = ServerClient(http)
            plans = await make_plans(client, Dataset(list(trajectories), [], ""), None, max_context, max_tokens)
            return await replay_plans(client, plans, "arm", settings, file)

    records = asyncio.run(go())
    assert [TurnRecord.model_validate_json(line) for line in file.getvalue().splitlines()] == records
    return records


@pytest.mark.parametrize("incremental", [False, True])
def test_prompts_are_the_servers_own_output_and_the_recorded_messages(incremental: bool) -> None:
    """Catches any loop that is not closed: re-tokenised output, a recorded answer in place of the server's, a doubled marker."""
    server = FakeServer(incremental)
    records = play(server, AGENT)
    second = [
        *HEAD,
        *[100, 101, 102],
        *ids("<|im_end|>\n<|im_start|>tool\nT1<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"),
    ]
    third = [*second, 100, 101, *ids("<|im_end|>\n<|im_start|>tool\nT2<|im_end|>\n<|im_start|>assistant\n")]
    assert [body["input_ids"] for body in server.bodies] == [HEAD, second, third]
    for body, n in zip(server.bodies, (3, 2, 4), strict=True):
        assert body["sampling_params"] == {"temperature": 0, "max_new_tokens": n, "ignore_eos": True}
        assert body["stream"] is True
    assert [r.generated for r in records] == [3, 2, 4]
    # all of the previous prompt and output but the last token, whose KV was never computed
    assert [r.cached_tokens for r in records] == [0, len(HEAD) + 2, len(second) + 1]
    assert [r.prompt_tokens for r in records] == [len(HEAD), len(second), len(third)]
    assert all(r.status == "ok" and r.live == r.logical == r.prompt_tokens + r.generated and r.dead == 0 for r in records)


def test_end_marker_is_not_doubled_when_the_server_wrote_it() -> None:
    """Catches a conversation with two end markers after a model that stopped by itself under ignore_eos."""
    server = FakeServer()
    server.output = lambda n: [*range(100, 99 + n), END]
    play(server, AGENT)
    assert server.bodies[1]["input_ids"][: len(HEAD) + 5] == [*HEAD, 100, 101, END, NEWLINE, START]


def test_first_token_and_last_token_are_timed_in_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a TTFT taken from the response's head or its end. The clock is the fake server's own."""
    server = FakeServer()
    monkeypatch.setattr(client_module.time, "perf_counter", lambda: server.now)
    records = play(server, AGENT)
    assert [r.ttft_s for r in records] == [1.0, 1.0, 1.0]
    assert [r.latency_s for r in records] == [1.5, 1.25, 1.75]
    figures = aggregate(records, wall_s=4.5)
    assert figures.tpot_s is not None
    assert figures.tpot_s.p50 == figures.tpot_s.p99 == 0.25
    assert figures.generated_tokens_per_s == 2.0


FAILURES = {
    "HTTP 400: no such budget": lambda: httpx.Response(400, json={"error": {"message": "no such budget"}}),
    "HTTP 503: Service Unavailable": lambda: httpx.Response(503),
    "too long": lambda: httpx.Response(200, content=_event({"error": {"message": "too long"}}) + b"data: [DONE]\n\n"),
    "aborted: pool is full": lambda: httpx.Response(
        200,
        content=_event(
            {
                "output_ids": [100, 101],
                "meta_info": {
                    "completion_tokens": 2,
                    "prompt_tokens": 9,
                    "cached_tokens": 0,
                    "finish_reason": {"type": "abort", "message": "pool is full"},
                },
            }
        ),
    ),
    "the stream ended after 0 of 0 tokens": lambda: httpx.Response(200, content=b"data: [DONE]\n\n"),
    "malformed reply": lambda: httpx.Response(200, content=_event({"text": "no ids"})),
}


@pytest.mark.parametrize("message", FAILURES)
def test_failed_turn_is_recorded_and_stops_only_its_trajectory(message: str) -> None:
    """Catches failures that vanish from the record or from the denominators, and retries."""
    server = FakeServer()
    server.fail = {1: FAILURES[message]()}
    other = AGENT.model_copy(update={"id": "other"})
    records = play(server, AGENT, other, session_ids=False)
    mine = [r for r in records if r.trajectory == "agent"]
    assert mine[0].status == "ok"
    assert mine[1].status.startswith(f"error: {message}")
    assert mine[2].status == "skipped: previous turn failed"
    assert [r.status for r in records if r.trajectory == "other"] == ["ok"] * 3
    assert len(server.bodies) == 5  # no retry
    figures = aggregate(records, wall_s=1.0)
    assert (figures.turns, figures.failed_turns, figures.skipped_turns) == (6, 1, 1)
    theirs = [r for r in records if r.trajectory == "other"]
    assert [r.prompt_tokens for r in mine] == [r.prompt_tokens for r in theirs]
    assert figures.prefix_hit_rate == pytest.approx(
        (mine[0].cached_tokens + sum(r.cached_tokens for r in theirs)) / (2 * sum(r.prompt_tokens for r in theirs))
    )


def test_lost_connection_is_a_failed_turn() -> None:
    """Catches a server that dies in the middle of a replay ending it with a traceback."""
    server = FakeServer()

    async def broken(body: dict[str, Any]) -> AsyncIterator[bytes]:
        raise httpx.ReadError("connection reset")
        yield b""

    server._stream = broken  # type: ignore[method-assign]
    assert [r.status for r in play(server, AGENT)] == ["error: ReadError: connection reset", *["skipped: previous turn failed"] * 2]


def test_trajectory_is_cut_at_the_context_limit() -> None:
    """Catches a turn that grows past the limit, and one that is left out although it fits."""
    server = FakeServer()
    second = (
        len(HEAD) + 3 + len(ids("<|im_end|>\n<|im_start|>tool\nT1<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"))
    )
    assert len(play(server, AGENT, max_context=second + 2)) == 2
    assert len(play(server, AGENT, max_context=second + 1)) == 1
    assert play(server, AGENT, max_context=3) == []


def test_completions_are_capped() -> None:
    """Catches a cap that does not reach the server or the plan behind it."""
    server = FakeServer()
    records = play(server, AGENT, max_tokens=2)
    assert [body["sampling_params"]["max_new_tokens"] for body in server.bodies] == [2, 2, 2]
    assert [r.status for r in records] == ["ok"] * 3


def test_options_and_sessions_travel_with_every_request() -> None:
    """Catches options in a place where the server does not look, and two trajectories in one session."""
    server = FakeServer()
    request = request_options(method="snapkv", budget=64, budget_ratio=None, hysteresis=0)
    play(server, AGENT, AGENT.model_copy(update={"id": "other"}), request=request)
    options = [body["sampling_params"]["custom_params"]["intentkv"] for body in server.bodies]
    assert options == [{"method": "snapkv", "budget": 64, "hysteresis": 0}] * 6
    sessions = [body["session_id"] for body in server.bodies]
    assert len(set(sessions)) == 2
    assert sessions.count(sessions[0]) == 3
    play(server, AGENT, session_ids=False)
    assert "session_id" not in server.bodies[-1]
    with pytest.raises(ConfigError, match="budget"):
        request_options(budget=0)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_concurrency_is_bounded(concurrency: int) -> None:
    """Catches trajectories that all run at once, or one after the other in spite of the option."""
    server = FakeServer()
    play(server, *(AGENT.model_copy(update={"id": str(k)}) for k in range(6)), concurrency=concurrency)
    assert server.most_running == concurrency


def test_plugin_figures_are_taken_over() -> None:
    """Catches a figure under the wrong name, or read before the last chunk has it."""
    (first, *_) = play(FakeServer(plugin=True), AGENT)
    assert (first.logical, first.live, first.dead, first.pruned, first.forced, first.target) == (90, 60, 30, 30, 20, 50)
    assert (first.live_cached, first.peak_live) == (11, 80)
    assert aggregate([first], 1.0).peak_live_max == 80


@pytest.mark.parametrize(
    ("prompt", "cached", "dead", "generated"), [(300, 0, 0, 5), (300, 200, 50, 5), (1000, 999, 0, 1), (400, 144, 10, 2)]
)
def test_kv_reads_counts_every_read(prompt: int, cached: int, dead: int, generated: int) -> None:
    """Catches an off-by-one in the closed form, against a walk over blocks and steps."""
    live_cached = cached - dead if cached else 0
    reads = 0
    for start in range(cached, prompt, 128):  # one pass over the live prefix for each block of new rows
        reads += live_cached if start < prompt else 0
    for position in range(prompt, prompt + generated - 1):  # the token at `position` attends itself and everything live before it
        reads += sum(1 for _ in range(position + 1)) - dead
    assert kv_reads(prompt, cached, live_cached, dead, generated) == reads


def command(tmp_path: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[int, Path]:
    """Run the command with a client of ``server``."""

    @asynccontextmanager
    async def connected(*_: object) -> AsyncIterator[ServerClient]:
        async with httpx.AsyncClient(transport=server.transport(), base_url="http://fake") as http:
            yield ServerClient(http)

    monkeypatch.setattr(replay_module, "connect", connected)
    data = tmp_path / "data.jsonl"
    data.write_text(AGENT.model_dump_json() + "\n{\n")
    out = tmp_path / "out"
    return run(ReplayOptions(url="http://fake", files=[data], out=out, **options)), out


def test_summary_says_where_the_numbers_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a result file that cannot be traced, or that gives away the server's key."""
    server = FakeServer(plugin=True)
    status, out = command(tmp_path, server, monkeypatch)
    assert status == 0
    text = (out / "summary.json").read_text()
    assert "secret" not in text
    summary = Summary.model_validate_json(text)
    assert summary.arm == "assistant 64"
    assert summary.provenance.versions.items() >= {"sglang": "0.5.17", "intentkv": "x"}.items()
    assert summary.seeds == {"server": 7}
    assert len(summary.dataset.broken_lines) == 1
    assert summary.aggregates.turns == 3
    assert server.flushed == 1


def test_cost_of_evictions_and_the_pool_are_the_runs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches counters since the server's start, a first or last sample that is missing, and a stock server that gets a pool."""
    _, out = command(tmp_path, FakeServer(plugin=True), monkeypatch)
    prune = Summary.model_validate_json((out / "summary.json").read_text()).prune
    assert prune is not None
    assert (prune.events, prune.tokens, prune.declined) == (3, 90, {"busy": 3})
    assert (prune.mean_s, prune.p50_s) == pytest.approx((0.01, 0.01))
    samples = [Sample.model_validate_json(line) for line in (out / "pool.jsonl").read_text().splitlines()]
    assert [sample.pool.evictable for sample in (samples[0], samples[-1])] == [0, 3]
    assert samples[0].time_s <= samples[-1].time_s
    stock = tmp_path / "stock"
    stock.mkdir()
    _, out = command(stock, FakeServer(), monkeypatch)
    assert Summary.model_validate_json((out / "summary.json").read_text()).prune is None
    assert not (out / "pool.jsonl").exists()


def test_tool_calls_are_the_turns_own() -> None:
    """Catches calls counted one turn late, or those of a message that is no turn."""
    call = {"name": "f", "arguments": {"x": 1}}
    messages = [m.model_copy(update={"tool_calls": (ToolCall(**call),)}) if m.content in ("abc", "de") else m for m in AGENT.messages]
    records = play(FakeServer(), AGENT.model_copy(update={"messages": tuple(messages)}))
    assert [(r.tool_calls, r.duplicate_calls) for r in records] == [(1, 0), (1, 1), (0, 0)]


def test_run_is_not_overwritten_and_failure_is_the_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a run that replaces another's results, and a failed one that looks like a good one to a script."""
    server = FakeServer()
    server.fail = {0: httpx.Response(500)}
    status, out = command(tmp_path, server, monkeypatch, flush=False)
    assert status == 1
    assert server.flushed == 0
    assert json.loads((out / "summary.json").read_text())["arm"] == "stock"
    with pytest.raises(ConfigError, match="holds a run already"):
        command(tmp_path, server, monkeypatch)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "127.0.0.1", "http://[", "ftp://x"])
def test_no_server_is_one_sentence(url: str) -> None:
    """Catches a traceback from the HTTP library for a server that is not there or an address that is none."""

    async def go() -> None:
        async with connect(url, timeout_s=5):
            pass

    with pytest.raises(ConfigError, match="No server answers"):
        asyncio.run(go())
