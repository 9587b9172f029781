"""Scores of all layers in Triton. Oracle: the torch reference layer by layer, itself tested against a dense float64 softmax."""

from __future__ import annotations

import pytest
import torch

from intentkv.kernels.paged_keys import PagedKeys
from intentkv.scoring import key_scores

pytestmark = pytest.mark.unit


def case(layers, n_queries, q_heads, kv_heads, dim, n_keys, seed=0, dtype=torch.float32, scales=None):
    """Queries, keys in scattered slots of their pool, slots."""
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(layers, n_queries, q_heads, dim, generator=generator)
    buffers = [torch.randn(400, kv_heads, dim, generator=generator).to(dtype) for _ in range(layers)]
    slots = torch.randperm(399, generator=generator)[:n_keys] + 1
    return queries, PagedKeys(buffers, scales), slots


def reference(queries, keys, slots, scaling, reduction, *positions):
    scales = keys.scales.tolist()
    values = [b[slots.tolist()].float() * s for b, s in zip(keys.buffers, scales, strict=True)]
    return sum(key_scores(q, k, scaling, reduction, *positions) for q, k in zip(queries, values, strict=True))


def both_ways(module, rows, tokens, split=64):
    """Small tiles that read K twice, and that read it once, two layers or so at a time."""
    small, all_rows, wide = (module.Tile(*shape, 4, 2) for shape in ((rows, tokens), (128, tokens), (128, 2 * tokens)))
    return [module.Tiles(small, small, split), module.Tiles(all_rows, wide, scratch=40_000)]


@pytest.mark.parametrize("reduction", ["mass", "energy"])
@pytest.mark.parametrize(
    "shape", [(2, 1, 4, 2, 16, 100), (3, 20, 8, 2, 32, 200), (1, 5, 3, 3, 64, 70), (1, 2, 4, 1, 16, 1), (5, 3, 6, 2, 16, 128)]
)
def test_equals_the_reference(interpreted, reduction, shape):
    """Catches: a head read from another group's keys, rows or keys lost at tile borders, layers mixed up."""
    queries, keys, slots = case(*shape)
    got = interpreted("attention_scores").paged_key_scores(queries, keys, slots, 0.3, reduction)
    torch.testing.assert_close(got, reference(queries, keys, slots, 0.3, reduction), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", [0, 1])
@pytest.mark.parametrize("n_keys", [1, 31, 32, 33, 64, 65, 200])
def test_tile_borders(interpreted, way, n_keys):
    """5 layers, 18 rows a KV head in tiles of 16, keys in tiles of 32 and splits of 64. Catches: a border tile left out or read twice,
    partial sums combined without rescaling, a group of layers written over another's."""
    module = interpreted("attention_scores")
    queries, keys, slots = case(5, 9, 4, 2, 16, n_keys)
    tiles = both_ways(module, 16, 32)[way]
    for reduction in ("mass", "energy"):
        got = module.paged_key_scores(queries, keys, slots, 0.5, reduction, tiles=tiles)
        torch.testing.assert_close(got, reference(queries, keys, slots, 0.5, reduction), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", [0, 1])
@pytest.mark.parametrize("reduction", ["mass", "energy"])
def test_causal(interpreted, reduction, way):
    """Queries in the middle of the keys and behind them, one before all of them, keys in no order. Catches: attention to later keys, a tile
    taken as visible that is not, NaN from a row that sees nothing."""
    module = interpreted("attention_scores")
    queries, keys, slots = case(2, 9, 4, 2, 16, 150)
    positions = torch.tensor([-3, 0, 5, 5, 70, 149, 400, 400, 400])
    tiles = both_ways(module, 16, 32)[way]
    for keys_at in (torch.arange(150), torch.randperm(150, generator=torch.Generator().manual_seed(1))):
        got = module.paged_key_scores(queries, keys, slots, 0.3, reduction, positions, keys_at, tiles)
        torch.testing.assert_close(got, reference(queries, keys, slots, 0.3, reduction, positions, keys_at), rtol=1e-5, atol=1e-6)
    late = torch.arange(149, 158)
    got = module.paged_key_scores(queries, keys, slots, 0.3, reduction, late, torch.arange(150), tiles)
    torch.testing.assert_close(got, reference(queries, keys, slots, 0.3, reduction), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n_queries", [1, 40])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bit_keys_with_scales(interpreted, dtype, n_queries):
    """Catches: a layer dequantised with another layer's factor, or with none."""
    queries, keys, slots = case(3, n_queries, 4, 2, 16, 150, dtype=dtype, scales=[0.25, 1.0, 3.0])
    got = interpreted("attention_scores").paged_key_scores(queries.half().float(), keys, slots, 0.3, "mass")
    torch.testing.assert_close(got, reference(queries.half().float(), keys, slots, 0.3, "mass"), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("n_queries", [3, 40])
def test_extreme_logits(interpreted, n_queries):
    """Logits in the hundreds. Catches: exponentials that overflow without the maximum."""
    queries, keys, slots = case(1, n_queries, 2, 1, 16, 90)
    got = interpreted("attention_scores").paged_key_scores(queries * 100, keys, slots, 1.0, "mass")
    torch.testing.assert_close(got, reference(queries * 100, keys, slots, 1.0, "mass"), rtol=1e-4, atol=1e-5)


def test_nothing_to_score(interpreted):
    queries, keys, slots = case(1, 2, 2, 1, 16, 10)
    score = interpreted("attention_scores").paged_key_scores
    assert score(queries, keys, slots[:0], 1.0, "mass").shape == (0,)
    assert score(queries[:, :0], keys, slots, 1.0, "mass").tolist() == [0.0] * 10


def test_refuses_what_it_has_no_kernel_for(interpreted):
    queries, keys, slots = case(1, 2, 2, 1, 16, 10)
    score = interpreted("attention_scores").paged_key_scores
    with pytest.raises(ValueError, match="'max' has no kernel"):
        score(queries, keys, slots, 1.0, "max")
    queries, keys, slots = case(1, 2, 2, 1, 12, 10)
    with pytest.raises(ValueError, match="not a power of two"):
        score(queries, keys, slots, 1.0, "mass")
    queries, keys, slots = case(1, 2, 2, 1, 16, 10, dtype=torch.float64)
    with pytest.raises(ValueError, match="float64 have no kernel"):
        score(queries, keys, slots, 1.0, "mass")


@pytest.mark.parametrize("n_queries", [1, 20])
def test_layer_by_layer(interpreted, n_queries):
    """K read once and twice. Catches: a layer in another's place."""
    queries, keys, slots = case(3, n_queries, 4, 2, 16, 60, scales=[1.0, 0.5, 2.0])
    got = interpreted("attention_scores").paged_layer_scores(queries, keys, slots, 0.3, "energy")
    want = torch.stack([key_scores(queries[i], keys.read(i, slots), 0.3, "energy") for i in range(3)])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
