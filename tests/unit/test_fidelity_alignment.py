"""Fidelity through a server: which token a log-probability is about, and what is compared with what.

The server here is a stand-in with a known distribution, whose reply has the form of SGLang 0.5.17: with ``logprob_start_len`` s, entry k is
about the token at s + k, and entry 0 is null.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from intentkv.config import ConfigError
from intentkv.conversation import Conversation, EncodedMessage
from intentkv.intervals import bootstrap
from intentkv.trajectories import Message, Trajectory
from intentkv_eval import fidelity
from intentkv_eval.cases import Case, Settings, find_cut
from intentkv_eval.client import RequestFailed, ServerClient
from intentkv_eval.fidelity import Arm, Row, align, arms, run_case, summarise

pytestmark = pytest.mark.unit

SETTINGS = Settings(
    model="m",
    dataset_sha256="",
    per_source=2,
    tools=False,
    window=200,
    least_window=100,
    least_cut=60,
    least_history=20,
    least_future=15,
    future=30,
)


def case(*messages: tuple[str, int], settings: Settings = SETTINGS) -> Case | None:
    """A trajectory of ``(role, tokens)`` messages whose ids are their positions."""
    total, encoded = 0, []
    for role, n in messages:
        encoded.append(EncodedMessage(role, list(range(total, total + n))))
        total += n
    trajectory = Trajectory(id="t", source="s", group="g", messages=(Message(role="user"),))
    return find_cut(trajectory, Conversation(encoded, [], []), settings)


def test_cut_is_the_last_one_with_enough_behind_it() -> None:
    """Catches a cut behind an assistant message, one too early, and scored tokens that are not the assistant's."""
    found = case(
        ("system", 10), ("user", 40), ("assistant", 10), ("tool", 20), ("assistant", 12), ("tool", 5), ("assistant", 9), ("tool", 9)
    )
    assert found is not None
    assert found.cut == 80
    assert found.ids == list(range(110))
    # behind the cut: assistant 80..91, tool 92..96, assistant 97..105; the token at the cut itself is not predicted by what is read
    assert found.scored == [*range(1, 12), *range(17, 26)]


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([("system", 10), ("user", 40), ("assistant", 5), ("tool", 10), ("assistant", 20)], id="shorter than the least window"),
        pytest.param([("system", 10), ("user", 80), ("assistant", 20)], id="nothing to choose from before the newest message"),
        pytest.param([("system", 10), ("user", 30), ("assistant", 10), ("tool", 60), ("assistant", 14)], id="too little behind"),
        pytest.param([("system", 10), ("user", 30), ("assistant", 10), ("tool", 9), ("assistant", 50)], id="too little in front"),
        pytest.param([("system", 10), ("user", 40), ("assistant", 30), ("assistant", 40)], id="no tool or user message late enough"),
        pytest.param([("user", 300), ("assistant", 20)], id="first message past the window"),
    ],
)
def test_unusable_trajectories_are_left_out(messages: list[tuple[str, int]]) -> None:
    """Catches cases that measure a method that had nothing to choose, or on a handful of tokens."""
    assert case(*messages) is None


def test_window_cuts_between_messages() -> None:
    """Catches a continuation that ends in the middle of a message beyond the window."""
    found = case(("system", 10), ("user", 40), ("assistant", 10), ("tool", 20), ("assistant", 25), ("tool", 200))
    assert found is not None
    assert found.ids[-1] == 104


CASE = Case(
    Trajectory(id="t", source="s", group="g", messages=(Message(role="user"),)),
    ids=[9, 8, 7, 6, 50, 51, 52, 53, 54, 55],
    cut=4,
    scored=[1, 2, 4],
)


def penalty(method: str, position: int) -> float:
    """How much worse a method predicts the token at ``position``, in nats."""
    return {"full": 0.0, "snapkv": 0.1 * position, "random": 1.0}[method]


class StandIn:
    """A server whose log-probability of any token at position p is -(p + penalty), and whose top token is p, or p + 1 where p is odd and
    something was evicted."""

    def __init__(self) -> None:
        self.methods: dict[str, str] = {}
        self.calls: list[dict[str, Any]] = []
        self.cached = 4
        self.shift = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.calls.append(body)
        key, options = body["extra_key"], body["sampling_params"]["custom_params"]["intentkv"]
        ids, n = body["input_ids"], len(body["input_ids"])
        if key not in self.methods:
            assert ids == CASE.ids[:4]
            assert "return_logprob" not in body
            self.methods[key] = options["method"]
            return httpx.Response(200, json={"meta_info": {"prompt_tokens": n, "cached_tokens": 0, "completion_tokens": 1}})
        assert options == {"method": "full"}
        assert (body["return_logprob"], body["top_logprobs_num"]) == (True, 1)
        start, method = body["logprob_start_len"], self.methods[key]
        positions = range(start + 1, n)
        entries = [[None, ids[start], None], *([-(p + penalty(method, p)), ids[p - self.shift], None] for p in positions)]
        tops = [None, *([[-0.1, p + (method != "full" and p % 2), None]] for p in positions)]
        meta = {
            "prompt_tokens": n,
            "cached_tokens": self.cached,
            "completion_tokens": 1,
            "input_token_logprobs": entries,
            "input_top_logprobs": tops,
            "intentkv": [{"live_cached_tokens": 4 if method == "full" else 3}],
        }
        return httpx.Response(200, json={"meta_info": meta})


def measure(server: StandIn, wanted: list[Arm], done: set[Arm] | None = None) -> list[Row]:
    async def go() -> list[Row]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(server), base_url="http://fake") as http:
            return await run_case(ServerClient(http), CASE, wanted, done or set(), "run")

    return asyncio.run(go())


WANTED = arms(["snapkv", "random", "full"], [0.25])


def test_log_probabilities_are_of_the_recorded_assistant_tokens() -> None:
    """Catches an alignment that is off by one, tool tokens in the mean, and a comparison with another position's top token."""
    rows = {row.method: row for row in measure(StandIn(), WANTED)}
    scored = [4 + k for k in CASE.scored]  # absolute positions 5, 6 and 8
    assert rows["full"].nll == pytest.approx(statistics.fmean(scored))
    assert (rows["full"].dnll, rows["full"].top1, rows["full"].ratio) == (0.0, 1.0, None)
    assert rows["snapkv"].dnll == pytest.approx(0.1 * statistics.fmean(scored))
    assert rows["random"].dnll == pytest.approx(1.0)
    assert rows["snapkv"].top1 == rows["random"].top1 == pytest.approx(2 / 3)  # of 5, 6, 8 only 5 is odd
    assert [(row.cached, row.live, row.dead, row.scored) for row in rows.values()] == [(4, 4, 0, 3), (4, 3, 1, 3), (4, 3, 1, 3)]
    assert all(row.status == "ok" for row in rows.values())


def test_turns_on_the_way() -> None:
    """Catches a prompt that ends in the middle of a turn, one behind the cut, and turns that are taken without being asked for."""
    messages = [
        ("system", 10),
        ("user", 40),
        ("assistant", 10),
        ("tool", 20),
        ("assistant", 12),
        ("assistant", 3),
        ("tool", 5),
        ("assistant", 18),
    ]
    found = case(*messages, settings=SETTINGS.model_copy(update={"turn_by_turn": True}))
    assert found is not None
    assert (found.turns, found.cut) == ((50, 80), 100)
    assert case(*messages).turns == ()  # type: ignore[union-attr]


def test_every_turn_is_evicted_from_and_builds_on_the_one_before() -> None:
    """Catches options that only the last turn gets, and a turn whose prefix was computed again, all of it live."""
    calls: list[tuple[int, dict[str, Any]]] = []
    server = StandIn()

    def session(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        n = len(body["input_ids"])
        if "return_logprob" in body:
            server.methods.setdefault(body["extra_key"], "snapkv" if "snapkv" in body["extra_key"] else "full")
            return server(request)
        calls.append((n, body["sampling_params"]["custom_params"]["intentkv"]))
        cached = 0 if n == 1 else calls[-2][0] - lost
        return httpx.Response(200, json={"meta_info": {"prompt_tokens": n, "cached_tokens": cached, "completion_tokens": 1}})

    async def go() -> list[Row]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(session), base_url="http://fake") as http:
            return await run_case(ServerClient(http), CASE._replace(turns=(1, 3)), arms(["snapkv"], [0.25]), set(), "run")

    lost = 0
    assert [row.status for row in asyncio.run(go())] == ["ok", "ok"]
    options = {"method": "snapkv", "budget_ratio": 0.25, "hysteresis": 0}
    assert calls == [(n, {"method": "full"}) for n in (1, 3, 4)] + [(n, options) for n in (1, 3, 4)]
    calls.clear()
    lost = 1
    assert [row.status for row in asyncio.run(go())] == ["error: 0 of 1 tokens of the turns before were cached"] * 2
    lost = -1
    assert all("--disable-overlap-schedule" in row.status for row in asyncio.run(go()))


def test_arms_do_not_share_prefixes_and_ask_for_what_they_are() -> None:
    """Catches a method that is measured on what another one left in the cache, and an eviction that waits for the hysteresis."""
    server = StandIn()
    measure(server, WANTED)
    prefills, reads = server.calls[::2], server.calls[1::2]
    assert [body["sampling_params"]["custom_params"]["intentkv"] for body in prefills] == [
        {"method": "full"},
        {"method": "snapkv", "budget_ratio": 0.25, "hysteresis": 0},
        {"method": "random", "budget_ratio": 0.25, "hysteresis": 0},
    ]
    keys = [body["extra_key"] for body in prefills]
    assert len(set(keys)) == 3
    assert [body["extra_key"] for body in reads] == keys
    assert all(body["logprob_start_len"] == CASE.cut for body in reads)


def test_prefix_that_was_not_reused_is_a_failed_row() -> None:
    """Catches a full recomputation that would measure every method as lossless."""
    server = StandIn()
    server.cached = 3
    rows = measure(server, WANTED)
    assert all(row.status == "error: 3 of 4 history tokens were cached" and row.dnll is None for row in rows)


def test_shifted_log_probabilities_are_a_failed_row() -> None:
    """Catches a server version whose entries are about other tokens than this one's."""
    server = StandIn()
    server.shift = 1
    assert all(
        row.status.startswith("error: log-probability 1 behind the cut is of token 50, sent was 51") for row in measure(server, WANTED)
    )


def test_missing_eviction_is_a_failed_row() -> None:
    """Catches a method that never ran, which would look lossless."""
    server = StandIn()
    original = server.__call__

    def nothing_evicted(request: httpx.Request) -> httpx.Response:
        reply = original(request).json()
        for figures in reply["meta_info"].get("intentkv", []):
            figures["live_cached_tokens"] = 4
        return httpx.Response(200, json=reply)

    rows = measure(nothing_evicted, WANTED)  # type: ignore[arg-type]
    assert [row.status for row in rows] == ["ok", "error: 0 tokens were evicted", "error: 0 tokens were evicted"]


def test_entry_count_must_match() -> None:
    """Catches a truncated reply."""
    with pytest.raises(RequestFailed, match="for 6 tokens"):
        align({"input_token_logprobs": [[None, 50, None]], "input_top_logprobs": [None]}, CASE)


def test_continued_trajectory_measures_only_what_is_missing() -> None:
    """Catches rows that are measured or written twice, and ones that are compared with nothing."""
    server = StandIn()
    rows = measure(server, WANTED, done={Arm("full", None), Arm("snapkv", 0.25)})
    assert [(row.method, row.dnll) for row in rows] == [("random", pytest.approx(1.0))]
    assert len(server.calls) == 4


def test_bootstrap_interval_covers_as_often_as_it_says() -> None:
    """Catches one-sided or far too narrow intervals: of 200 samples of a known mean, about 95 % of the intervals hold it."""
    draw = random.Random(1)
    held = 0
    for seed in range(200):
        interval = bootstrap([draw.gauss(0.3, 0.1) for _ in range(20)], seed)
        assert interval is not None
        held += interval.low <= 0.3 <= interval.high
    assert 0.88 <= held / 200 <= 0.99
    assert bootstrap([], 0) is None


def test_failed_rows_are_counted_and_not_averaged() -> None:
    """Catches failures that vanish, and ones that count as zero loss."""

    def row(status: str, dnll: float | None) -> Row:
        return Row(
            trajectory="t", source="s", method="snapkv", ratio=0.25, status=status, cut=9, scored=3, live=4, dead=5, dnll=dnll, top1=0.5
        )

    (summary,) = summarise([row("ok", 0.2), row("ok", 0.4), row("error: x", None)], [Arm("snapkv", 0.25)], seed=0)
    assert (summary.n, summary.failed, summary.live, summary.dead) == (2, 1, 4, 5)
    assert summary.dnll is not None
    assert summary.dnll.mean == pytest.approx(0.3)
    assert math.isclose(summary.dnll.low, 0.2)


def test_interrupted_run_is_continued_and_another_one_is_refused(tmp_path: Path) -> None:
    """Catches rows of two models in one table, finished rows that are lost, and failed ones that are never tried again."""
    ok = Row(trajectory="t", source="s", method="full", ratio=None, status="ok", cut=9, scored=3)
    failed = ok.model_copy(update={"method": "snapkv", "ratio": 0.1, "status": "error: x"})
    assert fidelity._continue(tmp_path, SETTINGS) == []
    (tmp_path / "rows.jsonl").write_text("".join(row.model_dump_json() + "\n" for row in (ok, failed)))
    assert fidelity._continue(tmp_path, SETTINGS) == [ok]
    assert (tmp_path / "rows.jsonl").read_text() == ok.model_dump_json() + "\n"
    with pytest.raises(ConfigError, match="another model"):
        fidelity._continue(tmp_path, SETTINGS.model_copy(update={"model": "other"}))
    (tmp_path / "rows.jsonl").write_text('{"half a')
    with pytest.raises(ConfigError, match="damaged"):
        fidelity._continue(tmp_path, SETTINGS)


@pytest.mark.parametrize("options", [["--method", "nope"], ["--ratio", "1.5"], ["--ratio", "x"], ["--per-source", "0"], []])
def test_bad_command_is_one_line(options: list[str], tmp_path: Path) -> None:
    """Catches a traceback, or an hour of measuring before a typing error is found."""
    out = tmp_path / "out"
    result = CliRunner().invoke(fidelity.app, ["--input", str(tmp_path / "missing.jsonl"), "--out", str(out), *options])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("Error: ")
    assert not out.exists()
