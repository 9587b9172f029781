"""Averages of keys and values in Triton. Oracle: the buffers gathered by list, in float64."""

from __future__ import annotations

import pytest
import torch

from intentkv.kernels.paged_keys import PagedKeys

pytestmark = pytest.mark.unit


def case(layers, kv_heads, dim, n, dtype=torch.float32, scales=None, seed=0):
    """Pages, slots in no order, and what lies in them: [L, n, H_kv, D] float64."""
    generator = torch.Generator().manual_seed(seed)
    buffers = [torch.randn(200, kv_heads, dim, generator=generator).to(dtype) for _ in range(layers)]
    slots = torch.randperm(199, generator=generator)[:n] + 1
    factors = scales or [1.0] * layers
    stored = torch.stack([b.float()[slots.tolist()].double() * s for b, s in zip(buffers, factors, strict=True)])
    return PagedKeys(buffers, scales), slots, stored


def check(module, pages, slots, stored, tokens=None, rtol=1e-5):
    mean, norms = module.mean_keys(pages, slots, tokens), module.squared_norms(pages, slots, tokens)
    assert mean.dtype == norms.dtype == torch.float32
    torch.testing.assert_close(mean.double(), stored.mean((0, 2)), rtol=rtol, atol=1e-6)
    torch.testing.assert_close(norms.double(), stored.square().sum(-1).mean(-1).T, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 1, 16), (3, 2, 32), (5, 8, 16), (2, 3, 64), (2, 16, 16), (2, 11, 8), (2, 2, 24), (1, 3, 80)])
def test_equals_plain_averages(interpreted, shape):
    """Heads that are taken at once, in groups, or one by one; head dims between powers of two. Catches: a head or layer left out or counted
    twice, padding columns that reach into the next head."""
    check(interpreted("averages"), *case(*shape, 70))


@pytest.mark.parametrize("tokens", [1, 16, 64])
@pytest.mark.parametrize("n", [1, 15, 16, 17, 63, 64, 65, 199])
def test_tile_borders(interpreted, n, tokens):
    """Catches: a border tile left out, rows written behind the end."""
    check(interpreted("averages"), *case(2, 2, 16, n), tokens)


def test_slots_of_any_kind(interpreted):
    """A column of a wider table, 32-bit, with one slot twice. Catches: slots read flat or at another width."""
    pages, slots, stored = case(2, 2, 16, 40)
    table = torch.zeros(40, 3, dtype=torch.int32)
    table[:, 1] = slots
    check(interpreted("averages"), pages, table[:, 1], stored)
    twice = torch.cat([slots[5:], slots[:7]])
    check(interpreted("averages"), pages, twice, torch.cat([stored[:, 5:], stored[:, :7]], 1))
    check(interpreted("averages"), pages, slots[3:], stored[:, 3:])


@pytest.mark.parametrize("dim", [16, 24])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_small_formats_with_scales(interpreted, dtype, dim):
    """Catches: a layer dequantised with another layer's factor or none, a norm that takes the factor once, sums in the stored format."""
    check(interpreted("averages"), *case(3, 2, dim, 50, dtype, [0.25, 1.0, 3.0]))


def test_nothing_asked_for(interpreted):
    pages, slots, _ = case(2, 2, 16, 10)
    module = interpreted("averages")
    assert module.mean_keys(pages, slots[:0]).shape == (0, 16)
    assert module.squared_norms(pages, slots[:0]).shape == (0, 2)


def test_refuses_what_it_has_no_kernel_for(interpreted):
    pages, slots, _ = case(1, 1, 16, 10, torch.float64)
    for name in ("mean_keys", "squared_norms"):
        with pytest.raises(ValueError, match="float64 have no kernel"):
            getattr(interpreted("averages"), name)(pages, slots)
