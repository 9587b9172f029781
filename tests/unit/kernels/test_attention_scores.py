"""Scores of all layers in Triton. Oracle: the torch reference layer by layer, itself tested against a dense float64 softmax."""

from __future__ import annotations

import pytest
import torch

from intentkv.scoring import key_scores

pytestmark = pytest.mark.unit


def case(layers, n_queries, q_heads, kv_heads, dim, n_keys, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(layers, n_queries, q_heads, dim, generator=generator)
    buffers = [torch.randn(400, kv_heads, dim, generator=generator).to(dtype) for _ in range(layers)]
    slots = torch.randperm(399, generator=generator)[:n_keys] + 1
    return queries, buffers, slots


@pytest.mark.parametrize("reduction", ["mass", "energy"])
@pytest.mark.parametrize("shape", [(2, 1, 4, 2, 16, 100), (3, 20, 8, 2, 32, 200), (1, 5, 3, 3, 64, 70), (1, 2, 4, 1, 16, 1)])
def test_equals_the_reference(interpreted, reduction, shape):
    """Catches: a head read from another group's keys, rows or keys lost at tile borders, layers mixed up."""
    queries, buffers, slots = case(*shape)
    got = interpreted("attention_scores").paged_key_scores(queries, buffers, slots, 0.3, reduction)
    want = sum(key_scores(queries[i], buffers[i][slots], 0.3, reduction) for i in range(len(buffers)))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mass", "energy"])
def test_causal(interpreted, reduction):
    """Queries in the middle of the keys, one before all of them. Catches: attention to later keys, NaN from a row that sees nothing."""
    queries, buffers, slots = case(2, 7, 4, 4, 16, 33)
    positions = torch.tensor([-3, 0, 5, 5, 20, 32, 40])
    keys_at = torch.arange(33)
    got = interpreted("attention_scores").paged_key_scores(queries, buffers, slots, 0.3, reduction, positions, keys_at)
    want = sum(key_scores(queries[i], buffers[i][slots], 0.3, reduction, positions, keys_at) for i in range(2))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_extreme_logits(interpreted):
    """Logits in the hundreds. Catches: exponentials that overflow without the running maximum."""
    queries, buffers, slots = case(1, 3, 2, 1, 16, 90)
    got = interpreted("attention_scores").paged_key_scores(queries * 100, buffers, slots, 1.0, "mass")
    want = key_scores(queries[0] * 100, buffers[0][slots], 1.0, "mass")
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_several_splits_of_the_keys(interpreted, monkeypatch):
    """Catches: partial sums of pass 1 combined without rescaling."""
    module = interpreted("attention_scores")
    monkeypatch.setattr(module, "_KEY_SPLIT", 64)
    queries, buffers, slots = case(2, 4, 4, 2, 16, 200)
    got = module.paged_key_scores(queries, buffers, slots, 0.5, "mass")
    want = sum(key_scores(queries[i], buffers[i][slots], 0.5, "mass") for i in range(2))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_nothing_to_score(interpreted):
    queries, buffers, slots = case(1, 2, 2, 1, 16, 10)
    score = interpreted("attention_scores").paged_key_scores
    assert score(queries, buffers, slots[:0], 1.0, "mass").shape == (0,)
    assert score(queries[:, :0], buffers, slots, 1.0, "mass").tolist() == [0.0] * 10


def test_refuses_what_it_has_no_kernel_for(interpreted):
    queries, buffers, slots = case(1, 2, 2, 1, 16, 10)
    score = interpreted("attention_scores").paged_key_scores
    with pytest.raises(ValueError, match="'max' has no kernel"):
        score(queries, buffers, slots, 1.0, "max")
    with pytest.raises(ValueError, match="not a power of two"):
        score(queries[..., :12], [b[..., :12] for b in buffers], slots, 1.0, "mass")
