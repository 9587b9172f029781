"""Request logs as runs of the report. All totals are computed by hand from what ``write_log`` puts into them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from intentkv import cli
from intentkv.config import ConfigError
from intentkv_eval.runs import load
from intentkv_eval.served import read_served

from .report_runs import TURNS, log_line, write_log, write_run

pytestmark = pytest.mark.unit


def test_turns_of_a_log(tmp_path: Path) -> None:
    """Catches: a conversation cut at a shard's end, one without a session that is not recognised, arms mixed up, figures swapped."""
    logs = load([write_log(tmp_path / "logs")])
    assert [run.label for run in logs.runs] == ["assistant 64", "snapkv 50%"]
    assert [len(run.turns) for run in logs.runs] == [5, 1]
    turns = [turn for run in logs.runs for turn in run.turns]
    assert [(t.trajectory, t.turn, t.status) for t in turns] == [
        ("agent", 0, "ok"),
        ("r2", 0, "ok"),
        ("agent", 1, "ok"),
        ("r2", 1, "ok"),
        ("agent", 2, "aborted"),
        ("r6", 0, "ok"),
    ]
    assert {t.source for t in turns} == {"serve"}
    second = turns[2]
    assert (second.prompt_tokens, second.cached_tokens, second.live_cached, second.generated) == (200, 110, 110, 10)
    assert (second.logical, second.live, second.dead, second.peak_live, second.pruned) == (210, 70, 140, 205, 140)
    assert (second.ttft_s, second.latency_s, second.tpot_s) == (0.5, 1.4, pytest.approx(0.1))
    # one block of 90 new tokens over 110 live ones; nine steps over the prompt's 60 live tokens and 1 to 9 generated ones
    assert second.kv_reads == 110 + 9 * 60 + 45
    assert [(t.tool_calls, t.duplicate_calls) for t in turns if t.trajectory == "agent"] == [(1, 0), (2, 1), (0, 0)]
    assert logs.runs[0].prune is None
    assert (turns[4].prompt_tokens, turns[4].cached_tokens, turns[4].live) == (300, 0, 0)
    (broken,) = logs.broken
    assert broken.startswith(f"{tmp_path / 'logs' / 'requests-000001.jsonl'}:4: ")


def test_files_of_one_folder_are_one_log(tmp_path: Path) -> None:
    """Catches: shards named one by one that become runs of their own, count twice, or come in the order of the command line."""
    folder = write_log(tmp_path / "logs")
    first, second = sorted(folder.iterdir())
    assert [run.turns for run in load([second, first, folder]).runs] == [run.turns for run in load([folder]).runs]
    assert [len(run.turns) for run in load([first]).runs] == [2]


def test_prompts_that_are_no_continuation(tmp_path: Path) -> None:
    """Catches: two agents with one first prompt that become one, and a fork that takes another's turn number."""
    lines = [
        log_line("a", prompt=[1, 2]),
        log_line("b", prompt=[1, 2]),  # another agent
        log_line("c", prompt=[1, 2, 3]),
        log_line("d", prompt=[1, 2, 4]),
        log_line("e", prompt=[1, 2, 5]),  # nobody waits any more: a third branch
        log_line("f", prompt=[1, 2, 3, 4]),
        log_line("g", prompt=[2, 1, 3]),
        log_line("h", prompt=[1, 2, 3], session="s"),
    ]
    file = tmp_path / "requests-000000.jsonl"
    file.write_text("\n".join(lines) + "\n")
    found = [(t.trajectory, t.turn) for t in read_served([file]).turns]
    assert found == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("e", 0), ("a", 2), ("g", 0), ("s", 0)]


def test_what_is_not_in_the_log_is_not_in_the_turns(tmp_path: Path) -> None:
    """Catches: a first token made up where none was measured, calls counted in part of a stream, zeros that count as a finished turn."""
    lines = [
        log_line("a", prompt=[1], ttft=None, method=""),
        log_line("b", prompt=[2], output=[7]),  # ten tokens, of which the log has the last piece
        log_line("c", prompt=[3], figures={"prompt_tokens": 1}),
    ]
    file = tmp_path / "requests-000000.jsonl"
    file.write_text("\n".join(lines) + "\n")
    a, b, c = read_served([file]).turns
    assert (a.arm, a.ttft_s, a.tpot_s, a.latency_s) == ("served", None, None, 1.4)
    assert (b.generated, b.tool_calls) == (10, None)
    assert (c.ok, c.status) == (False, "no figures in the log")


def test_nothing_readable_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "requests-000000.jsonl").write_text('{"schema_version": "intentkv-log/9"}\n')
    with pytest.raises(ConfigError, match=r"holds no request that could be read: .*requests-000000.jsonl:1: "):
        load([tmp_path])


def test_command_draws_a_log_beside_a_replay(tmp_path: Path) -> None:
    """Catches: a log the command does not take, and broken lines that nobody is told of."""
    paths = [write_run(tmp_path / "s", "stock", TURNS), write_log(tmp_path / "logs")]
    result = CliRunner().invoke(cli.app, ["report", "--compare", *map(str, paths), "--out", str(tmp_path / "r.html")])
    assert result.exit_code == 0, result.output
    assert "1 lines of request logs could not be read; " in result.stderr
    assert "assistant 64" in result.stdout
