"""Every Prometheus metric of the plugin in one table. Plain data: whoever exports it brings the Prometheus client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True)
class MetricSpec:
    """One metric as ``/metrics`` shows it."""

    name: str
    """Exposed name: ``intentkv_`` + what is counted + unit, counters with ``_total`` (Prometheus naming rules)."""
    kind: Kind
    help: str
    unit: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, in ``unit``, ascending, without +Inf."""


PRUNE_EVENTS = MetricSpec("intentkv_prune_events_total", "counter", "Evictions committed, one a request and prefill at most.", "events")
PRUNED_TOKENS = MetricSpec("intentkv_pruned_tokens_total", "counter", "Prompt positions evicted from the KV cache.", "tokens")
FREED_SLOTS = MetricSpec("intentkv_freed_slots_total", "counter", "KV slots evictions handed back to the pool.", "slots")
LIVE_TOKENS = MetricSpec("intentkv_tree_live_tokens", "gauge", "Positions of the radix tree whose KV is resident.", "tokens")
DEAD_TOKENS = MetricSpec("intentkv_tree_dead_tokens", "gauge", "Positions of the radix tree whose KV was evicted.", "tokens")
LOGICAL_TOKENS = MetricSpec("intentkv_tree_logical_tokens", "gauge", "Positions of the radix tree, live and dead.", "tokens")
PROMPT_TOKENS = MetricSpec("intentkv_prompt_tokens_total", "counter", "Prompt tokens of prefilled requests.", "tokens")
CACHED_TOKENS = MetricSpec(
    "intentkv_cached_tokens_total", "counter", "Prompt tokens found cached; divided by prompt tokens: the prefix-hit rate.", "tokens"
)
LIVE_CACHED_TOKENS = MetricSpec("intentkv_live_cached_tokens_total", "counter", "Live part of the cached prompt tokens.", "tokens")
PRUNE_SECONDS = MetricSpec(
    "intentkv_prune_seconds",
    "histogram",
    "Time one eviction takes on the scheduler: scoring, selection and commit.",
    "seconds",
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
)
SESSIONS = MetricSpec("intentkv_sessions", "gauge", "Session states held.", "sessions")
DECLINED = MetricSpec(
    "intentkv_declined_prunes_total", "counter", "Evictions that were due and did not happen, by reason.", "prunes", labels=("reason",)
)

METRICS: tuple[MetricSpec, ...] = (
    PRUNE_EVENTS,
    PRUNED_TOKENS,
    FREED_SLOTS,
    LIVE_TOKENS,
    DEAD_TOKENS,
    LOGICAL_TOKENS,
    PROMPT_TOKENS,
    CACHED_TOKENS,
    LIVE_CACHED_TOKENS,
    PRUNE_SECONDS,
    SESSIONS,
    DECLINED,
)
