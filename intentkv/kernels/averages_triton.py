"""Triton kernels of :mod:`intentkv.kernels.averages`. All sums run in a fixed order.

A token's heads lie side by side, so a program takes whole tokens: UNROLL heads, a divisor of KV_HEADS, are loaded at a time.
BLOCK is DIM rounded up to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from intentkv.kernels.paged_triton import layer_base


@triton.jit
def _head(rows, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """[TOKENS, BLOCK] float32, zeros from DIM on; ``rows``: [TOKENS, 1] pointers to the start of one head."""
    dims = tl.arange(0, BLOCK)[None, :]
    if BLOCK == DIM:
        return tl.load(rows + dims).to(tl.float32)
    return tl.where(dims < DIM, tl.load(rows + dims, mask=dims < DIM).to(tl.float32), 0.0)


@triton.jit(do_not_specialize=["n", "n_layers"])
def mean_over_layers(
    pointers, scales, slots, out, n, n_layers, weight,
    KV_HEADS: tl.constexpr, UNROLL: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """``out`` [n, DIM] float32: weight * sum over layers and heads. Grid: (token tiles,)."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slots + tokens, mask=tokens < n, other=0).to(tl.int64)
    at = slot[:, None] * (KV_HEADS * DIM)
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    for layer in tl.range(0, n_layers):
        rows = layer_base(pointers, layer, DTYPE) + at
        part = tl.zeros([TOKENS, BLOCK], tl.float32)
        for first in tl.range(0, KV_HEADS, UNROLL):
            for head in tl.static_range(UNROLL):
                part += _head(rows + (first + head) * DIM, DIM, BLOCK)
        total += part * tl.load(scales + layer)
    dims = tl.arange(0, BLOCK)[None, :]
    tl.store(out + tokens[:, None].to(tl.int64) * DIM + dims, total * weight, mask=(tokens < n)[:, None] & (dims < DIM))


@triton.jit(do_not_specialize=["n"])
def squared_norms(
    pointers, scales, slots, out, n,
    KV_HEADS: tl.constexpr, UNROLL: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """``out`` [L, n] float32: squared norms of a layer, averaged over heads. Grid: (token tiles, layers)."""
    layer = tl.program_id(1)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slots + tokens, mask=tokens < n, other=0).to(tl.int64)
    rows = layer_base(pointers, layer, DTYPE) + slot[:, None] * (KV_HEADS * DIM)
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    for first in tl.range(0, KV_HEADS, UNROLL):
        for head in tl.static_range(UNROLL):
            value = _head(rows + (first + head) * DIM, DIM, BLOCK)
            total += value * value
    scale = tl.load(scales + layer)
    tl.store(out + layer.to(tl.int64) * n + tokens, tl.sum(total, 1) * (scale * scale / KV_HEADS), mask=tokens < n)
