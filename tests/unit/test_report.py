"""The report page's data: its charts show the runs' turns, its filters split them, and nothing is fetched."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from typer.testing import CliRunner

from intentkv import cli
from intentkv.config import ConfigError
from intentkv_eval.report import write_report

from .report_runs import HOSTILE, TURNS, turn, write_capacity, write_decode, write_prune, write_run, write_watch

pytestmark = pytest.mark.unit


def page_data(page: str) -> dict[str, Any]:
    """The data of the page, read as a browser would: up to the first end tag."""
    text = page.partition('<script type="application/json" id="data">')[2].partition("</script>")[0]
    data: dict[str, Any] = json.loads(text)
    return data


def report(tmp_path: Path, *folders: Path, baseline: str | None = None) -> dict[str, Any]:
    out = tmp_path / "deep" / "report.html"
    write_report(folders, out, baseline)
    return page_data(out.read_text(encoding="utf-8"))


def trace(data: dict[str, Any], chart: str, name: str, view: str = "all") -> dict[str, Any]:
    traces = data["fixed"][chart] if chart in data["fixed"] else data["views"][view]["charts"][chart]
    (found,) = [t for t in traces if t["name"] == name]
    return dict(found)


def cell(data: dict[str, Any], row: str, arm: str, view: str = "all") -> str:
    (found,) = [r for r in [*data["views"][view]["rows"], *data["run_rows"]] if r["name"] == row]
    return str(found["cells"][arm]["value"])


def test_charts_show_the_turns(tmp_path: Path) -> None:
    """Catches rates that are means of rates, failed turns left out of the hit rate or put into the token means, swapped arms."""
    data = report(tmp_path, write_run(tmp_path / "one", "a", TURNS), write_run(tmp_path / "two", "stock", TURNS[:2]))
    hits = trace(data, "hits", "a")
    assert hits["x"] == [1, 2]
    assert hits["y"] == pytest.approx([50 / 400, 150 / 600])
    assert trace(data, "hits", "stock")["y"] == pytest.approx([50 / 400])
    assert trace(data, "tokens", "a")["y"] == pytest.approx([(110 + 310) / 2, 90])
    assert trace(data, "tokens", "a, logical")["y"] == pytest.approx([(110 + 310) / 2, 210])
    assert (trace(data, "peaks", "a")["x"], trace(data, "peaks", "a")["y"]) == ([210, 310], [120, 320])
    assert trace(data, "reads", "a")["y"] == pytest.approx([200, 200])
    assert trace(data, "agent", "a")["y"] == pytest.approx([4 / 2, 8 / 2, 4 / 2, 4 / 2])
    first, further = [t for t in data["views"]["all"]["charts"]["latency"] if t["name"] == "a"]
    assert (first["y"], first["text"]) == ([0.5] * 3, ["500.0 ms"] * 3)
    assert further["y"] == [100.0] * 3  # milliseconds


def test_every_trace_is_what_plotly_knows(tmp_path: Path) -> None:
    """Catches a misspelt property, which plotly.js ignores in silence and plotly's Python checks."""
    runs = [write_run(tmp_path / arm, arm, TURNS * 2, samples=arm == "a") for arm in ("a", "stock")]
    data = report(tmp_path, *runs)
    for chart in data["charts"]:
        for traces in [data["fixed"].get(chart["id"], []), *(view["charts"].get(chart["id"], []) for view in data["views"].values())]:
            go.Figure(data=traces, layout=chart["layout"])
        for axis in [name for name in chart["layout"] if re.fullmatch(r"[xy]axis2?", name)]:
            if (chart["id"], axis) not in {("ratios", "yaxis"), ("agent", "xaxis")}:  # their categories say it
                assert chart["layout"][axis]["title"]["text"], (chart["id"], axis)


def test_table_shows_the_figures(tmp_path: Path) -> None:
    """Catches a row that shows another figure than its head says."""
    data = report(tmp_path, write_run(tmp_path / "one", "a", TURNS))
    assert (cell(data, "turns", "a"), cell(data, "failed or skipped turns", "a")) == ("4", "1")
    assert cell(data, "prefix-hit rate", "a") == "20.0%"  # 200 of 1,000 prompt tokens, those of the failed turn included
    assert cell(data, "peak request (logical) tokens, mean", "a") == "260"
    assert cell(data, "TTFT p50", "a") == "500.0 ms"
    assert cell(data, "TPOT p50", "a") == "100.0 ms"
    assert cell(data, "exact duplicate calls", "a") == "50.0%"
    assert cell(data, "wall time", "a") == "2.00 s"


def test_views_split_the_turns(tmp_path: Path) -> None:
    """Catches a filter that shows another source's or trajectory's turns, or loses some."""
    other = [turn("z", 0, 1000, 0, 1010, source="other")]
    data = report(tmp_path, write_run(tmp_path / "one", "a", TURNS + other))
    assert data["trajectories"] == {"made": ["x", "y"], "other": ["z"]}
    assert data["views"].keys() == {"all", "source:made", "source:other", "trajectory:x", "trajectory:y", "trajectory:z"}
    assert [cell(data, "turns", "a", view) for view in ("all", "source:made", "source:other", "trajectory:x")] == ["5", "4", "1", "2"]
    assert trace(data, "tokens", "a", "trajectory:y")["y"] == [310]
    assert trace(data, "tokens", "a, peak during the turn", "trajectory:x")["y"] == [120, 100]


def test_too_many_trajectories_have_no_view_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a page too large to open, and one that then offers trajectories it has no view of."""
    monkeypatch.setattr("intentkv_eval.report._MOST_TRAJECTORIES", 1)
    data = report(tmp_path, write_run(tmp_path / "one", "a", TURNS))
    assert data["trajectories"] == {"made": []}
    assert data["views"].keys() == {"all", "source:made"}


def test_names_are_no_places_of_the_page(tmp_path: Path) -> None:
    """Catches a run whose name pulls the data, or plotly, into the page once more."""
    out = tmp_path / "report.html"
    write_report([write_run(tmp_path / "one", "@DATA@ @PLOTLY@ {base}", TURNS)], out)
    page = out.read_text(encoding="utf-8")
    assert page_data(page)["arms"][0]["name"] == "@DATA@ @PLOTLY@ {base}"
    assert "<footer>@DATA@ @PLOTLY@ {base}: 2026" in page


def test_ratios_are_over_turns_both_finished(tmp_path: Path) -> None:
    """Catches the wrong way round, and an arm that looks cheap because it failed."""
    half = [t.model_copy(update={"kv_reads": 50}) for t in TURNS]  # the last one failed: its reads do not count on either side
    whole = [*TURNS[:3], turn("y", 1, 400, 300, 410)]
    data = report(tmp_path, write_run(tmp_path / "a", "a", half), write_run(tmp_path / "b", "stock", whole))
    assert data["base"] == "stock"
    shown = trace(data, "ratios", "a")
    assert dict(zip(shown["y"], shown["x"], strict=True))["KV reads, positions"] == pytest.approx(0.25)
    (card,) = data["views"]["all"]["cards"].values()
    assert card["saved"][1] == {"value": "−75 %", "label": "KV reads", "detail": "200 instead of 800"}


def test_no_card_without_common_work(tmp_path: Path) -> None:
    """Catches totals of different work set against each other as if something had been saved."""
    other = [t.model_copy(update={"trajectory": "z" + t.trajectory}) for t in TURNS]
    runs = [write_run(tmp_path / name, name, turns) for name, turns in {"stock": TURNS, "a": TURNS, "other": other}.items()]
    data = report(tmp_path, *runs)
    assert data["views"]["all"]["cards"].keys() == {"a"}
    assert cell(data, "turns", "other") == cell(data, "turns", "a")  # what it did is shown all the same


def test_baseline_can_be_chosen(tmp_path: Path) -> None:
    """Catches an option that is ignored, or a wrong name that ends in a traceback."""
    runs = [write_run(tmp_path / arm, arm, TURNS) for arm in ("a", "b")]
    assert report(tmp_path, *runs)["base"] == "a"
    assert report(tmp_path, *runs, baseline="b")["base"] == "b"
    with pytest.raises(ConfigError, match="No run is called 'c'"):
        report(tmp_path, *runs, baseline="c")


def test_pool_is_stacked_and_dead_is_beside_it(tmp_path: Path) -> None:
    """Catches dead positions counted into the pool, and terms that no longer sum to it."""
    data = report(tmp_path, write_run(tmp_path / "one", "a", TURNS, samples=True))
    stacked = [t for t in data["fixed"]["pool0"] if "stackgroup" in t]
    assert [sum(values) for values in zip(*(t["y"] for t in stacked), strict=True)] == [1000, 1000]
    (dead,) = [t for t in data["fixed"]["pool0"] if "stackgroup" not in t]
    assert dead["y"] == [0, 70]
    assert cell(data, "peak live slots in the pool", "a") == "600"
    assert cell(data, "peak slots in use by requests", "a") == "250"


def test_cost_of_evictions(tmp_path: Path) -> None:
    """Catches the mean of all the server's evictions where the run's own are meant."""
    data = report(tmp_path, write_run(tmp_path / "one", "a", TURNS, samples=True), write_run(tmp_path / "two", "stock", TURNS))
    (item,) = [i for i in data["views"]["all"]["cards"]["a"]["cost"] if "eviction" in i["label"]]
    assert item["value"] == "20.0 ms"
    assert "mean of 4" in item["detail"]
    assert "1.9% of turn time" in item["detail"]  # 0.08 s of 3 finished turns of 1.4 s


def test_folders_of_watch_and_benchmarks(tmp_path: Path) -> None:
    """Catches a kind of log that the report cannot read."""
    data = report(tmp_path, write_watch(tmp_path / "watch"), write_capacity(tmp_path / "bench"))
    assert [arm["name"] for arm in data["arms"]] == ["stock, pool 30%", "served", "assistant:64, pool 30%"]
    assert data["base"] == "stock, pool 30%"
    assert cell(data, "evictions", "served") == "4"
    benches = report(tmp_path, write_decode(tmp_path / "decode"), write_prune(tmp_path / "prune"))
    assert (trace(benches, "decode0", "stock, batch 8")["x"], trace(benches, "decode0", "stock, batch 8")["y"]) == ([1000, 2000], [10, 20])
    assert trace(benches, "prune0", "a:1")["y"] == [4]  # milliseconds
    only = report(tmp_path, tmp_path / "watch")
    assert only["base"] is None
    assert only["fixed"]["pool0"]


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
    assert page_data(page)["arms"][0]["name"] == HOSTILE


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """Catches two runs under one legend entry."""
    data = report(tmp_path, write_run(tmp_path / "one", "a", TURNS), write_run(tmp_path / "two", "a", TURNS))
    assert [arm["name"] for arm in data["arms"]] == ["a (one)", "a (two)"]


def test_folder_without_a_run_is_one_sentence(tmp_path: Path) -> None:
    """Catches a traceback for a wrong folder, an unfinished run or a file of another version."""
    run = write_run(tmp_path / "one", "a", TURNS)
    with pytest.raises(ConfigError, match="Cannot read"):
        write_report([tmp_path], tmp_path / "r.html")
    with pytest.raises(ConfigError, match="Cannot write"):
        write_report([run], run / "turns.jsonl" / "r.html")
    (run / "turns.jsonl").write_text('{"turn": "x"}\n')
    with pytest.raises(ConfigError, match="does not hold a run"):
        write_report([run], tmp_path / "r.html")


def test_command_writes_the_page_and_prints_the_ratios(tmp_path: Path) -> None:
    """Catches a command that does not reach the report, and brackets that rich takes for markup."""
    runs, out = [write_run(tmp_path / arm, arm, TURNS) for arm in ("a", "b")], tmp_path / "r.html"
    result = CliRunner().invoke(cli.app, ["report", "--compare", *map(str, runs), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert page_data(out.read_text(encoding="utf-8"))["base"] == "a"
    assert "Ratios to a [95 % interval over trajectories]" in result.output
    assert "1.00×" in result.output
    result = CliRunner().invoke(cli.app, ["report", "--compare", str(runs[0]), "--out", str(out)])
    assert result.exit_code == 2
    assert "--compare needs two runs" in result.output
