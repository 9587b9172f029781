"""What evictions cost, by the plugin's own counters: ``/intentkv/status`` and the histogram in ``/metrics``."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

import httpx
from pydantic import BaseModel

from intentkv.metrics import PRUNE_SECONDS
from intentkv_eval.client import RequestFailed


class PruneCounters(BaseModel):
    """Totals since the server started."""

    events: int
    tokens: int
    seconds: float
    declined: dict[str, int] = {}
    buckets: dict[float, float] = {}
    """Events by upper bound in seconds, cumulative as Prometheus counts them; empty without ``--enable-metrics``."""

    def since(self, before: PruneCounters) -> PruneCounters:
        """What happened between two readings."""
        return PruneCounters(
            events=self.events - before.events,
            tokens=self.tokens - before.tokens,
            seconds=self.seconds - before.seconds,
            declined={reason: count - before.declined.get(reason, 0) for reason, count in self.declined.items()},
            buckets={bound: count - before.buckets.get(bound, 0.0) for bound, count in self.buckets.items()},
        )

    @property
    def mean_s(self) -> float | None:
        return self.seconds / self.events if self.events else None

    def quantile_s(self, q: float) -> float | None:
        """Seconds under which a share ``q`` of the events took, interpolated within its bucket; None without events."""
        return bucket_quantile(self.buckets, q)


class PruneFigures(BaseModel):
    """What evictions cost in a stretch of time, by the plugin's own counters."""

    events: int
    tokens: int
    mean_s: float | None
    p50_s: float | None
    p99_s: float | None
    """Interpolated in the buckets of the histogram."""
    declined: dict[str, int]

    @classmethod
    def of(cls, counters: PruneCounters) -> PruneFigures:
        """Figures of ``counters``, usually a difference of two readings."""
        return cls(
            events=counters.events,
            tokens=counters.tokens,
            mean_s=counters.mean_s,
            p50_s=counters.quantile_s(0.5),
            p99_s=counters.quantile_s(0.99),
            declined=counters.declined,
        )


def bucket_quantile(buckets: Mapping[float, float], q: float) -> float | None:
    """Quantile of a cumulative histogram, linear within a bucket as PromQL's ``histogram_quantile``.

    Beyond the last finite bound it is that bound: nothing more is known.
    """
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0.0
    if not total:
        return None
    low, below = 0.0, 0.0
    for bound in bounds:
        count = buckets[bound]
        if count >= q * total:
            return low if bound == inf else low + (bound - low) * (q * total - below) / (count - below)
        low, below = bound, count
    return low


async def read_counters(http: httpx.AsyncClient) -> PruneCounters | None:
    """Counters of the server behind ``http``; None from a stock one.

    Raises:
        RequestFailed: the server does not answer.
    """
    try:
        status = await http.get("/intentkv/status")
        if status.status_code == httpx.codes.NOT_FOUND:
            return None
        counters = status.raise_for_status().json()["counters"]
        metrics = await http.get("/metrics", follow_redirects=True)
    except (httpx.HTTPError, KeyError, ValueError) as error:
        raise RequestFailed(f"the server's counters cannot be read: {error!r}") from error
    return parse_counters(counters, metrics.text if metrics.is_success else None)


def parse_counters(counters: Mapping[str, Any], exposition: str | None) -> PruneCounters:
    """Counters from those of ``/intentkv/status`` and the text of ``/metrics``, None without ``--enable-metrics``."""
    return PruneCounters(
        events=counters["prune_events"],
        tokens=counters["pruned_tokens"],
        seconds=counters["prune_seconds"],
        declined=counters["declined"],
        buckets={} if exposition is None else histogram(exposition, PRUNE_SECONDS.name),
    )


def histogram(exposition: str, name: str) -> dict[float, float]:
    """Cumulative counts by upper bound of the histogram ``name`` in a Prometheus text; several label sets are summed."""
    from prometheus_client.parser import text_string_to_metric_families

    buckets: dict[float, float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name == f"{name}_bucket":
                bound = float(sample.labels["le"])
                buckets[bound] = buckets.get(bound, 0.0) + sample.value
    return buckets
