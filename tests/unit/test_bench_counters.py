"""The plugin's counters as a client reads them; the histogram comes from the Prometheus client itself."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from intentkv.metrics import PRUNE_SECONDS
from intentkv_eval.bench_counters import PruneCounters, bucket_quantile, histogram, read_counters
from intentkv_eval.client import RequestFailed

pytestmark = pytest.mark.unit

SECONDS = st.lists(st.floats(0.0001, 9, allow_nan=False), min_size=1, max_size=40)


def exposition(seconds: list[float]) -> str:
    registry = CollectorRegistry()
    metric = Histogram(PRUNE_SECONDS.name, PRUNE_SECONDS.help, buckets=PRUNE_SECONDS.buckets, registry=registry)
    for value in seconds:
        metric.observe(value)
    return generate_latest(registry).decode()


@given(SECONDS, st.sampled_from([0.01, 0.5, 0.99, 1.0]))
def test_quantile_lies_in_the_bucket_of_the_true_one(seconds: list[float], q: float) -> None:
    """Catches cumulative counts read as plain ones, the wrong bucket and the wrong end of it."""
    found = bucket_quantile(histogram(exposition(seconds), PRUNE_SECONDS.name), q)
    assert found is not None
    true = sorted(seconds)[math.ceil(q * len(seconds)) - 1]
    bounds = [0.0, *PRUNE_SECONDS.buckets]
    low = max(bound for bound in bounds if bound < true)
    high = min((bound for bound in bounds if bound >= true), default=bounds[-1])
    assert low <= found <= high


def test_no_events_have_no_quantile() -> None:
    """Catches a 0 for what was never measured."""
    assert bucket_quantile(histogram(exposition([]), PRUNE_SECONDS.name), 0.5) is None
    assert bucket_quantile({}, 0.5) is None
    assert PruneCounters(events=0, tokens=0, seconds=0.0).mean_s is None


def test_difference_of_two_readings_is_what_happened_between() -> None:
    """Catches totals since the start taken for those of the window."""
    before = PruneCounters(
        events=2, tokens=10, seconds=0.2, declined={"a": 1}, buckets=histogram(exposition([0.1, 0.1]), PRUNE_SECONDS.name)
    )
    after = PruneCounters(
        events=5, tokens=70, seconds=0.5, declined={"a": 1, "b": 2}, buckets=histogram(exposition([0.1, 0.1, 3, 3, 3]), PRUNE_SECONDS.name)
    )
    window = after.since(before)
    assert (window.events, window.tokens, window.declined) == (3, 60, {"a": 0, "b": 2})
    assert window.mean_s == pytest.approx(0.1)
    median = window.quantile_s(0.5)
    assert median is not None
    assert 2.5 <= median <= 5


COUNTERS = {"prune_events": 3, "pruned_tokens": 60, "prune_seconds": 0.3, "declined": {"shared": 1}}


def read(answer: Callable[[str], httpx.Response]) -> PruneCounters | None:
    async def go() -> PruneCounters | None:
        transport = httpx.MockTransport(lambda request: answer(request.url.path))
        async with httpx.AsyncClient(transport=transport, base_url="http://fake") as http:
            return await read_counters(http)

    return asyncio.run(go())


def test_counters_come_from_status_and_metrics() -> None:
    """Catches a counter under the wrong name; a server without metrics has no histogram and is no error."""

    def answer(path: str) -> httpx.Response:
        return httpx.Response(200, json={"counters": COUNTERS}) if "status" in path else httpx.Response(200, text=exposition([0.1] * 3))

    counters = read(answer)
    assert counters is not None
    assert (counters.events, counters.tokens, counters.seconds, counters.declined) == (3, 60, 0.3, {"shared": 1})
    assert counters.buckets[math.inf] == 3
    plain = read(lambda path: answer(path) if "status" in path else httpx.Response(404))
    assert plain is not None
    assert plain.buckets == {}


def test_stock_server_has_no_counters_and_a_broken_one_is_an_error() -> None:
    """Catches a failure that passes for a server without the plugin."""
    assert read(lambda path: httpx.Response(404)) is None
    for broken in (httpx.Response(500), httpx.Response(200, json={}), httpx.Response(200, text="x")):
        with pytest.raises(RequestFailed, match="counters cannot be read"):
            read(lambda path, broken=broken: broken)  # type: ignore[misc]
