"""Key scores of all layers from the KV pool's own pages (Triton).

The torch reference is :func:`intentkv.scoring.key_scores`, layer by layer.
Nothing of size (queries x keys) or (heads x keys) is kept for all layers, nothing waits for the device, and sums run in a fixed order:
equal inputs give equal bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from intentkv.kernels import attention_kernels as kernels
from intentkv.kernels.paged_keys import PagedKeys
from intentkv.kernels.paged_triton import triton_dtype
from intentkv.scoring import Reduction

_DOT_DTYPES = {torch.float8_e4m3fn: torch.float16, torch.float8_e5m2: torch.float16}
"""Where the product does not run in the keys' own dtype. float16 holds every 8-bit float exactly, and the hardware converts to it."""
_LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Tile:
    """What one program computes at a time, and with what: powers of two, at least 16 rows and tokens."""

    rows: int
    tokens: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiles:
    """How to run the two steps: with ``scratch`` bytes for logits K is read once, with 0 twice."""

    first: Tile
    second: Tile
    keys_per_split: int = 4096
    """Keys that a program of the first step walks when K is read twice; a multiple of its ``tokens``."""
    scratch: int = 0


def choose_tiles(n_queries: int, q_heads: int, keys: PagedKeys, n_keys: int) -> Tiles:
    """Tiles for ``n_queries`` queries a head: K is read once when all (query, head) pairs fit one tile. Tuned on an H200."""
    # tiles are for 256 bytes a key and head; longer keys get smaller ones
    shrink = max(1, triton.cdiv(keys.dim * max(2, keys.dtype.itemsize), 256))
    tokens = max(16, 64 // shrink)
    stages = 3 if shrink == 1 else 2
    pairs = n_queries * q_heads
    if pairs <= 64:
        rows = max(16, triton.next_power_of_2(pairs))
        if keys.dtype.itemsize == 1 and shrink == 1:
            tokens *= 2
        return Tiles(Tile(rows, tokens, 4, stages), Tile(rows, 128, 4, 1), scratch=64 << 20)
    n_rows = pairs // keys.kv_heads
    if n_rows <= 64 or shrink > 1:
        first, second = Tile(64, tokens, 4, stages), Tile(64, tokens, 4, stages)
    else:
        first, second = Tile(256 if n_rows > 128 else 128, 64, 8, 3), Tile(64, 128, 4, 3)
    blocks = triton.cdiv(n_rows, first.rows) * keys.kv_heads * len(keys)
    split = 4096
    while split > 512 and blocks * triton.cdiv(n_keys, split) < _PROGRAMS:
        split //= 2
    return Tiles(first, second, split)


_PROGRAMS = 1056
"""Programs the first step aims for: eight for each of the 132 multiprocessors of a Hopper GPU."""


def paged_key_scores(
    queries: torch.Tensor,
    keys: PagedKeys,
    slots: torch.Tensor,
    scaling: float,
    reduction: Reduction,
    query_positions: torch.Tensor | None = None,
    key_positions: torch.Tensor | None = None,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """Scores of the keys in ``slots``, summed over layers and query heads: [n] float32. See :func:`paged_layer_scores`."""
    return paged_layer_scores(queries, keys, slots, scaling, reduction, query_positions, key_positions, tiles).sum(0)


def paged_layer_scores(
    queries: torch.Tensor,
    keys: PagedKeys,
    slots: torch.Tensor,
    scaling: float,
    reduction: Reduction,
    query_positions: torch.Tensor | None = None,
    key_positions: torch.Tensor | None = None,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """Scores of the keys in ``slots`` in each layer, summed over query heads.

    Args:
        queries: [L, n_q, H_q, D] post-RoPE.
        keys: the pool's keys of the L layers.
        slots: [n] integer live slots.
        scaling: multiplies q.k to give the logit; positive.
        reduction: ``mass`` (sum over queries of alpha) or ``energy`` (mean over queries of alpha squared).
        query_positions: [n_q] int64; with ``key_positions`` [n] int64, keys after a query are masked.
        tiles: instead of :func:`choose_tiles`'s.

    Returns:
        [L, n] float32.

    Raises:
        ValueError: another reduction, a head dim that is not a power of two, or a dtype without kernel.
    """
    if reduction not in ("mass", "energy"):
        raise ValueError(f"reduction {reduction!r} has no kernel; use 'mass' or 'energy'")
    if keys.dim & (keys.dim - 1):
        raise ValueError(f"head dim {keys.dim} is not a power of two")
    key_dtype = triton_dtype(keys)
    layers, n_queries, q_heads, dim = queries.shape
    n_keys, device = slots.shape[0], slots.device
    if n_queries == 0 or n_keys == 0:
        return torch.zeros(layers, n_keys, dtype=torch.float32, device=device)
    tiles = tiles or choose_tiles(n_queries, q_heads, keys, n_keys)
    causal = query_positions is not None and key_positions is not None
    # pointers that are not read when there is no mask
    query_at = query_positions.to(device).contiguous() if causal and query_positions is not None else slots
    key_at = key_positions.to(device).contiguous() if causal and key_positions is not None else slots
    group = q_heads // keys.kv_heads
    # the rows that read one KV head side by side, in the product's dtype: one copy
    q = torch.empty(layers, keys.kv_heads, n_queries, group, dim, dtype=_DOT_DTYPES.get(keys.dtype, keys.dtype), device=device)
    q.copy_(queries.unflatten(2, (keys.kv_heads, group)).transpose(1, 2))
    work = _Work(
        inputs=(q, query_at, keys.pointers, keys.scales, slots.contiguous(), key_at),
        constants={
            "KV_HEADS": keys.kv_heads,
            "GROUP": group,
            "DIM": dim,
            "CAUSAL": causal,
            "KEY_DTYPE": key_dtype,
            "PRECISION": "ieee" if keys.dtype == torch.float32 else "tf32",
        },
        partial=torch.empty(layers, n_keys, dtype=torch.float32, device=device),
        n_rows=n_queries * group,
        kv_heads=keys.kv_heads,
        scaling=scaling * _LOG2E,
        power=2 if reduction == "energy" else 1,
        weight=1.0 / n_queries if reduction == "energy" else 1.0,
    )
    if tiles.scratch:
        _read_once(work, tiles)
    else:
        _read_twice(work, tiles)
    return work.partial


@dataclass(frozen=True)
class _Work:
    """One call, as the kernels take it."""

    inputs: tuple[torch.Tensor, ...]
    constants: dict[str, object]
    partial: torch.Tensor
    """[L, n] float32, the result of each layer."""
    n_rows: int
    """Query rows of one KV head."""
    kv_heads: int
    scaling: float
    power: int
    weight: float


def _read_twice(work: _Work, tiles: Tiles) -> None:
    layers, n_keys = work.partial.shape
    n_rows = work.n_rows
    splits = triton.cdiv(n_keys, tiles.keys_per_split)
    split_lse = torch.empty(splits, layers * work.kv_heads * n_rows, dtype=torch.float32, device=work.partial.device)
    first, second = tiles.first, tiles.second
    kernels.log_sum_exp[(work.kv_heads * triton.cdiv(n_rows, first.rows), splits, layers)](
        *work.inputs, split_lse, n_rows, n_keys, work.scaling, tiles.keys_per_split, **work.constants,
        ROWS=first.rows, TOKENS=first.tokens, num_warps=first.warps, num_stages=first.stages,
    )  # fmt: skip
    row_lse = _merged(split_lse)
    kernels.sum_probabilities[(triton.cdiv(n_keys, second.tokens), layers)](
        *work.inputs, row_lse, work.partial, n_rows, n_keys, work.scaling, work.weight, **work.constants, POWER=work.power,
        ONE_BLOCK=n_rows <= second.rows, ROWS=second.rows, TOKENS=second.tokens, num_warps=second.warps, num_stages=second.stages,
    )  # fmt: skip


def _read_once(work: _Work, tiles: Tiles) -> None:
    """As many layers at a time as have their logits in ``tiles.scratch`` bytes, at least one."""
    layers, n_keys = work.partial.shape
    first, second = tiles.first, tiles.second
    all_rows = work.kv_heads * work.n_rows
    n_tiles = triton.cdiv(n_keys, first.tokens)
    at_once = min(layers, max(1, tiles.scratch // (all_rows * n_tiles * first.tokens * 4)))
    # groups of nearly one size
    at_once = triton.cdiv(layers, triton.cdiv(layers, at_once))
    stored = torch.empty(at_once, all_rows, n_tiles * first.tokens, dtype=torch.float32, device=work.partial.device)
    for layer in range(0, layers, at_once):
        group = min(at_once, layers - layer)
        tile_lse = torch.empty(n_tiles, group * all_rows, dtype=torch.float32, device=work.partial.device)
        kernels.store_logits[(n_tiles, group)](
            *work.inputs, stored, tile_lse, work.n_rows, n_keys, work.scaling, layer, **work.constants,
            ROWS=first.rows, TOKENS=first.tokens, num_warps=first.warps, num_stages=first.stages,
        )  # fmt: skip
        kernels.sum_stored[(triton.cdiv(n_keys, second.tokens), group)](
            stored, _merged(tile_lse), work.partial, all_rows, n_keys, n_tiles, work.weight, layer, POWER=work.power,
            ROWS=second.rows, TOKENS=second.tokens, STORED_TOKENS=first.tokens, num_warps=second.warps, num_stages=second.stages,
        )  # fmt: skip


def _merged(parts: torch.Tensor) -> torch.Tensor:
    """[splits, n] -> [n] float32, see :func:`intentkv.kernels.attention_kernels.merge_splits`."""
    splits, n = parts.shape
    merged = torch.empty(n, dtype=torch.float32, device=parts.device)
    wide = 64 if splits > 16 else 8
    kernels.merge_splits[(triton.cdiv(n, 1024 // wide),)](parts, merged, splits, n, SPLITS=wide, ROWS=1024 // wide)
    return merged
