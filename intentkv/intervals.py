"""Intervals of a mean over few, unequal trajectories."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

from pydantic import BaseModel

_RESAMPLES = 10_000


class Interval(BaseModel):
    mean: float
    low: float
    high: float
    """Ends of the 95 % bootstrap interval of the mean over trajectories."""


def bootstrap(values: Sequence[float], seed: int) -> Interval | None:
    """Mean of ``values`` with its 95 % percentile-bootstrap interval; None without values."""
    if not values:
        return None
    draw = random.Random(seed)
    means = sorted(statistics.fmean(draw.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return Interval(mean=statistics.fmean(values), low=means[int(0.025 * _RESAMPLES)], high=means[int(0.975 * _RESAMPLES) - 1])
