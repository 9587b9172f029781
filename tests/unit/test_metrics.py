"""The metrics table: what Prometheus would reject, or count wrongly without saying so."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from intentkv.metrics import METRICS, MetricSpec

pytestmark = pytest.mark.unit

# From the data model and naming pages of Prometheus' documentation; a colon is reserved for recording rules.
NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
RESERVED_SUFFIXES = ("_count", "_sum", "_bucket", "_created", "_info")


@pytest.mark.parametrize("spec", METRICS, ids=lambda spec: spec.name)
def test_spec_is_valid_prometheus(spec: MetricSpec) -> None:
    """Catches a name, label or bucket list that prometheus_client refuses, or renames on export."""
    assert NAME.fullmatch(spec.name)
    assert spec.name.startswith("intentkv_")
    assert not spec.name.endswith(RESERVED_SUFFIXES)
    assert (spec.kind == "counter") == spec.name.endswith("_total")
    assert spec.name.removesuffix("_total").endswith(spec.unit)
    assert spec.help.endswith(".")
    assert all(NAME.fullmatch(label) and not label.startswith("__") for label in spec.labels)
    assert (spec.kind == "histogram") == bool(spec.buckets)
    assert list(spec.buckets) == sorted(set(spec.buckets))


def test_names_are_unique() -> None:
    """Catches two metrics under one name, which the registry refuses when the server starts."""
    assert [name for name, count in Counter(spec.name for spec in METRICS).items() if count > 1] == []


def test_every_spec_is_registered_and_counts() -> None:
    """Catches a table that the real client library does not accept, and a name that it exposes differently."""
    client = pytest.importorskip("prometheus_client", reason="the Prometheus client is an extra of the server")
    kinds = {"counter": client.Counter, "gauge": client.Gauge, "histogram": client.Histogram}
    registry = client.CollectorRegistry()
    for spec in METRICS:
        extra = {"buckets": spec.buckets} if spec.buckets else {}
        metric = kinds[spec.kind](spec.name, spec.help, spec.labels, registry=registry, **extra)
        metric = metric.labels(*spec.labels) if spec.labels else metric
        metric.observe(0.002) if spec.kind == "histogram" else metric.inc(2)
    for spec in METRICS:
        name = f"{spec.name}_count" if spec.kind == "histogram" else spec.name
        labels = {label: label for label in spec.labels}
        assert registry.get_sample_value(name, labels) == (1 if spec.kind == "histogram" else 2)
