"""Prometheus metrics in the scheduler process; SGLang collects them through its multiprocess directory (``--enable-metrics``)."""

from __future__ import annotations

from typing import Any

from intentkv import metrics
from intentkv.metrics import MetricSpec
from intentkv_sglang.runtime import Runtime


def _make(spec: MetricSpec) -> Any:
    from prometheus_client import Counter, Gauge, Histogram

    if spec.kind == "counter":
        return Counter(spec.name, spec.help, spec.labels)
    if spec.kind == "gauge":
        return Gauge(spec.name, spec.help, spec.labels, multiprocess_mode="mostrecent")
    return Histogram(spec.name, spec.help, spec.labels, buckets=spec.buckets)


class Exporter:
    """Publishes a runtime's counters. Made after SGLang has set the multiprocess directory, on rank 0 only."""

    _COUNTERS = (
        (metrics.PRUNE_EVENTS, "prune_events"),
        (metrics.PRUNED_TOKENS, "pruned_tokens"),
        (metrics.FREED_SLOTS, "freed_slots"),
        (metrics.PROMPT_TOKENS, "prompt_tokens"),
        (metrics.CACHED_TOKENS, "cached_tokens"),
        (metrics.LIVE_CACHED_TOKENS, "live_cached_tokens"),
    )

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._metrics = {spec.name: _make(spec) for spec in metrics.METRICS}
        self._published: dict[str, int] = {}

    def _advance(self, key: str, metric: Any, total: int) -> None:
        step = total - self._published.get(key, 0)
        if step:
            metric.inc(step)
            self._published[key] = total

    def publish(self) -> None:
        """Bring the metrics up to date; cheap, called after each batch result."""
        runtime = self._runtime
        for spec, name in self._COUNTERS:
            self._advance(spec.name, self._metrics[spec.name], getattr(runtime.counters, name))
        declined = self._metrics[metrics.DECLINED.name]
        for reason, count in runtime.counters.declined.items():
            self._advance(f"declined/{reason}", declined.labels(reason), count)
        for seconds in runtime.evictions.durations:
            self._metrics[metrics.PRUNE_SECONDS.name].observe(seconds)
        runtime.evictions.durations.clear()
        live = runtime.cache.evictable_size() + runtime.cache.protected_size()
        dead = runtime.cache.component.total_dead
        self._metrics[metrics.LIVE_TOKENS.name].set(live)
        self._metrics[metrics.DEAD_TOKENS.name].set(dead)
        self._metrics[metrics.LOGICAL_TOKENS.name].set(live + dead)
        self._metrics[metrics.SESSIONS.name].set(len(runtime.sessions))
