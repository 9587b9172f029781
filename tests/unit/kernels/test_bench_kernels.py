"""The eviction that the kernels' benchmark times, on the CPU."""

from __future__ import annotations

import importlib

import pytest
import torch

from intentkv.kernels.paged_keys import PagedKV

pytestmark = pytest.mark.unit


@pytest.fixture
def bench(interpreted):
    """The benchmark's module; it imports all kernels, and other tests want them interpreted."""
    interpreted("averages")  # sets the switch
    return importlib.import_module("intentkv_eval.bench_kernels")


def test_a_head_next_to_its_rule(bench):
    """Catches: an event in which the head or the observation window has nothing to say, parts that are not of this event."""
    model = bench.Model(3, 4, 2, 16)
    keys, values = (bench.make_keys(model, "bf16", pool=600, device="cpu") for _ in range(2))
    event = bench.Eviction(model, 512, PagedKV(keys, values))
    rule, learned = event.score_rule(), event.score_learned()
    assert rule.shape == learned.shape == event.history.shape
    assert event.history.tolist() == list(range(16, 496))
    assert bool((rule > 0).all())
    assert not torch.equal(rule, learned)
    parts = {name: run() for name, run in event.parts().items()}
    torch.testing.assert_close(parts["network"], learned)
    assert parts["value_norms"].shape == (480, 3)
    assert parts["mean_keys"].shape == (480, 16)
