"""The report page: its figures show the runs' data, and nothing is fetched."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from intentkv import cli
from intentkv.config import ConfigError
from intentkv_eval.provenance import Provenance
from intentkv_eval.replay import DatasetInfo, ReplayOptions, Summary
from intentkv_eval.report import write_report
from intentkv_eval.turns import TurnRecord, aggregate

pytestmark = pytest.mark.unit

HOSTILE = "</script><script>alert(1)</script><b>&"


def turn(trajectory: str, number: int, prompt: int, cached: int, live: int, status: str = "ok") -> TurnRecord:
    return TurnRecord(
        trajectory=trajectory,
        source="made",
        turn=number,
        arm="a",
        status=status,
        prompt_tokens=prompt,
        cached_tokens=cached,
        live=live,
        logical=prompt + 10,
        generated=10,
        ttft_s=0.5,
        latency_s=1.4,
    )


TURNS = [
    turn("x", 0, 100, 0, 110),
    turn("y", 0, 300, 50, 310),
    turn("x", 1, 200, 150, 90),
    turn("y", 1, 400, 0, 0, status="error: lost"),
]


def write_run(folder: Path, arm: str, turns: list[TurnRecord]) -> Path:
    folder.mkdir()
    (folder / "turns.jsonl").write_text("".join(t.model_dump_json() + "\n" for t in turns))
    provenance = Provenance(
        command=["intentkv"],
        started="2026-01-01T00:00:00+00:00",
        git_commit="c0ffee",
        python="3",
        platform="p",
        versions={"sglang": "9"},
        server={},
    )
    summary = Summary(
        arm=arm,
        provenance=provenance,
        options=ReplayOptions(url="u", files=[], out=folder),
        seeds={},
        dataset=DatasetInfo(files=[], sha256="0" * 64, trajectories=2, broken_lines=[], shortened=0, without_turns=[]),
        aggregates=aggregate(turns, 2.0),
    )
    (folder / "summary.json").write_text(summary.model_dump_json())
    return folder


def traces(page: str) -> dict[str, dict[str, Any]]:
    """Traces of all figures by name, read from the page as a browser would."""
    found: dict[str, dict[str, Any]] = {}
    for match in re.finditer(r'Plotly\.newPlot\(\s*"[^"]+",\s*', page):
        data, _ = json.JSONDecoder().raw_decode(page, match.end())
        found.update({trace["name"]: trace for trace in data})
    return found


def test_figures_show_the_turns(tmp_path: Path) -> None:
    """Catches rates that are means of rates, failed turns left out of the hit rate or put into the token means, swapped arms."""
    runs = [write_run(tmp_path / "one", "intentkv", TURNS), write_run(tmp_path / "two", "stock", TURNS[:2])]
    out = tmp_path / "deep" / "report.html"
    write_report(runs, out)
    shown = traces(out.read_text(encoding="utf-8"))
    assert shown.keys() == {f"{arm}{kind}" for arm in ("intentkv", "stock") for kind in ("", ", live", ", logical")}
    assert shown["intentkv"]["x"] == [1, 2]
    assert shown["intentkv"]["y"] == pytest.approx([50 / 400, 150 / 600])
    assert shown["intentkv, live"]["y"] == pytest.approx([(110 + 310) / 2, 90])
    assert shown["intentkv, logical"]["y"] == pytest.approx([(110 + 310) / 2, 210])
    assert shown["stock"]["y"] == pytest.approx([50 / 400])


def test_table_shows_the_summary(tmp_path: Path) -> None:
    """Catches a column that shows another figure than its head says."""
    out = tmp_path / "report.html"
    write_report([write_run(tmp_path / "one", "intentkv", TURNS)], out)
    page = out.read_text(encoding="utf-8")
    heads, cells = (re.findall(rf"<{tag}>(.*?)</{tag}>", page) for tag in ("th", "td"))
    row = dict(zip(heads, cells, strict=True))
    assert row["arm"] == "intentkv"
    assert (row["turns"], row["failed"]) == ("4", "1")
    assert row["prefix hit"] == "20.0%"  # 200 of 1,000 prompt tokens, those of the failed turn included
    assert row["peak logical"] == "410"
    assert row["TTFT p50 / p95"] == "0.500 s / 0.500 s"
    assert row["TPOT p50"] == "0.100 s"
    assert row["wall"] == "2.0 s"


def test_page_is_self_contained(tmp_path: Path) -> None:
    """Catches a page that needs a network, and an arm's name that runs as a script."""
    out = tmp_path / "report.html"
    write_report([write_run(tmp_path / "one", HOSTILE, TURNS)], out)
    page = out.read_text(encoding="utf-8")
    assert not re.search(r"<script[^>]*\bsrc\s*=", page)
    assert not re.search(r"<(link|img|iframe|object|embed)\b[^>]*(https?:)?//", page.partition("<body>")[0])
    assert "@import" not in page.partition("<body>")[0]
    assert HOSTILE not in page
    assert "<b>&amp;" not in page
    assert HOSTILE in traces(page)


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """Catches two runs under one legend entry."""
    out = tmp_path / "report.html"
    write_report([write_run(tmp_path / "one", "a", TURNS), write_run(tmp_path / "two", "a", TURNS)], out)
    assert {"a (one)", "a (two)"} <= traces(out.read_text(encoding="utf-8")).keys()


def test_folder_without_a_run_is_one_sentence(tmp_path: Path) -> None:
    """Catches a traceback for a wrong folder, an unfinished run or a file of another version."""
    run = write_run(tmp_path / "one", "a", TURNS)
    with pytest.raises(ConfigError, match="Cannot read"):
        write_report([tmp_path], tmp_path / "r.html")
    (run / "turns.jsonl").write_text('{"turn": "x"}\n')
    with pytest.raises(ConfigError, match="does not hold a run"):
        write_report([run], tmp_path / "r.html")


def test_command_writes_the_page(tmp_path: Path) -> None:
    """Catches a command that does not reach the report."""
    run, out = write_run(tmp_path / "one", "a", TURNS), tmp_path / "r.html"
    result = CliRunner().invoke(cli.app, ["report", str(run), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "a, live" in traces(out.read_text(encoding="utf-8"))
