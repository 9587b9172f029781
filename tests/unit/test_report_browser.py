"""The report page in a real browser, without a network: it draws, filters and downloads, and nothing complains."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from intentkv_eval.report import write_report
from intentkv_eval.turns import TurnRecord

from ..browser import chromium_page
from .report_runs import HOSTILE, TURNS, turn, write_decode, write_log, write_prune, write_run, write_watch

pytestmark = pytest.mark.unit

OTHER = HOSTILE + ', "b"'
SOURCES = {"code": ["c1", "c2", "c3"], "shop": [f"s{k}" for k in range(6)]}


def turns(live: float) -> list[TurnRecord]:
    draw = random.Random(0)
    made = []
    for source, names in SOURCES.items():
        for name in names:
            for number in range(4):
                prompt = 500 * (number + 1) + draw.randint(0, 100)
                made.append(turn(name, number, prompt, prompt * 3 // 4, int(prompt * live), source=source))
    return made


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Any]:
    """The page of a stock run and two others, one with a hostile name, opened from its file in a browser that is offline."""
    runs = [write_run(tmp_path / "s", "stock", turns(1)), write_run(tmp_path / "a", "a", turns(0.3), samples=True)]
    write_report([*runs, write_run(tmp_path / "h", OTHER, turns(0.5))], tmp_path / "report.html")
    with chromium_page(offline=True) as page:
        page.goto((tmp_path / "report.html").as_uri())
        page.wait_for_selector("#chart-ratios .plot .points")
        yield page


def drawn(page: Any, chart: str) -> dict[str, list[float]]:
    """Values of the traces as plotly holds them, by name; none for a chart that is not shown."""
    found: dict[str, list[float]] = page.evaluate(
        """(id) => Object.fromEntries((document.querySelector(`#chart-${id} .plot`).data || []).map((trace) => [trace.name, trace.y]))""",
        chart,
    )
    return found


def shown(page: Any, row: str) -> list[str]:
    """Cells of a row of the table."""
    cells: list[str] = page.locator("#table tr", has=page.get_by_role("cell", name=row, exact=True)).locator("td").all_text_contents()
    return cells


def test_first_screen_says_what_was_saved(page: Any) -> None:
    """Catches a page that opens on something else than the answer, charts that do not draw, and text that is cut off."""
    card = page.locator(".card").first
    assert card.bounding_box()["y"] < 300
    assert "−70 %" in card.inner_text()  # 0.3 of the live tokens, ten more at the peak
    assert page.locator(".plot .main-svg").count() >= 8
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("h1", has_text="alert").count() == 0
    for chart in ("tokens", "peaks", "hits", "reads", "latency", "evictions", "agent", "pool1", "ratios"):
        assert page.locator(f"#chart-{chart} .plot .main-svg").count() >= 1, chart
        assert page.locator(f"#chart-{chart} .empty").is_hidden(), chart


def test_arm_filter(page: Any) -> None:
    """Catches a box that hides one picture of an arm and not the others."""
    assert page.locator("#chart-pool1").is_visible()
    page.locator('input[data-arm="a"]').uncheck()
    for chart in ("tokens", "hits", "reads", "peaks", "latency", "agent", "ratios"):
        names = drawn(page, chart).keys()
        assert not [name for name in names if name == "a" or name.startswith("a, ")], chart
        assert OTHER in names, chart
    assert page.locator(".card").count() == 1
    assert page.locator("#chart-pool1").is_hidden()
    assert len(shown(page, "turns")) == 4  # name, stock, the other and its ratio
    page.locator('input[data-arm="a"]').check()
    assert "a" in drawn(page, "tokens")
    for box in page.locator("#arms input").all():
        box.uncheck()
    assert page.locator("#chart-tokens .empty").is_visible()


def test_source_and_trajectory_filter(page: Any) -> None:
    """Catches a choice that does not reach the charts and the table, and trajectories of a source that was not chosen."""
    everything = drawn(page, "tokens")["stock"]
    assert shown(page, "turns")[1] == "36"
    page.select_option("#source", "code")
    assert shown(page, "turns")[1] == "12"
    assert drawn(page, "tokens")["stock"] != everything
    assert page.locator("#trajectory option").all_text_contents() == ["all", *SOURCES["code"]]
    page.select_option("#trajectory", "c2")
    assert shown(page, "turns")[1] == "4"
    assert drawn(page, "tokens")["stock"] == [t.live for t in turns(1) if t.trajectory == "c2"]
    assert "stock, peak during the turn" in drawn(page, "tokens")
    ticks = page.locator("#chart-tokens .xtick text").all_text_contents()
    assert ticks == ["0", "1", "2", "3", "4"]  # each turn once
    page.select_option("#source", "")
    assert drawn(page, "tokens")["stock"] == everything


def test_downloads(page: Any, tmp_path: Path) -> None:
    """Catches a table that is not what is shown, or not CSV for a name with a comma and quotes."""
    page.select_option("#trajectory", "s1")
    with page.expect_download() as waiting:
        page.click("#turns-csv")
    waiting.value.save_as(tmp_path / "turns.csv")
    with (tmp_path / "turns.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12
    assert {row["arm"] for row in rows} == {"stock", "a", OTHER}
    assert [int(row["live"]) for row in rows if row["arm"] == "a"] == [t.live for t in turns(0.3) if t.trajectory == "s1"]
    page.locator('input[data-arm="stock"]').uncheck()
    with page.expect_download() as waiting:
        page.click("#table-csv")
    waiting.value.save_as(tmp_path / "table.csv")
    with (tmp_path / "table.csv").open(newline="") as file:
        table = list(csv.reader(file))
    assert table[0] == ["figure", "a", "a / stock", OTHER, f"{OTHER} / stock"]
    assert ["turns", "4", "1.00×", "4", "1.00×"] in table
    assert {len(row) for row in table} == {5}


def test_page_without_turns(tmp_path: Path) -> None:
    """Catches a page that needs turns: a recorded server and benchmarks have none."""
    write_report([write_watch(tmp_path / "w"), write_decode(tmp_path / "d"), write_prune(tmp_path / "p")], tmp_path / "report.html")
    with chromium_page(offline=True) as page:
        page.goto((tmp_path / "report.html").as_uri())
        for chart in ("pool0", "decode0", "prune0"):
            page.wait_for_selector(f"#chart-{chart} .plot .main-svg")
        assert page.locator("#table-section").is_hidden()
        assert page.locator("#runs").get_by_role("cell", name="evictions", exact=True).count() == 1


def test_single_run(tmp_path: Path) -> None:
    """Catches a page that needs something to compare with."""
    write_report([write_run(tmp_path / "one", "a", TURNS)], tmp_path / "report.html")
    with chromium_page(offline=True) as page:
        page.goto((tmp_path / "report.html").as_uri())
        page.wait_for_selector("#chart-tokens .plot .main-svg")
        assert page.locator(".card").count() == 0
        assert page.locator("#chart-ratios").count() == 0
        assert "compared" not in page.locator("#about").inner_text()


def test_request_log(tmp_path: Path) -> None:
    """Catches a log of real clients that does not draw, and pictures of what it does not hold."""
    write_report([write_log(tmp_path / "logs", ttft=None)], tmp_path / "report.html")
    with chromium_page(offline=True) as page:
        page.goto((tmp_path / "report.html").as_uri())
        page.wait_for_selector("#chart-tokens .plot .main-svg")
        assert drawn(page, "tokens")["assistant 64"] == [(110 + 60) / 2, (70 + 110) / 2]
        assert drawn(page, "hits")["assistant 64"] == [0, round((110 + 60) / 300, 4), 0]
        assert drawn(page, "evictions")["assistant 64"] == [0, 70]
        assert page.locator("#chart-latency").count() == 0
        assert page.locator("#chart-pool0").count() == 0
        assert shown(page, "TTFT p50")[1] == "–"
        assert shown(page, "whole turn p50")[1] == "1.40 s"
        assert shown(page, "failed or skipped turns")[1] == "1"
        page.select_option("#trajectory", "agent")
        assert drawn(page, "tokens")["assistant 64"] == [110, 70]
        page.locator('input[data-arm="snapkv 50%"]').uncheck()
        assert "snapkv 50%" not in drawn(page, "peaks")
