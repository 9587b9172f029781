"""One HTML page that compares runs: prefix-hit rate and live tokens over turns, one summary row a run. Works offline."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import plotly.graph_objects as go
from plotly.colors import qualitative
from pydantic import ValidationError

from intentkv.config import ConfigError
from intentkv_eval.replay import SUMMARY_FILE, TURNS_FILE, Summary
from intentkv_eval.turns import Percentiles, TurnRecord

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>IntentKV replay</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 1080px; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; width: 100%; font-size: 14px; }}
th, td {{ padding: .4rem .6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }}
.table {{ overflow-x: auto; }}
p, footer {{ color: #555; font-size: 14px; }}
</style>
</head>
<body>
<h1>IntentKV replay</h1>
<div class="table">{table}</div>
<h2>Prefix-hit rate</h2>
<p>Cached prompt tokens / prompt tokens of all trajectories at that turn; failed turns count with no hit.</p>
{hits}
<h2>Live and logical tokens</h2>
<p>Mean over the finished turns. Logical (dotted): tokens of the request. Live: tokens whose KV is resident and attended.</p>
{tokens}
<footer>{footer}</footer>
</body>
</html>
"""


class Run(NamedTuple):
    label: str
    summary: Summary
    turns: list[TurnRecord]


def load_run(folder: Path) -> Run:
    """Read what ``intentkv replay`` wrote.

    Raises:
        ConfigError: a file is missing or not from this version.
    """
    try:
        summary = Summary.model_validate_json((folder / SUMMARY_FILE).read_text())
        turns = [TurnRecord.model_validate_json(line) for line in (folder / TURNS_FILE).read_text().splitlines()]
    except OSError as error:
        raise ConfigError(
            f"Cannot read {error.filename!r}: {error.strerror}; give folders that a finished 'intentkv replay' wrote."
        ) from error
    except ValidationError as error:
        raise ConfigError(f"{str(folder)!r} does not hold a run of this version: {error.errors()[0]['msg']}.") from error
    return Run(summary.arm, summary, turns)


def write_report(folders: Sequence[Path], out: Path) -> None:
    """Write the page that compares the runs in ``folders``.

    Raises:
        ConfigError: a folder holds no run.
    """
    runs = [load_run(folder) for folder in folders]
    if len({run.label for run in runs}) < len(runs):
        runs = [run._replace(label=f"{run.label} ({folder.name})") for run, folder in zip(runs, folders, strict=True)]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(render(runs), encoding="utf-8")


def render(runs: Sequence[Run]) -> str:
    """The page as one self-contained HTML text."""
    hits, tokens = go.Figure(), go.Figure()
    for number, run in enumerate(runs):
        color = qualitative.Safe[number % len(qualitative.Safe)]
        by_turn = _by_turn(run.turns)
        hits.add_scatter(name=run.label, **_points(by_turn, _hit_rate), line={"color": color})
        finished = _by_turn([turn for turn in run.turns if turn.ok])
        tokens.add_scatter(name=f"{run.label}, live", **_points(finished, _mean("live")), line={"color": color})
        tokens.add_scatter(name=f"{run.label}, logical", **_points(finished, _mean("logical")), line={"color": color, "dash": "dot"})
    hits.update_yaxes(title="prefix-hit rate", tickformat=".0%", range=[0, 1.02])
    tokens.update_yaxes(title="tokens", rangemode="tozero")
    return _PAGE.format(
        table=_table(runs), hits=_figure(hits, with_library=True), tokens=_figure(tokens, with_library=False), footer=_footer(runs)
    )


def _by_turn(turns: Sequence[TurnRecord]) -> dict[int, list[TurnRecord]]:
    groups: defaultdict[int, list[TurnRecord]] = defaultdict(list)
    for turn in turns:
        groups[turn.turn].append(turn)
    return dict(sorted(groups.items()))


def _points(by_turn: dict[int, list[TurnRecord]], value: Callable[[list[TurnRecord]], float]) -> dict[str, list[float]]:
    return {"x": [turn + 1 for turn in by_turn], "y": [value(records) for records in by_turn.values()]}


def _hit_rate(records: list[TurnRecord]) -> float:
    return sum(r.cached_tokens for r in records) / sum(r.prompt_tokens for r in records)


def _mean(field: str) -> Callable[[list[TurnRecord]], float]:
    return lambda records: sum(getattr(r, field) for r in records) / len(records)


def _figure(figure: go.Figure, with_library: bool) -> str:
    figure.update_layout(
        template="plotly_white",
        height=380,
        margin={"l": 60, "r": 20, "t": 20, "b": 50},
        hovermode="x unified",
        legend={"orientation": "h", "y": 1.1},
    )
    figure.update_xaxes(title="turn", rangemode="tozero")
    text: str = figure.to_html(full_html=False, include_plotlyjs=with_library, config={"displaylogo": False, "responsive": True})
    return text


def _table(runs: Sequence[Run]) -> str:
    header = (
        "arm",
        "turns",
        "failed",
        "prefix hit",
        "live hit",
        "peak live",
        "peak logical",
        "KV reads",
        "TTFT p50 / p95",
        "TPOT p50",
        "wall",
    )
    rows = [header, *(_row(run) for run in runs)]
    cells = [
        "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
        for tag, row in zip(["th", *["td"] * len(runs)], rows, strict=True)
    ]
    return f"<table>{''.join(cells)}</table>"


def _row(run: Run) -> tuple[str, ...]:
    figures = run.summary.aggregates
    return (
        run.label,
        f"{figures.turns:,}",
        f"{figures.failed_turns + figures.skipped_turns:,}",
        f"{figures.prefix_hit_rate:.1%}",
        f"{figures.live_hit_rate:.1%}",
        f"{figures.peak_live_max:,}",
        f"{figures.peak_logical_max:,}",
        f"{figures.kv_reads:,}",
        _seconds(figures.ttft_s, "p50", "p95"),
        _seconds(figures.tpot_s, "p50"),
        f"{figures.wall_s:.1f} s",
    )


def _seconds(values: Percentiles | None, *names: str) -> str:
    return "–" if values is None else " / ".join(f"{getattr(values, name):.3f} s" for name in names)


def _footer(runs: Sequence[Run]) -> str:
    lines = []
    for run in runs:
        source = run.summary.provenance
        versions = ", ".join(f"{name} {version}" for name, version in source.versions.items())
        lines.append(
            f"{run.label}: {source.started}, {versions}, {source.platform}, commit {source.git_commit or 'unknown'}, "
            f"data sha256 {run.summary.dataset.sha256[:12]}"
        )
    return "<br>".join(html.escape(line) for line in lines)
