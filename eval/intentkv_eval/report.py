"""One HTML page that compares runs: what was saved, what it cost, and how over turns and time. Works offline.

Everything is computed here, for all trajectories together, for each source and for each trajectory; the page only chooses among these.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import plotly.io
from plotly.offline import get_plotlyjs
from rich.console import Console
from rich.table import Table

from intentkv.config import ConfigError
from intentkv_eval import charts, measures
from intentkv_eval.charts import Arm, Chart, Trace, View
from intentkv_eval.measures import MEASURES, Comparison, Measure, Ratio, Turns
from intentkv_eval.runs import Logs, Run, baseline, load
from intentkv_eval.turns import TurnRecord

ALL = "all"
"""Key of the view of all trajectories; others are ``source:NAME`` and ``trajectory:NAME``."""

_MOST_TRAJECTORIES = 1000
"""More have no view each: the page would be too large to open."""

_COLUMNS = tuple(name for name in TurnRecord.model_fields if name != "arm")


class Compared(NamedTuple):
    """Figures of a view: by arm, then by measure."""

    values: dict[str, dict[str, float]]
    ratios: dict[str, dict[str, Ratio | None]]
    """Of all arms but the baseline."""


def compare(view: View, arms: Sequence[Arm], base: Run | None) -> Compared:
    """Values of every arm and, where a baseline is given, ratios to it."""
    values, ratios = {}, {}
    for arm in arms:
        records = view.turns.get(arm.name, [])
        turns = Turns(records, sorted({r.trajectory for r in records}))
        values[arm.name] = {measure.name: measure.value(turns) for measure in MEASURES}
        if base is not None and arm.run is not base:
            comparison = Comparison(records, view.turns.get(base.label, []))
            ratios[arm.name] = {measure.name: comparison.ratio(measure) for measure in MEASURES}
    return Compared(values, ratios)


def write_report(folders: Sequence[Path], out: Path, baseline_name: str | None = None) -> None:
    """Write the page that compares the runs in ``folders``, and say on stderr what of them could not be read.

    Args:
        baseline_name: the run others are compared with; default: the first stock one, else the first.

    Raises:
        ConfigError: a folder holds no run, no run has that name, or the page cannot be written.
    """
    logs = load(folders)
    page = render(logs, baseline_name)
    if logs.broken:
        Console(stderr=True).print(
            f"{len(logs.broken)} lines of request logs could not be read; {logs.broken[0]}.", soft_wrap=True, markup=False
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot write {str(out)!r}: {error.strerror}; give another --out.") from error


def print_comparison(folders: Sequence[Path], baseline_name: str | None = None) -> None:
    """Print the arms side by side with their ratios.

    Raises:
        ConfigError: fewer than two of the folders hold turns.
    """
    logs = load(folders)
    base = baseline(logs.runs, baseline_name)
    runs = [run for run in logs.runs if run.turns]
    if base is None or len(runs) < 2:
        raise ConfigError(f"--compare needs two runs with turns, got {len(runs)}; give the folders of two replays.")
    Console().print(comparison_table(runs, base))


def comparison_table(runs: Sequence[Run], base: Run) -> Table:
    """Rows: measures. Columns: the baseline's value, then value and ratio of every other run."""
    arms = charts.arms_of([base, *(run for run in runs if run is not base)], base)
    found = compare(View({arm.name: arm.run.turns for arm in arms}, single=False), arms, base)
    table = Table(title=f"Ratios to {base.label} [95 % interval over trajectories]")
    table.add_column("figure")
    for arm in arms:
        table.add_column(arm.name, justify="right")
        if arm.run is not base:
            table.add_column("ratio", justify="right")
    for measure in MEASURES:
        cells = [measure.name]
        for arm in arms:
            cells.append(_value_text(measure, found.values[arm.name][measure.name]))
            if arm.run is not base:
                ratio = found.ratios[arm.name][measure.name]
                # rich would read the brackets as markup
                cells.append("–" if ratio is None else charts.ratio_text(ratio).replace("[", r"\["))
        table.add_row(*cells)
    return table


def render(logs: Logs, baseline_name: str | None = None) -> str:
    """The page as one self-contained HTML text.

    Raises:
        ConfigError: no run is called ``baseline_name``.
    """
    base = baseline(logs.runs, baseline_name)
    runs = sorted(logs.runs, key=lambda run: run is not base)  # the baseline first
    arms = charts.arms_of(runs, base)
    fixed = [charts.pool(arm, i) for i, arm in enumerate(arms) if arm.run.samples]
    fixed += [charts.decode(result, i) for i, result in enumerate(logs.decode)]
    fixed += [charts.prune(result, i) for i, result in enumerate(logs.prune)]
    compared = base if sum(bool(run.turns) for run in runs) > 1 else None
    by_view = [_named(charts.RATIOS, compared)] if compared else []
    views = {key: _view(view, arms, base) for key, view in _views(runs)} if base else {ALL: {}}
    if base:  # a chart that no arm has anything for is left out
        by_view += [chart for chart, _ in charts.BY_VIEW if any("meta" in trace for trace in views[ALL]["charts"][chart.id])]
    data = {
        "template": plotly.io.templates["plotly_white"].to_plotly_json(),
        "arms": [{"name": arm.name, "color": arm.color} for arm in arms],
        "base": base.label if base else None,
        "compared": compared is not None,
        "trajectories": _sources(runs),
        "charts": [chart._asdict() for chart in [*by_view, *(chart for chart, _ in fixed)]],
        "fixed": {chart.id: traces for chart, traces in fixed},
        "views": views,
        "run_rows": _run_rows(runs),
        "turns": {"columns": ["arm", *_COLUMNS], "rows": [[arm.name, *_row(turn)] for arm in arms for turn in arm.run.turns]},
    }
    template = resources.files("intentkv_eval").joinpath("report_page.html").read_text(encoding="utf-8")
    # no text of the data can end its script element
    text = json.dumps(_finite(data), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {"@FOOTER@": _footer(runs), "@PLOTLY@": get_plotlyjs(), "@DATA@": text}
    return re.sub("|".join(parts), lambda mark: parts[mark[0]], template)


def _finite(value: Any) -> Any:
    """``value`` with NaN, which JSON has not, as null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _named(chart: Chart, base: Run) -> Chart:
    return chart._replace(title=chart.title.format(base=base.label), note=chart.note.format(base=base.label))


def _sources(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Trajectories by source; none where there are too many to choose from."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        for turn in run.turns:
            found.setdefault(turn.source, {})[turn.trajectory] = None
    many = sum(map(len, found.values())) > _MOST_TRAJECTORIES
    return {source: [] if many else sorted(names) for source, names in sorted(found.items())}


def _views(runs: Sequence[Run]) -> Iterator[tuple[str, View]]:
    """All choices that the page offers; together they hold every turn three times."""
    yield ALL, View({run.label: run.turns for run in runs}, single=False)
    sources = _sources(runs)
    for source in sources:
        yield f"source:{source}", View({run.label: [t for t in run.turns if t.source == source] for run in runs}, single=False)
    by_name: dict[str, dict[str, list[TurnRecord]]] = {name: {} for names in sources.values() for name in names}
    for run in runs if by_name else []:
        for turn in run.turns:
            by_name[turn.trajectory].setdefault(run.label, []).append(turn)
    for name, turns in by_name.items():
        yield f"trajectory:{name}", View(turns, single=True)


def _view(view: View, arms: Sequence[Arm], base: Run) -> dict[str, Any]:
    """What the page shows of one view: traces, table rows and cards."""
    with_turns = [arm for arm in arms if arm.run.turns]
    found = compare(view, with_turns, base)
    drawn: dict[str, list[Trace]] = {charts.RATIOS.id: charts.ratios(found.ratios, with_turns)}
    drawn.update({chart.id: draw(view, arms) for chart, draw in charts.BY_VIEW})
    rows = [
        {
            "group": measure.group,
            "name": measure.name,
            "cells": {arm.name: _cell(measure, found, arm.name) for arm in with_turns},
        }
        for measure in MEASURES
    ]
    # only of arms that did some of the same work: two totals of different work say nothing about saving
    shared = [arm for arm in with_turns if arm.run is not base and any(found.ratios[arm.name].values())]
    cards = {arm.name: _card(found, arm, base) for arm in shared}
    return {"charts": drawn, "rows": rows, "cards": cards}


def _value_text(measure: Measure, value: float) -> str:
    return "–" if math.isnan(value) else measure.text(value)


def _cell(measure: Measure, found: Compared, arm: str) -> dict[str, Any]:
    ratio = found.ratios.get(arm, {}).get(measure.name)
    shown = None if ratio is None else charts.ratio_text(ratio)
    return {"value": _value_text(measure, found.values[arm][measure.name]), "ratio": shown, "tone": _tone(measure, ratio)}


def _tone(measure: Measure, ratio: Ratio | None) -> str:
    """``good`` or ``bad`` where the whole interval is on one side of 1."""
    if measure.better is None or ratio is None or ratio.low is None or ratio.high is None or ratio.low <= 1 <= ratio.high:
        return ""
    return "good" if (ratio.high < 1) == (measure.better == "less") else "bad"


def _card(found: Compared, arm: Arm, base: Run) -> dict[str, list[dict[str, str]]]:
    """The answer in a few numbers: what was saved, what it cost."""
    values, of_base, ratios = found.values[arm.name], found.values[base.label], found.ratios[arm.name]

    def change(measure: Measure, label: str) -> dict[str, str]:
        ratio = ratios[measure.name]
        texts = (_value_text(measure, side[measure.name]) for side in (values, of_base))
        big = "–" if ratio is None else f"{(ratio.value - 1) * 100:+.0f} %".replace("-", "−").replace("+0 ", "±0 ").replace("−0 ", "±0 ")
        return {"value": big, "label": label, "detail": "{} instead of {}".format(*texts)}

    hit = (_value_text(measures.PREFIX_HIT, side[measures.PREFIX_HIT.name]) for side in (values, of_base))
    value, base_value = hit
    return {
        "saved": [
            change(measures.PEAK_LIVE, "peak live tokens"),
            change(measures.KV_READS, "KV reads"),
            {"value": value, "label": "prefix-hit rate", "detail": f"{base.label}: {base_value}"},
        ],
        "cost": [
            change(measures.TTFT_P50, "TTFT, median"),
            change(measures.TPOT_P50, "TPOT, median"),
            _eviction_cost(arm.run),
        ],
    }


def _eviction_cost(run: Run) -> dict[str, str]:
    prune = run.prune
    if prune is None:
        return {"value": "–", "label": "time of one eviction", "detail": "not recorded"}
    if prune.mean_s is None:
        return {"value": "0", "label": "evictions", "detail": "in the whole run"}
    share = _turn_share(run)
    detail = f"mean of {prune.events:,}" + ("" if share is None else f", {share:.1%} of turn time") + ", whole run"
    return {"value": measures.seconds_text(prune.mean_s), "label": "time of one eviction", "detail": detail}


def _turn_share(run: Run) -> float | None:
    """Seconds of evictions / seconds of turns."""
    spent = sum(turn.latency_s or 0.0 for turn in run.turns)
    return run.prune.mean_s * run.prune.events / spent if run.prune and run.prune.mean_s and spent else None


def _run_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Figures that belong to whole runs, whatever trajectories are chosen."""

    def seconds(value: float | None) -> str:
        return "–" if value is None else measures.seconds_text(value)

    def rows(run: Run) -> dict[str, str]:
        prune, wall, share = run.prune, run.wall_s, _turn_share(run)
        pools = [sample.pool for sample in run.samples]
        live = max((p.evictable + p.protected + p.private for p in pools), default=None)
        busy = max((p.protected + p.private for p in pools), default=None)
        declined = ", ".join(f"{reason}: {count:,}" for reason, count in prune.declined.items() if count) or "0" if prune else "–"
        generated = sum(turn.generated for turn in run.turns)
        return {
            "wall time": seconds(wall),
            "generated tokens a second": f"{generated / wall:,.2f}" if wall and generated else "–",
            "evictions": "–" if prune is None else f"{prune.events:,}",
            "time of an eviction, mean": seconds(prune.mean_s if prune else None),
            "time of an eviction, p50 of its histogram": seconds(prune.p50_s if prune else None),
            "time of an eviction, p99 of its histogram": seconds(prune.p99_s if prune else None),
            "evictions / turn time": "–" if share is None else f"{share:.2%}",
            "evictions declined": declined,
            "pool size, slots": f"{pools[0].total:,}" if pools else "–",
            "peak live slots in the pool": "–" if live is None else f"{live:,}",
            "peak slots in use by requests": "–" if busy is None else f"{busy:,}",
        }

    columns = {run.label: rows(run) for run in runs}
    names = next(iter(columns.values()), {})
    return [{"name": name, "cells": {label: {"value": column[name]} for label, column in columns.items()}} for name in names]


def _row(turn: TurnRecord) -> list[Any]:
    return [getattr(turn, name) for name in _COLUMNS]


def _footer(runs: Sequence[Run]) -> str:
    lines = []
    for run in runs:
        source = run.provenance
        if source is None:
            continue
        versions = ", ".join(f"{name} {version}" for name, version in source.versions.items())
        data = f", data sha256 {run.data_sha256[:12]}" if run.data_sha256 else ""
        lines.append(f"{run.label}: {source.started}, {versions}, {source.platform}, commit {source.git_commit or 'unknown'}{data}")
    return "<br>".join(html.escape(line) for line in lines)
