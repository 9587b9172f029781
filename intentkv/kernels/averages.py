"""Averages of a position's keys and values, read once from the KV pool's own pages (Triton).

The torch references are :meth:`intentkv.scoring.LayerwiseKeys.mean_keys` and ``value_norms``. No [n, H_kv, D] copy is made, nothing waits
for the device, and sums run in a fixed order: equal inputs give equal bits. Head dims need not be powers of two.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from intentkv.kernels import averages_triton as kernels
from intentkv.kernels.paged_keys import PagedKeys
from intentkv.kernels.paged_triton import triton_dtype

_UNROLL = 8
"""Heads loaded at a time, at most."""
_BYTES = 2048
"""Bytes of one head that a program loads at a time: with four warps 16 a thread. Tuned on an H200."""


def mean_keys(keys: PagedKeys, slots: torch.Tensor, tokens: int | None = None) -> torch.Tensor:
    """Keys in ``slots``, averaged over layers and KV heads.

    Args:
        keys: the pool's keys of the L layers.
        slots: [n] integer live slots.
        tokens: that a program takes, a power of two; chosen when left out.

    Returns:
        [n, D] float32.

    Raises:
        ValueError: a dtype without kernel.
    """
    constants, (n, device) = _constants(keys), (slots.shape[0], slots.device)
    out = torch.empty(n, keys.dim, dtype=torch.float32, device=device)
    if n:
        tokens = tokens or _tokens(keys)
        kernels.mean_over_layers[(triton.cdiv(n, tokens),)](
            keys.pointers, keys.scales, slots.contiguous(), out, n, len(keys), 1.0 / (len(keys) * keys.kv_heads), **constants, TOKENS=tokens
        )
    return out


def squared_norms(values: PagedKeys, slots: torch.Tensor, tokens: int | None = None) -> torch.Tensor:
    """Squared norms of the values in ``slots``, averaged over KV heads.

    Args:
        values: the pool's values of the L layers, [pool, H_kv, D_v] each.
        slots: [n] integer live slots.
        tokens: that a program takes, a power of two; chosen when left out.

    Returns:
        [n, L] float32, a transposed view.

    Raises:
        ValueError: a dtype without kernel.
    """
    constants, (n, device) = _constants(values), (slots.shape[0], slots.device)
    out = torch.empty(len(values), n, dtype=torch.float32, device=device)
    if n:
        tokens = tokens or _tokens(values)
        kernels.squared_norms[(triton.cdiv(n, tokens), len(values))](
            values.pointers, values.scales, slots.contiguous(), out, n, **constants, TOKENS=tokens
        )
    return out.T


def _tokens(pages: PagedKeys) -> int:
    block: int = triton.next_power_of_2(pages.dim)
    return max(1, _BYTES // (block * pages.dtype.itemsize))


def _constants(pages: PagedKeys) -> dict[str, Any]:
    unroll = max(heads for heads in range(1, _UNROLL + 1) if pages.kv_heads % heads == 0)
    return {
        "KV_HEADS": pages.kv_heads,
        "UNROLL": unroll,
        "DIM": pages.dim,
        "BLOCK": triton.next_power_of_2(pages.dim),
        "DTYPE": triton_dtype(pages),
    }
