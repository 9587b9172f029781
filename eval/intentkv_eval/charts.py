"""The report's charts as plotly data: plain traces, so that one page can hold those of every source and trajectory.

A trace's ``meta`` is its arm; the page hides the traces of arms that are switched off.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from intentkv_eval import bench_decode, bench_prune
from intentkv_eval.measures import MEASURES, Measure, Ratio, Turns, seconds_text
from intentkv_eval.overhead import EMBEDDER, NEAR
from intentkv_eval.runs import Run
from intentkv_eval.turns import TurnRecord

Trace = dict[str, Any]
Layout = dict[str, Any]

BASE_COLOR = "#6b7280"
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9")
"""Okabe and Ito's palette, which colour-blind readers can tell apart; its yellow is too faint for lines."""

POOL_TERMS = (
    ("protected", "protected (live, in use)", "#0072b2"),
    ("private", "private (running, not in the tree yet)", "#56b4e9"),
    ("evictable", "evictable (live, cached)", "#a8d5c2"),
    ("available", "available", "#e5e7eb"),
)
"""Terms of the pool from the bottom of the stack: field, name, colour."""


class Arm(NamedTuple):
    run: Run
    color: str

    @property
    def name(self) -> str:
        return self.run.label


class View(NamedTuple):
    """A choice of trajectories: the turns of each arm."""

    turns: Mapping[str, list[TurnRecord]]
    """By arm."""
    single: bool
    """One trajectory, so that peaks can be marked."""


class Chart(NamedTuple):
    """One picture of the page."""

    id: str
    title: str
    note: str
    layout: Layout
    arm: str | None = None
    """The only arm it shows; None: all."""
    by_turn: bool = False
    """Its first x axis counts turns: few of them are all named, since plotly would put ticks between."""


def arms_of(runs: Sequence[Run], base: Run | None) -> list[Arm]:
    """Runs with a colour each; the baseline is grey."""
    others = [run for run in runs if run is not base]
    colors = {id(run): COLORS[number % len(COLORS)] for number, run in enumerate(others)}
    return [Arm(run, colors.get(id(run), BASE_COLOR)) for run in runs]


def _layout(height: int = 360, **fields: Any) -> Layout:
    return {
        "height": height,
        "margin": {"l": 70, "r": 20, "t": 10, "b": 50},
        "hovermode": "x unified",
        "hoverlabel": {"namelength": -1},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        **fields,
    }


def _axis(title: str, **fields: Any) -> Layout:
    return {"title": {"text": title, "standoff": 10}, "automargin": True, "ticklabelstandoff": 5, **fields}


_TURN_AXIS = _axis("turn of the trajectory", rangemode="tozero", tickformat="d")
_ZERO = {"rangemode": "tozero"}
_PERCENTILES = ("p50", "p95", "p99")
_LABELLED = 3
"""Arms whose bars have room for a label each."""
_TICKS = tuple(digit * 10.0**power for power in range(-3, 4) for digit in (1, 1.2, 1.5, 2, 3, 4, 5, 6, 8))

HITS = Chart(
    "hits",
    "Prefix cache: hit rate by turn",
    "Cached / all prompt tokens of that turn over the chosen trajectories; failed turns count with no hit. Dotted: the live part of it, "
    "whose KV is still resident.",
    _layout(xaxis=_TURN_AXIS, yaxis=_axis("share of prompt tokens", tickformat=".0%", range=[0, 1.02])),
    by_turn=True,
)
TOKENS = Chart(
    "tokens",
    "Live and logical tokens by turn",
    "Mean over the finished turns. Dotted: logical tokens, what the client sees. Solid: live tokens, whose KV is resident and attended at "
    "the end of the turn. For one trajectory, triangles mark the most live tokens during a turn.",
    _layout(xaxis=_TURN_AXIS, yaxis=_axis("tokens of the request", **_ZERO)),
    by_turn=True,
)
PEAKS = Chart(
    "peaks",
    "Peaks of each trajectory",
    "One mark a trajectory: its longest request against the most live tokens at any time. On the diagonal nothing was saved.",
    _layout(
        xaxis=_axis("peak request (logical) tokens", **_ZERO),
        yaxis=_axis("peak live tokens", **_ZERO),
        hovermode="closest",
    ),
)
READS = Chart(
    "reads",
    "KV reads by turn",
    "Positions whose KV attention reads: the live prefix once for each block of 128 new prompt tokens, and everything live once a "
    "generated token. Mean over the finished turns.",
    _layout(xaxis=_TURN_AXIS, yaxis=_axis("KV positions read a turn", **_ZERO)),
    by_turn=True,
)
LATENCY = Chart(
    "latency",
    "Time to the first token (left) and for each further one (right)",
    "Percentiles over the finished turns. TPOT: (last token − first token) / (tokens − 1).",
    _layout(
        barmode="group",
        hovermode="closest",
        xaxis=_axis("TTFT percentile", domain=[0, 0.45]),
        yaxis=_axis("seconds", **_ZERO),
        xaxis2=_axis("TPOT percentile", domain=[0.56, 1]),
        yaxis2=_axis("milliseconds a token", anchor="x2", **_ZERO),
    ),
)
EVICTIONS = Chart(
    "evictions",
    "Evictions: tokens by turn (left), time they took over the run (right)",
    "Left: mean over the finished turns. Right: seconds that evictions took since the run began, by the plugin's own counters; the "
    "same for every choice of trajectories.",
    _layout(
        hovermode="closest",
        xaxis={**_TURN_AXIS, "domain": [0, 0.45]},
        yaxis=_axis("tokens evicted a turn", **_ZERO),
        xaxis2=_axis("seconds since the run began", domain=[0.56, 1], **_ZERO),
        yaxis2=_axis("seconds spent evicting, in all", anchor="x2", **_ZERO),
    ),
    by_turn=True,
)
AGENT = Chart(
    "agent",
    "The agent's own overhead",
    "Mean of a trajectory. A call that repeats an earlier one of its trajectory: exact (same name and arguments), near (cosine of "
    f"{EMBEDDER} above {NEAR}, exact ones included). In a replay the calls are the recording's, so arms differ only by lost turns.",
    _layout(barmode="group", hovermode="closest", xaxis=_axis(""), yaxis=_axis("number a trajectory", **_ZERO)),
)
RATIOS = Chart(
    "ratios",
    "Ratio to {base}",
    "Over the turns both arms finished; bars: 95 % bootstrap interval over trajectories, drawn from five of them on. Left of 1: less than "
    "{base}.",
    _layout(
        340,
        hovermode="closest",
        scattermode="group",
        scattergap=0.4,
        xaxis=_axis("ratio (logarithmic scale)", type="log", tickvals=_TICKS, ticktext=[f"{tick:g}×" for tick in _TICKS]),
        yaxis={"automargin": True, "autorange": "reversed", "type": "category"},
        shapes=[{"type": "line", "x0": 1, "x1": 1, "yref": "paper", "y0": 0, "y1": 1, "line": {"color": "#374151", "width": 1.5}}],
    ),
)


def _escaped(name: str) -> str:
    """A name inside a hover template, where plotly reads tags and ``%{...}``."""
    return name.replace("<", "&lt;").replace("%{", "% {")


def _by_turn(turns: Sequence[TurnRecord]) -> dict[int, list[TurnRecord]]:
    groups: defaultdict[int, list[TurnRecord]] = defaultdict(list)
    for turn in turns:
        groups[turn.turn].append(turn)
    return dict(sorted(groups.items()))


def _mean(field: str) -> Callable[[Sequence[TurnRecord]], float]:
    return lambda records: round(sum(getattr(r, field) for r in records) / len(records), 1)


def _share(field: str) -> Callable[[Sequence[TurnRecord]], float]:
    return lambda records: round(sum(getattr(r, field) for r in records) / sum(r.prompt_tokens for r in records), 4)


def _line(arm: Arm, name: str, turns: Sequence[TurnRecord], value: Callable[[Sequence[TurnRecord]], float]) -> Trace:
    groups = _by_turn(turns)
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(groups) < 40 else "lines",
        "name": name,
        "meta": arm.name,
        "x": [turn + 1 for turn in groups],
        "y": [value(records) for records in groups.values()],
        "line": {"color": arm.color, "width": 2},
        "marker": {"size": 5},
        "legendgroup": arm.name,
    }


def _dotted(arm: Arm, name: str, turns: Sequence[TurnRecord], value: Callable[[Sequence[TurnRecord]], float]) -> Trace:
    """A second line of an arm, under the legend entry of its first."""
    line = _line(arm, name, turns, value)
    return line | {"line": {"color": arm.color, "width": 2, "dash": "dot"}, "showlegend": False}


def _each(view: View, arms: Sequence[Arm], finished: bool = True) -> list[tuple[Arm, list[TurnRecord]]]:
    """Arms with turns in this view."""
    pairs = [(arm, [t for t in view.turns.get(arm.name, []) if t.ok or not finished]) for arm in arms]
    return [(arm, turns) for arm, turns in pairs if turns]


def hits(view: View, arms: Sequence[Arm]) -> list[Trace]:
    traces = []
    for arm, turns in _each(view, arms, finished=False):
        traces.append(_line(arm, arm.name, turns, _share("cached_tokens")))
        if any(t.live_cached != t.cached_tokens for t in turns):
            traces.append(_dotted(arm, f"{arm.name}, live part", turns, _share("live_cached")))
    return traces


def tokens(view: View, arms: Sequence[Arm]) -> list[Trace]:
    traces = []
    for arm, turns in _each(view, arms):
        traces.append(_line(arm, arm.name, turns, _mean("live")))
        traces.append(_dotted(arm, f"{arm.name}, logical", turns, _mean("logical")))
        if view.single:
            peak = _dotted(arm, f"{arm.name}, peak during the turn", turns, _mean("peak_live"))
            traces.append(peak | {"mode": "markers"} | {"marker": {"symbol": "triangle-up", "size": 9, "color": arm.color}})
    return traces


def peaks(view: View, arms: Sequence[Arm]) -> list[Trace]:
    traces: list[Trace] = []
    longest = 0
    for arm, turns in _each(view, arms):
        names = sorted({t.trajectory for t in turns})
        columns = Turns(turns, names)
        logical, live = columns.peak("logical").tolist(), columns.peak("peak_live").tolist()
        longest = max(longest, *logical)
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": arm.name,
                "meta": arm.name,
                "x": logical,
                "y": live,
                "text": names,
                "hovertemplate": "%{text}<br>logical %{x:,}, live %{y:,}<extra>" + _escaped(arm.name) + "</extra>",
                "marker": {"color": arm.color, "size": 9, "opacity": 0.75},
            }
        )
    if traces:
        diagonal = {"x": [0, longest], "y": [0, longest], "mode": "lines", "line": {"color": "#9ca3af", "dash": "dash", "width": 1}}
        traces.insert(0, {"type": "scatter", "name": "nothing saved", "hoverinfo": "skip", **diagonal})
    return traces


def reads(view: View, arms: Sequence[Arm]) -> list[Trace]:
    return [_line(arm, arm.name, turns, _mean("kv_reads")) for arm, turns in _each(view, arms)]


def _measured(name: str) -> Measure:
    return next(measure for measure in MEASURES if measure.name == name)


def latency(view: View, arms: Sequence[Arm]) -> list[Trace]:
    traces = []
    present = _each(view, arms)
    for arm, turns in present:
        columns = Turns(turns, sorted({t.trajectory for t in turns}))
        for kind, scale, axis in (("TTFT", 1, ""), ("TPOT", 1000, "2")):
            values = [_measured(f"{kind} {name}").value(columns) for name in _PERCENTILES]
            if not any(math.isnan(value) for value in values):
                traces.append(
                    {
                        "type": "bar",
                        "name": arm.name,
                        "meta": arm.name,
                        "x": list(_PERCENTILES),
                        "y": [round(value * scale, 4) for value in values],
                        "text": [seconds_text(value) for value in values],
                        "textposition": "outside" if len(present) <= _LABELLED else "none",
                        "textfont": {"size": 10},
                        "textangle": 0,
                        "cliponaxis": False,
                        "hovertemplate": f"%{{x}}: %{{text}}<extra>{_escaped(arm.name)}</extra>",
                        "marker": {"color": arm.color},
                        "legendgroup": arm.name,
                        "showlegend": kind == "TTFT",
                        "xaxis": f"x{axis}",
                        "yaxis": f"y{axis}",
                    }
                )
    return traces


def evictions(view: View, arms: Sequence[Arm]) -> list[Trace]:
    traces = []
    for arm, turns in _each(view, arms):
        if any(t.pruned for t in turns):
            traces.append(_line(arm, arm.name, turns, _mean("pruned")))
    for arm in arms:
        samples = arm.run.samples
        if samples and samples[-1].counters.prune_events > samples[0].counters.prune_events:
            start = samples[0].counters.prune_seconds
            shown = any(trace["meta"] == arm.name for trace in traces)
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": arm.name,
                    "meta": arm.name,
                    "x": [sample.time_s for sample in samples],
                    "y": [round(sample.counters.prune_seconds - start, 4) for sample in samples],
                    "text": [f"{sample.counters.prune_events - samples[0].counters.prune_events} evictions" for sample in samples],
                    "hovertemplate": "%{x:.0f} s: %{y:.3g} s, %{text}",
                    "line": {"color": arm.color, "shape": "hv"},
                    "legendgroup": arm.name,
                    "showlegend": not shown,
                    "xaxis": "x2",
                    "yaxis": "y2",
                }
            )
    return traces


def agent(view: View, arms: Sequence[Arm]) -> list[Trace]:
    traces = []
    for arm, turns in _each(view, arms, finished=False):
        if any(t.tool_calls is None for t in turns):
            continue
        number = len({t.trajectory for t in turns})
        sums = [len(turns), *(sum(getattr(t, f) for t in turns) for f in ("tool_calls", "duplicate_calls", "near_duplicate_calls"))]
        traces.append(
            {
                "type": "bar",
                "name": arm.name,
                "meta": arm.name,
                "x": ["turns", "tool calls", "exact duplicate calls", "near duplicate calls"],
                "y": [round(value / number, 2) for value in sums],
                "texttemplate": "%{y:.3~g}",
                "textposition": "outside",
                "cliponaxis": False,
                "marker": {"color": arm.color},
            }
        )
    return traces


def ratios(found: Mapping[str, Mapping[str, Ratio | None]], arms: Sequence[Arm]) -> list[Trace]:
    """A dot with its interval for each arm and charted measure.

    Args:
        found: ratios by arm and measure.
    """
    traces = []
    charted = [measure.name for measure in MEASURES if measure.charted]
    for arm in arms:
        shown = {name: r for name in charted if (r := found.get(arm.name, {}).get(name)) is not None and r.value > 0}
        if not shown:
            continue
        values = shown.values()
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": arm.name,
                "meta": arm.name,
                "x": [round(r.value, 4) for r in values],
                "y": list(shown),
                "text": [ratio_text(r) for r in values],
                "hovertemplate": "%{y}: %{text}<extra>" + _escaped(arm.name) + "</extra>",
                "marker": {"color": arm.color, "size": 10},
                "orientation": "h",
                "offsetgroup": arm.name,
                "error_x": {
                    "type": "data",
                    "symmetric": False,
                    "array": [0 if r.high is None else round(r.high - r.value, 4) for r in values],
                    "arrayminus": [0 if r.low is None else round(r.value - r.low, 4) for r in values],
                    "thickness": 1.5,
                    "width": 5,
                },
            }
        )
    return traces


def ratio_text(ratio: Ratio) -> str:
    """``0.41× [0.38, 0.45]``, without brackets where there is no interval."""
    interval = "" if ratio.low is None or ratio.high is None else f" [{ratio.low:.2f}, {ratio.high:.2f}]"
    return f"{ratio.value:.2f}×{interval}"


BY_VIEW: tuple[tuple[Chart, Callable[[View, Sequence[Arm]], list[Trace]]], ...] = (
    (TOKENS, tokens),
    (PEAKS, peaks),
    (HITS, hits),
    (READS, reads),
    (LATENCY, latency),
    (EVICTIONS, evictions),
    (AGENT, agent),
)
"""The charts that depend on the choice of trajectories, in the page's order, and what draws them."""


def pool(arm: Arm, number: int) -> tuple[Chart, list[Trace]]:
    """The pool of one run over time, stacked to its size; dead positions take no slot and are a line."""
    samples = arm.run.samples
    times = [sample.time_s for sample in samples]
    traces: list[Trace] = []
    for field, name, color in POOL_TERMS:
        values = [getattr(sample.pool, field) for sample in samples]
        area = {"stackgroup": "pool", "fillcolor": color, "line": {"width": 0.5, "color": color, "shape": "hv"}}
        traces.append({"type": "scatter", "mode": "lines", "name": name, "x": times, "y": values, **area})
    dead = [sample.pool.dead for sample in samples]
    dashed = {"color": "#b91c1c", "dash": "dash", "width": 2, "shape": "hv"}
    traces.append({"type": "scatter", "mode": "lines", "name": "dead (pruned, no slot)", "x": times, "y": dead, "line": dashed})
    chart = Chart(
        f"pool{number}",
        f"KV pool over time: {arm.name}",
        f"Slots by use, stacked to the pool's {samples[0].pool.total:,}. Dead positions are beside the pool: their slots are free again.",
        _layout(
            xaxis=_axis("seconds since the run began", **_ZERO),
            yaxis=_axis("slots (tokens)", **_ZERO),
            legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        ),
        arm.name,
    )
    return chart, traces


def decode(result: bench_decode.Result, number: int) -> tuple[Chart, list[Trace]]:
    """Decode step time over the request's length."""
    traces = []
    arms = list(dict.fromkeys((cell.arm, cell.batch) for cell in result.cells))
    for i, (arm, batch) in enumerate(arms):
        cells = [c for c in result.cells if (c.arm, c.batch) == (arm, batch) and c.skipped is None]
        steps = [round(c.step_s * 1000, 4) for c in cells]
        traces.append(_bench_line(f"{arm}, batch {batch}", [c.length for c in cells], steps, i))
    chart = Chart(
        f"decode{number}",
        "Benchmark: decode step",
        f"Median step time of one batch. {result.origin.device}.",
        _layout(xaxis=_axis("logical tokens of each request", **_ZERO), yaxis=_axis("milliseconds a step", **_ZERO)),
    )
    return chart, traces


def prune(result: bench_prune.Result, number: int) -> tuple[Chart, list[Trace]]:
    """Cost of one eviction over the request's length."""
    traces = []
    for i, arm in enumerate(dict.fromkeys(cost.arm for cost in result.costs)):
        costs = [cost for cost in result.costs if cost.arm == arm]
        traces.append(_bench_line(arm, [c.length for c in costs], [round(c.p50_s * 1000, 4) for c in costs], i))
    chart = Chart(
        f"prune{number}",
        "Benchmark: one eviction",
        f"Median of scoring, selection and commit together. {result.origin.device}.",
        _layout(xaxis=_axis("live tokens before the eviction", **_ZERO), yaxis=_axis("milliseconds an eviction", **_ZERO)),
    )
    return chart, traces


def _bench_line(name: str, x: list[int], y: list[float], number: int) -> Trace:
    color = COLORS[number % len(COLORS)]
    return {"type": "scatter", "mode": "lines+markers", "name": name, "x": x, "y": y, "line": {"color": color}}
