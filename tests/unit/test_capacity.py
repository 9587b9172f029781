"""The equal-memory experiment: pool size, and the same conditions for every arm. Servers and replays are replaced."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from intentkv.config import ConfigError
from intentkv.conversation import Conversation
from intentkv.trajectories import Dataset, Message, Trajectory
from intentkv_eval import capacity
from intentkv_eval.capacity import pool_size
from intentkv_eval.replay import Plan, ReplayOptions, Turn
from intentkv_eval.server import Server, ServerError
from intentkv_eval.turns import TurnRecord, aggregate

pytestmark = pytest.mark.unit


def plan(name: str, *turns: tuple[int, int]) -> Plan:
    trajectory = Trajectory(id=name, source="s", group="g", messages=(Message(role="user"),))
    return Plan(trajectory, Conversation([], [], []), [Turn([], completion, prompt) for prompt, completion in turns], shortened=False)


def test_pool_is_a_share_of_the_final_tokens() -> None:
    """Catches a working set of prompts only, or of the first turns."""
    assert pool_size([plan("a", (100, 10), (900, 100)), plan("b", (950, 50))], 0.6) == (2000, 1200)


@pytest.mark.parametrize(
    ("plans", "message"),
    [
        ([plan("a", (900, 100)), plan("b")], "'b' has no turn"),
        ([plan("a", (900, 100)), plan("b", (90, 10))], "needs 1000 tokens, the pool would have 660"),
    ],
)
def test_impossible_experiment_is_one_sentence(plans: list[Plan], message: str) -> None:
    """Catches an experiment that cannot even hold its longest session, found only after the servers ran."""
    with pytest.raises(ConfigError, match=message):
        pool_size(plans, 0.6)


class Stage:
    """Replaces servers and replays and notes what they are asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[list[str]] = []
        self.replays: list[ReplayOptions] = []
        self.fails = False
        self.status = "ok"
        monkeypatch.setattr(capacity, "running_server", self._server)
        monkeypatch.setattr(capacity, "_plan", self._plan)
        monkeypatch.setattr(capacity, "replay", self._replay)

    @contextmanager
    def _server(self, arguments: list[str], log: Path, timeout_s: float) -> Iterator[Server]:
        if self.fails:
            raise ServerError("The server exited with status 1 before it was healthy. End of log:\nreason")
        self.started.append(arguments)
        yield Server(f"http://{len(self.started)}", 0, log)

    async def _plan(self, url: str, dataset: Dataset, options: ReplayOptions) -> list[Plan]:
        return [plan(t.id, (900, 100)) for t in dataset.trajectories]

    async def _replay(self, options: ReplayOptions) -> SimpleNamespace:
        self.replays.append(options)
        record = TurnRecord(
            trajectory="t", source="s", turn=0, arm="", status=self.status, prompt_tokens=10, cached_tokens=len(self.replays)
        )
        return SimpleNamespace(aggregates=aggregate([record], 1.0))


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


def command(tmp_path: Path, *options: str) -> Result:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"id": str(k), "messages": [{"role": "user", "content": "x"}]}) + "\n" for k in range(5)))
    return CliRunner().invoke(capacity.app, ["--input", str(data), "--out", str(tmp_path / "out"), *options])


def test_arms_alternate_under_equal_conditions(tmp_path: Path, stage: Stage) -> None:
    """Catches a flag, pool, trajectory or option that only one arm gets, and results under the wrong arm."""
    result = command(tmp_path, "--model", "m", "--budget", "64", "--sessions", "4", "--rounds", "2", "--page-size", "1")
    assert result.exit_code == 0, result.output
    shared = ["--model", "m", "--page-size", "1"]
    pool = ["--max-total-tokens", "2400"]
    arms = [[*shared, "--stock", *pool], [*shared, "--budget", "64", *pool]]
    assert stage.started == [[*shared, "--stock"], *arms, *arms]
    assert [(r.url, r.arm, r.out.name) for r in stage.replays] == [
        ("http://2", "stock", "stock-0"),
        ("http://3", "intentkv", "intentkv-0"),
        ("http://4", "stock", "stock-1"),
        ("http://5", "intentkv", "intentkv-1"),
    ]
    same = {r.model_copy(update={"url": "", "arm": None, "out": Path()}).model_dump_json() for r in stage.replays}
    assert len(same) == 1
    assert (stage.replays[0].limit, stage.replays[0].concurrency) == (4, 4)
    written = json.loads((tmp_path / "out" / "capacity.json").read_text())
    assert (written["sessions"], written["working_set_tokens"], written["pool_tokens"]) == (4, 4000, 2400)
    assert [(a["arm"], a["round"], a["aggregates"]["cached_tokens"]) for a in written["arms"]] == [
        ("stock", 0, 1),
        ("intentkv", 0, 2),
        ("stock", 1, 3),
        ("intentkv", 1, 4),
    ]


def test_results_are_not_overwritten(tmp_path: Path, stage: Stage) -> None:
    """Catches a second experiment that replaces the first."""
    assert command(tmp_path).exit_code == 0
    again = command(tmp_path)
    assert again.exit_code == 2
    assert "holds results already" in again.stderr


def test_failure_is_the_exit_status(tmp_path: Path, stage: Stage) -> None:
    """Catches an experiment with failed turns that a script takes for a good one."""
    stage.status = "error: x"
    assert command(tmp_path).exit_code == 1


def test_server_that_does_not_start_is_told_without_a_traceback(tmp_path: Path, stage: Stage) -> None:
    """Catches a log's tail that is lost, and a Python traceback on top of it."""
    stage.fails = True
    result = command(tmp_path)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert "reason" in result.stderr


@pytest.mark.parametrize("options", [["--method", "nope"], ["--budget", "0"], ["--share", "2"], ["--sessions", "0"]])
def test_bad_command_is_one_line_before_any_server(options: list[str], tmp_path: Path, stage: Stage) -> None:
    """Catches a typing error that is found only after the first server ran."""
    result = command(tmp_path, *options)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert stage.started == []
