"""Prometheus metrics: every one of the table, with the runtime's numbers, through a real registry."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY

from intentkv import metrics
from intentkv_sglang.exporter import Exporter

pytestmark = pytest.mark.unit


@pytest.fixture
def served(engine):
    """An engine whose runtime is exported."""
    runtime = engine.start_runtime(method="streamingllm", budget=12, query_rows=4)
    exporter = Exporter(runtime)
    yield engine, exporter
    for metric in exporter._metrics.values():
        REGISTRY.unregister(metric)


def value(name, **labels):
    return REGISTRY.get_sample_value(name, labels)


def turn(engine, rid, length, options=None):
    # Without a tokenizer the newest part of a prompt stands for its newest message: the second turn is over budget.
    engine.run(engine.request(f"{rid}-1", range(length), output=[7], session_id=rid))
    engine.run(engine.request(f"{rid}-2", [*range(length), 8, 9], output=[7], session_id=rid, options=options))


def test_all_metrics(served):
    engine, exporter = served
    turn(engine, "a", 30)
    turn(engine, "b", 31, options={"budget": 1, "method": "random"})
    exporter.publish()
    runtime = engine.runtime
    counters = runtime.counters
    assert counters.prune_events == 2
    expected = {
        "intentkv_prune_events_total": 2,
        "intentkv_pruned_tokens_total": counters.pruned_tokens,
        "intentkv_freed_slots_total": counters.freed_slots,
        "intentkv_prompt_tokens_total": 30 + 32 + 31 + 33,
        "intentkv_cached_tokens_total": counters.cached_tokens,
        "intentkv_live_cached_tokens_total": counters.live_cached_tokens,
        "intentkv_tree_live_tokens": engine.allocator.size - engine.allocator.available_size(),
        "intentkv_tree_dead_tokens": sum(sum(n.dead[n.start :]) for n in engine.tree().values()),
        "intentkv_tree_logical_tokens": sum(len(n.dead[n.start :]) for n in engine.tree().values()),
        "intentkv_sessions": 2,
        "intentkv_prune_seconds_count": 2,
    }
    assert {name: value(name) for name in expected} == expected
    assert all(expected.values())
    assert value("intentkv_declined_prunes_total", reason="budget_below_forced_keep") == 1
    assert value("intentkv_prune_seconds_sum") == pytest.approx(counters.prune_seconds)
    assert value("intentkv_prune_seconds_bucket", le="+Inf") == 2
    collected = {sample.name for family in REGISTRY.collect() for sample in family.samples}
    for spec in metrics.METRICS:
        assert (spec.name if spec.kind != "histogram" else f"{spec.name}_count") in collected, f"{spec.name} is not exported"


def test_counters_never_go_back(served):
    """A scrape after a flush, or after many publications of the same state, shows no less and nothing twice."""
    engine, exporter = served
    names = [s.name for s in metrics.METRICS if s.kind == "counter" and not s.labels] + ["intentkv_prune_seconds_count"]
    exporter.publish()
    before = {name: value(name) for name in names}
    assert set(before.values()) == {0}
    for rid, length in (("a", 30), ("b", 40), ("c", 35)):
        turn(engine, rid, length)
        for _ in range(2):
            exporter.publish()
        now = {name: value(name) for name in names}
        assert all(now[name] > before[name] for name in names if "cached" not in name)
        assert all(now[name] >= before[name] for name in names)
        before = now
        if rid == "b":
            engine.flush()
            exporter.publish()
            assert {name: value(name) for name in names} == before
            assert value("intentkv_tree_logical_tokens") == value("intentkv_sessions") == 0
    assert before["intentkv_prune_events_total"] == engine.runtime.counters.prune_events
    assert engine.runtime.evictions.durations == []
