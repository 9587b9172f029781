"""Attention scores of keys. Oracle: dense softmax attention in float64 (``dense`` of conftest.py)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from intentkv import scoring
from intentkv.scoring import attention_probabilities, key_scores

pytestmark = pytest.mark.unit

REDUCE = {
    "mass": lambda alpha: alpha.sum((0, 1)),
    "energy": lambda alpha: alpha.square().mean(1).sum(0),
    "max": lambda alpha: alpha.amax(1).sum(0),
}


def tensors(n_queries, n_keys, kv_heads, group, seed, dim=8):
    generator = torch.Generator().manual_seed(seed)
    queries = 2 * torch.randn(n_queries, kv_heads * group, dim, generator=generator)
    return queries, 2 * torch.randn(n_keys, kv_heads, dim, generator=generator), dim**-0.5


# More queries than two blocks hold, so that block borders are crossed.
sizes = {
    "n_queries": st.integers(1, 2 * scoring._QUERY_BLOCK + 3),
    "n_keys": st.integers(1, 40),
    "kv_heads": st.integers(1, 3),
    "group": st.integers(1, 4),
    "seed": st.integers(0, 2**16),
}


@pytest.mark.parametrize("reduction", REDUCE)
@settings(max_examples=60, deadline=None)
@given(**sizes)
def test_scores_equal_dense_attention(dense, reduction, n_queries, n_keys, kv_heads, group, seed):
    """Catches: wrong GQA grouping, a dropped query block, a mean over blocks instead of queries."""
    queries, keys, scaling = tensors(n_queries, n_keys, kv_heads, group, seed)
    expected = REDUCE[reduction](dense(queries, keys, scaling))
    torch.testing.assert_close(key_scores(queries, keys, scaling, reduction).double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reduction", REDUCE)
@settings(max_examples=60, deadline=None)
@given(**sizes, data=st.data())
def test_causal_scores_equal_dense_attention(dense, reduction, n_queries, n_keys, kv_heads, group, seed, data):
    """Catches: attention to later keys, NaN from a query that sees no key at all, positions cut off from their query block."""
    queries, keys, scaling = tensors(n_queries, n_keys, kv_heads, group, seed)
    draw = lambda n: torch.tensor(data.draw(st.lists(st.integers(0, 60), min_size=n, max_size=n)))  # noqa: E731
    positions = draw(n_queries), draw(n_keys)
    expected = REDUCE[reduction](dense(queries, keys, scaling, *positions))
    torch.testing.assert_close(key_scores(queries, keys, scaling, reduction, *positions).double(), expected, rtol=1e-4, atol=1e-6)


def test_each_query_head_reads_its_own_kv_head():
    """Query heads 0-1 belong to KV head 0, 2-3 to KV head 1. Catches: interleaved instead of consecutive groups."""
    keys = torch.zeros(3, 2, 4)
    keys[0, 0, 0] = keys[2, 1, 0] = 1
    queries = torch.zeros(1, 4, 4)
    queries[:, :, 0] = 100
    alpha = torch.cat(list(attention_probabilities(queries, keys, 1.0)), 1)
    assert alpha.argmax(-1).flatten().tolist() == [0, 0, 2, 2]


def test_half_precision_keys_are_scored_in_float32():
    """Catches: logits or sums in the cache's data type, where thousands of small masses round away."""
    queries, keys, scaling = tensors(20, 30, 2, 2, 0)
    half = key_scores(queries.bfloat16(), keys.bfloat16(), scaling, "mass")
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, key_scores(queries.bfloat16().float(), keys.bfloat16().float(), scaling, "mass"))


def test_large_logits_do_not_overflow():
    queries, keys, _ = tensors(4, 6, 2, 2, 0)
    scores = key_scores(queries, keys, 1e4, "mass")
    assert torch.isfinite(scores).all()
    assert scores.sum().item() == pytest.approx(4 * 4)


@pytest.mark.parametrize(("n_queries", "n_keys"), [(0, 5), (3, 0), (0, 0)])
@pytest.mark.parametrize("reduction", REDUCE)
def test_nothing_to_score(reduction, n_queries, n_keys):
    queries, keys, scaling = tensors(n_queries, n_keys, 2, 2, 0)
    assert key_scores(queries, keys, scaling, reduction).tolist() == [0.0] * n_keys


class LargestTensor(TorchDispatchMode):
    """Records the largest tensor any operation returns, in elements."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.numel())
        return out


@pytest.mark.parametrize("causal", [False, True])
def test_memory_does_not_grow_with_the_span(causal):
    """Catches: a (queries x keys) matrix of a whole span, or keys repeated for every query head."""
    n_queries, n_keys, kv_heads, group, dim = 40 * scoring._QUERY_BLOCK, 512, 2, 4, 8
    queries, keys, scaling = tensors(n_queries, n_keys, kv_heads, group, 0, dim)
    positions = (torch.arange(n_queries), torch.arange(n_keys)) if causal else ()
    with LargestTensor() as largest:
        key_scores(queries, keys, scaling, "energy", *positions)
    allowed = kv_heads * group * scoring._QUERY_BLOCK * n_keys
    assert 0 < largest.elements <= max(allowed, keys.numel(), queries.numel())
