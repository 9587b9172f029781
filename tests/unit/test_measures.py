"""Figures and ratios: against the run's own aggregates, and against resampling done the long way."""

from __future__ import annotations

import math
import random
import statistics

import numpy as np
import pytest

from intentkv_eval.measures import MEASURES, RESAMPLES, Comparison, Measure, Turns
from intentkv_eval.turns import TurnRecord, aggregate

pytestmark = pytest.mark.unit


def measure(name: str) -> Measure:
    (found,) = [m for m in MEASURES if m.name == name]
    return found


def made(seed: int, trajectories: int = 7, scale: float = 1.0) -> list[TurnRecord]:
    """Random turns, unequal in number, some of them failed."""
    draw = random.Random(seed)
    records = []
    for name in range(trajectories):
        for number in range(draw.randint(1, 6)):
            ok = draw.random() > 0.15
            prompt = draw.randint(50, 900)
            ttft = draw.uniform(0.1, 2) * scale
            records.append(
                TurnRecord(
                    trajectory=f"t{name}",
                    source="made",
                    turn=number,
                    arm="a",
                    status="ok" if ok else "error: lost",
                    prompt_tokens=prompt,
                    cached_tokens=draw.randint(0, prompt) if ok else 0,
                    live_cached=draw.randint(0, prompt) if ok else 0,
                    logical=prompt + 20 if ok else 0,
                    peak_live=draw.randint(10, prompt) if ok else 0,
                    live=draw.randint(10, prompt) if ok else 0,
                    pruned=draw.choice([0, 5]) if ok else 0,
                    generated=draw.randint(1, 20) if ok else 0,
                    ttft_s=ttft if ok else None,
                    latency_s=ttft + draw.uniform(0, 3) if ok else None,
                    kv_reads=draw.randint(1, 10**6) if ok else 0,
                )
            )
    return records


@pytest.mark.parametrize("seed", range(5))
def test_values_equal_the_summary(seed: int) -> None:
    """Catches a page whose figures differ from ``summary.json`` of the same run."""
    records = made(seed)
    turns = Turns(records, sorted({r.trajectory for r in records}))
    figures = aggregate(records, 1.0)
    expected = {
        "peak live tokens, mean over trajectories": figures.peak_live_mean,
        "peak live tokens, largest": figures.peak_live_max,
        "peak request (logical) tokens, mean": figures.peak_logical_mean,
        "KV reads, positions": figures.kv_reads,
        "prefix-hit rate": figures.prefix_hit_rate,
        "live-hit rate": figures.live_hit_rate,
        "recomputed prompt tokens": figures.recomputed_tokens,
        "evicted tokens": figures.pruned_tokens,
        "turns": figures.turns,
        "failed or skipped turns": figures.failed_turns + figures.skipped_turns,
    }
    for kind, values in (("TTFT", figures.ttft_s), ("TPOT", figures.tpot_s)):
        assert values is not None
        expected |= {f"{kind} {name}": getattr(values, name) for name in ("p50", "p95", "p99")}
    for name, value in expected.items():
        assert measure(name).value(turns) == pytest.approx(value), name


@pytest.mark.parametrize("name", [m.name for m in MEASURES if "calls" not in m.name])
def test_weights_are_repetitions(name: str) -> None:
    """Catches a resample that is not what repeating its trajectories' turns would give."""
    records = made(3)
    names = sorted({r.trajectory for r in records})
    weights = np.array([[0, 2, 1, 0, 3, 1, 0], [1, 1, 1, 1, 1, 1, 1], [7, 0, 0, 0, 0, 0, 0]], dtype=float)
    found = measure(name).statistic(Turns(records, names), weights)
    for row, value in zip(weights, found, strict=True):
        copies = [
            record.model_copy(update={"trajectory": f"{record.trajectory}/{k}"})
            for trajectory, count in zip(names, row, strict=True)
            for k in range(int(count))
            for record in records
            if record.trajectory == trajectory
        ]
        repeated = Turns(copies, sorted({r.trajectory for r in copies}))
        assert value == pytest.approx(measure(name).value(repeated), nan_ok=True)


def test_ratio_and_interval() -> None:
    """Catches arms resampled apart from each other, an interval of something else than the ratio, and swapped arms."""
    base = [r for r in made(1, 12) if r.ok]
    double = [r.model_copy(update={"kv_reads": 2 * r.kv_reads}) for r in base]
    ratio = Comparison(double, base).ratio(measure("KV reads, positions"))
    # as pairs every resample gives exactly 2; apart from each other they would not
    assert ratio == pytest.approx((2.0, 2.0, 2.0))
    other = [r.model_copy(update={"kv_reads": r.kv_reads + 100_000 * (i % 3)}) for i, r in enumerate(base)]
    ratio = Comparison(other, base).ratio(measure("KV reads, positions"))
    draw = random.Random(0)
    names = sorted({r.trajectory for r in base})
    sums = {n: [sum(r.kv_reads for r in side if r.trajectory == n) for side in (other, base)] for n in names}
    replicates = []
    for _ in range(RESAMPLES):
        drawn = [sums[n] for n in draw.choices(names, k=len(names))]
        replicates.append(sum(a for a, _ in drawn) / sum(b for _, b in drawn))
    cuts = statistics.quantiles(replicates, n=40)
    assert ratio is not None
    assert (ratio.low, ratio.high) == pytest.approx((cuts[0], cuts[-1]), rel=0.02)
    assert ratio.low < ratio.value < ratio.high


def test_only_turns_of_both_arms_are_compared() -> None:
    """Catches a comparison of different work: a turn that failed or is missing on one side."""
    base = [r for r in made(2, 3) if r.ok]
    fewer = [base[0], *[r.model_copy(update={"status": "error: lost"}) for r in base[1:]]]
    ratio = Comparison(fewer, base).ratio(measure("turns"))
    assert ratio == (1.0, None, None)  # one trajectory: no interval
    assert Comparison([], base).ratio(measure("turns")) is None
    assert Comparison(base, base).ratio(measure("exact duplicate calls")) is None  # not recorded


def test_nothing_to_measure_is_not_zero() -> None:
    """Catches a latency of 0 for a run whose turns all failed."""
    failed = [r.model_copy(update={"status": "error", "ttft_s": None, "latency_s": None}) for r in made(4)]
    turns = Turns(failed, sorted({r.trajectory for r in failed}))
    assert math.isnan(measure("TTFT p50").value(turns))
    assert math.isnan(measure("prefix-hit rate").value(Turns([], [])))
