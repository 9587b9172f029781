"""The figures that arms are compared by, over any choice of trajectories, and their ratios with bootstrap intervals.

Every figure is computed from weights of the trajectories: all ones give its value, the multiplicities of a resample give a bootstrap
replicate. So a value and its interval come from one formula, and two arms are resampled as pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from intentkv_eval.turns import TurnRecord

Floats = NDArray[np.float64]

RESAMPLES = 2000
LEAST_TRAJECTORIES = 5
"""Fewer give no interval: there is too little to resample."""

_CHUNK = 1_000_000
"""Numbers held at a time while resampling quantiles."""


class Turns:
    """Turns of one arm as columns.

    Args:
        records: turns of the trajectories in ``trajectories``.
        trajectories: order of the per-trajectory arrays [n].
    """

    def __init__(self, records: Sequence[TurnRecord], trajectories: Sequence[str]) -> None:
        self.records = records
        number = {name: i for i, name in enumerate(trajectories)}
        self.count = len(trajectories)
        self.index = np.array([number[r.trajectory] for r in records], dtype=np.int64)
        """[T] Number of each turn's trajectory."""

    @cached_property
    def ok(self) -> Floats:
        """[T] 1 for a finished turn, else 0."""
        return np.array([float(r.ok) for r in self.records])

    def column(self, field: str) -> Floats:
        """[T] A field of every turn; NaN where it is None."""
        values = [getattr(r, field) for r in self.records]
        return np.array([np.nan if v is None else float(v) for v in values])

    def total(self, values: Floats) -> Floats:
        """[n] Sum of [T] ``values`` in each trajectory."""
        sums = np.zeros(self.count)
        np.add.at(sums, self.index, values)
        return sums

    def peak(self, field: str) -> Floats:
        """[n] Largest value of a field in each trajectory."""
        peaks = np.zeros(self.count)
        np.maximum.at(peaks, self.index, self.column(field))
        return peaks


Statistic = Callable[[Turns, Floats], Floats]
"""Maps turns and weights [R, n] to values [R]; NaN where there is nothing to measure."""


def _divide(top: Floats, bottom: Floats) -> Floats:
    result: Floats = np.divide(top, bottom, out=np.full(np.shape(top), np.nan), where=bottom != 0)
    return result


def _sum(field: str) -> Statistic:
    return lambda turns, weights: weights @ turns.total(turns.column(field))


def _rate(field: str, of: str) -> Statistic:
    return lambda turns, weights: _divide(_sum(field)(turns, weights), _sum(of)(turns, weights))


def _mean_finished(field: str) -> Statistic:
    return lambda turns, weights: _divide(weights @ turns.total(turns.column(field) * turns.ok), weights @ turns.total(turns.ok))


def _mean_peak(field: str) -> Statistic:
    return lambda turns, weights: _divide(weights @ turns.peak(field), weights.sum(axis=1))


def _largest_peak(field: str) -> Statistic:
    def statistic(turns: Turns, weights: Floats) -> Floats:
        largest: Floats = np.where(weights > 0, turns.peak(field), 0.0).max(axis=1, initial=0.0)
        return largest

    return statistic


def _recomputed(turns: Turns, weights: Floats) -> Floats:
    return weights @ turns.total((turns.column("prompt_tokens") - turns.column("cached_tokens")) * turns.ok)


def _number_of(test: Callable[[TurnRecord], bool]) -> Statistic:
    return lambda turns, weights: weights @ turns.total(np.array([float(test(r)) for r in turns.records]))


def quantile(field: str, q: float) -> Statistic:
    """Linearly interpolated quantile of a field over the finished turns that have it; a turn counts as often as its trajectory weighs."""

    def statistic(turns: Turns, weights: Floats) -> Floats:
        values = turns.column(field)
        there = np.flatnonzero(~np.isnan(values) & (turns.ok > 0))
        order = there[np.argsort(values[there], kind="stable")]
        if not len(order):
            return np.full(len(weights), np.nan)
        step = max(1, _CHUNK // len(order))
        chunks = (weights[i : i + step] for i in range(0, len(weights), step))
        return np.concatenate([_weighted(values[order], chunk[:, turns.index[order]], q) for chunk in chunks])

    return statistic


def _weighted(values: Floats, weights: Floats, q: float) -> Floats:
    """[R] Quantiles of ascending ``values`` [T] that are repeated ``weights`` [R, T] times."""
    upto = weights.cumsum(axis=1)
    number = upto[:, -1]
    place = q * np.maximum(number - 1, 0)
    low = np.floor(place)
    high = np.minimum(low + 1, np.maximum(number - 1, 0))
    at = [values[(upto > rank[:, None]).argmax(axis=1)] for rank in (low, high)]
    return np.where(number > 0, at[0] + (at[1] - at[0]) * (place - low), np.nan)


def tokens_text(value: float) -> str:
    """A count of tokens, shortened from a million on."""
    return f"{value / 1e6:,.2f} M" if abs(value) >= 1e6 else f"{value:,.0f}"


def seconds_text(value: float) -> str:
    """Seconds, as milliseconds below one."""
    return f"{value:,.2f} s" if value >= 1 else f"{value * 1000:,.1f} ms"


def _percent(value: float) -> str:
    return f"{value:.1%}"


Better = Literal["less", "more", None]


@dataclass(frozen=True)
class Measure:
    """One row of the comparison."""

    name: str
    group: str
    text: Callable[[float], str]
    statistic: Statistic
    better: Better = "less"
    charted: bool = False
    """Shown in the chart of ratios."""

    def value(self, turns: Turns) -> float:
        """Its value over all trajectories of ``turns``."""
        return float(self.statistic(turns, np.ones((1, turns.count)))[0]) if turns.count else float("nan")


PEAK_LIVE = Measure("peak live tokens, mean over trajectories", "memory", tokens_text, _mean_peak("peak_live"), charted=True)
KV_READS = Measure("KV reads, positions", "memory", tokens_text, _sum("kv_reads"), charted=True)
PREFIX_HIT = Measure("prefix-hit rate", "prefix cache", _percent, _rate("cached_tokens", "prompt_tokens"), "more", charted=True)
LIVE_HIT = Measure("live-hit rate", "prefix cache", _percent, _rate("live_cached", "prompt_tokens"), None)
TTFT_P50 = Measure("TTFT p50", "latency", seconds_text, quantile("ttft_s", 0.5), charted=True)
TPOT_P50 = Measure("TPOT p50", "latency", seconds_text, quantile("tpot_s", 0.5), charted=True)

MEASURES: tuple[Measure, ...] = (
    PEAK_LIVE,
    Measure("peak live tokens, largest", "memory", tokens_text, _largest_peak("peak_live")),
    Measure("peak request (logical) tokens, mean", "memory", tokens_text, _mean_peak("logical"), None),
    Measure("live tokens after a turn, mean", "memory", tokens_text, _mean_finished("live"), charted=True),
    KV_READS,
    PREFIX_HIT,
    LIVE_HIT,
    Measure("recomputed prompt tokens", "prefix cache", tokens_text, _recomputed),
    TTFT_P50,
    Measure("TTFT p95", "latency", seconds_text, quantile("ttft_s", 0.95), charted=True),
    Measure("TTFT p99", "latency", seconds_text, quantile("ttft_s", 0.99)),
    TPOT_P50,
    Measure("TPOT p95", "latency", seconds_text, quantile("tpot_s", 0.95), charted=True),
    Measure("TPOT p99", "latency", seconds_text, quantile("tpot_s", 0.99)),
    Measure("whole turn p50", "latency", seconds_text, quantile("latency_s", 0.5)),
    Measure("whole turn p95", "latency", seconds_text, quantile("latency_s", 0.95)),
    Measure("evicted tokens", "eviction", tokens_text, _sum("pruned"), None),
    Measure("turns with an eviction", "eviction", tokens_text, _number_of(lambda r: r.pruned > 0), None),
    Measure("turns", "agent", tokens_text, _number_of(lambda r: True), None),
    Measure("failed or skipped turns", "agent", tokens_text, _number_of(lambda r: not r.ok)),
    Measure("tool calls", "agent", tokens_text, _sum("tool_calls"), None),
    Measure("exact duplicate calls", "agent", _percent, _rate("duplicate_calls", "tool_calls"), None),
    Measure("near duplicate calls", "agent", _percent, _rate("near_duplicate_calls", "tool_calls"), None),
)


class Ratio(NamedTuple):
    """Of an arm's figure to the baseline's, over the turns that both have."""

    value: float
    low: float | None
    high: float | None
    """Ends of the 95 % percentile-bootstrap interval over trajectories; None with fewer than :data:`LEAST_TRAJECTORIES`."""


class Comparison:
    """An arm against the baseline, over the (trajectory, turn) pairs both of them have.

    A turn counts only where both arms finished it: one that failed in one arm would make the other look expensive. Failures have their
    own row.
    """

    def __init__(self, arm: Sequence[TurnRecord], base: Sequence[TurnRecord], seed: int = 0) -> None:
        common = {(r.trajectory, r.turn) for r in arm if r.ok} & {(r.trajectory, r.turn) for r in base if r.ok}
        self.trajectories = sorted({name for name, _ in common})
        self._arm, self._base = (Turns([r for r in side if (r.trajectory, r.turn) in common], self.trajectories) for side in (arm, base))
        count = len(self.trajectories)
        self._weights: Floats | None = None
        if count >= LEAST_TRAJECTORIES:
            draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), RESAMPLES)
            self._weights = draws.astype(np.float64)

    def ratio(self, measure: Measure) -> Ratio | None:
        """None where the baseline is zero or there is nothing to compare."""
        if not self.trajectories:
            return None
        top, bottom = measure.value(self._arm), measure.value(self._base)
        if not bottom or np.isnan(top) or np.isnan(bottom):
            return None
        if self._weights is None:
            return Ratio(top / bottom, None, None)
        replicates = _divide(measure.statistic(self._arm, self._weights), measure.statistic(self._base, self._weights))
        replicates = replicates[~np.isnan(replicates)]
        if not len(replicates):
            return Ratio(top / bottom, None, None)
        low, high = np.quantile(replicates, [0.025, 0.975])
        return Ratio(top / bottom, float(low), float(high))
