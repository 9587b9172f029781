"""Key scores of all layers in two passes over the KV pool's keys (Triton).

Pass 1 finds each query row's log-sum-exp over the keys, pass 2 sums probabilities (or their squares) per key. Neither keeps a
(queries x keys) or (heads x keys) tensor for all layers. Sums run in a fixed order, so equal inputs give equal bits.
The torch reference is :func:`intentkv.scoring.key_scores`, layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from intentkv.scoring import Reduction


@triton.jit
def _tile_logits(
    queries,
    row_positions,
    key_pointers,
    slots,
    key_positions,
    layer_head,
    rows,
    row_ok,
    tokens,
    token_ok,
    n_rows,
    kv_heads,
    scale,
    DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    KEY_DTYPE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """[rows, tokens] float32 logits (base 2) of one layer and KV head; masked ones are -inf."""
    dims = tl.arange(0, DIM)
    layer = layer_head // kv_heads
    head = layer_head % kv_heads
    q = tl.load(queries + (rows[:, None].to(tl.int64) + layer_head * n_rows) * DIM + dims[None, :], mask=row_ok[:, None], other=0.0)
    keys = tl.load(key_pointers + layer).to(tl.pointer_type(KEY_DTYPE))
    slot = tl.load(slots + tokens, mask=token_ok, other=0).to(tl.int64)
    k = tl.load(keys + (slot[:, None] * kv_heads + head) * DIM + dims[None, :], mask=token_ok[:, None], other=0.0)
    logits = tl.dot(q.to(DOT_DTYPE), tl.trans(k.to(DOT_DTYPE)), input_precision=PRECISION) * scale
    seen = token_ok[None, :] & row_ok[:, None]
    if CAUSAL:
        row_at = tl.load(row_positions + rows, mask=row_ok, other=-1)
        key_at = tl.load(key_positions + tokens, mask=token_ok, other=0)
        seen &= key_at[None, :] <= row_at[:, None]
    return tl.where(seen, logits, float("-inf"))


@triton.jit
def _log_sum_exp(
    queries,
    row_positions,
    key_pointers,
    slots,
    key_positions,
    maxima,
    sums,
    n_rows,
    n_keys,
    kv_heads,
    scale,
    keys_per_split,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    CAUSAL: tl.constexpr,
    KEY_DTYPE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Pass 1: running maximum and sum of exponentials of ROWS query rows over one split of the keys."""
    layer_head = tl.program_id(0)
    split = tl.program_id(2)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row_ok = rows < n_rows
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    first = split * keys_per_split
    last = tl.minimum(first + keys_per_split, n_keys)
    for start in range(first, last, TOKENS):
        tokens = start + tl.arange(0, TOKENS)
        logits = _tile_logits(
            queries, row_positions, key_pointers, slots, key_positions, layer_head, rows, row_ok, tokens, tokens < last,
            n_rows, kv_heads, scale, DIM, CAUSAL, KEY_DTYPE, DOT_DTYPE, PRECISION,
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(logits, 1))
        # a row that has seen no key yet keeps -inf; 0 in its place avoids -inf - -inf
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp2(top - anchor) + tl.sum(tl.exp2(logits - anchor[:, None]), 1)
        top = new_top
    at = (split * tl.num_programs(0) + layer_head).to(tl.int64) * n_rows + rows
    tl.store(maxima + at, top, mask=row_ok)
    tl.store(sums + at, total, mask=row_ok)


@triton.jit
def _sum_probabilities(
    queries,
    row_positions,
    key_pointers,
    slots,
    key_positions,
    log_sums,
    partial,
    n_rows,
    n_keys,
    kv_heads,
    layer_heads,
    scale,
    heads_per_split,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    CAUSAL: tl.constexpr,
    SQUARE: tl.constexpr,
    KEY_DTYPE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Pass 2: for TOKENS keys, the sum of alpha (or alpha squared) over the rows of one split of the (layer, KV head) pairs."""
    split = tl.program_id(1)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    token_ok = tokens < n_keys
    score = tl.zeros([TOKENS], tl.float32)
    first = split * heads_per_split
    for layer_head in range(first, tl.minimum(first + heads_per_split, layer_heads)):
        for row in range(0, n_rows, ROWS):
            rows = row + tl.arange(0, ROWS)
            row_ok = rows < n_rows
            logits = _tile_logits(
                queries, row_positions, key_pointers, slots, key_positions, layer_head, rows, row_ok, tokens, token_ok,
                n_rows, kv_heads, scale, DIM, CAUSAL, KEY_DTYPE, DOT_DTYPE, PRECISION,
            )  # fmt: skip
            # rows that see nothing have +inf here: their probabilities vanish
            lse = tl.load(log_sums + layer_head * n_rows + rows, mask=row_ok, other=float("inf"))
            alpha = tl.exp2(logits - lse[:, None])
            score += tl.sum(alpha * alpha if SQUARE else alpha, 0)
    tl.store(partial + split.to(tl.int64) * n_keys + tokens, score, mask=token_ok)


_TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
}
_LOG2E = 1.4426950408889634
_KEY_SPLIT = 4096
"""Keys a program of pass 1 walks; more splits when there are few (layer, head, row block) programs."""


def paged_key_scores(
    queries: torch.Tensor,
    key_buffers: Sequence[torch.Tensor],
    slots: torch.Tensor,
    scaling: float,
    reduction: Reduction,
    query_positions: torch.Tensor | None = None,
    key_positions: torch.Tensor | None = None,
    key_scale: float = 1.0,
) -> torch.Tensor:
    """Scores of the keys in ``slots``, summed over layers and query heads.

    Args:
        queries: [L, n_q, H_q, D] post-RoPE.
        key_buffers: L tensors [pool, H_kv, D], all of one dtype (float32, bfloat16, float16 or fp8), rows contiguous.
        slots: [n] int64 live slots.
        reduction: ``mass`` (sum over queries of alpha) or ``energy`` (mean over queries of alpha squared).
        query_positions: [n_q] int64; with ``key_positions`` [n] int64, keys after a query are masked.
        key_scale: dequantisation factor of fp8 keys.

    Returns:
        [n] float32.

    Raises:
        ValueError: another reduction, or head dim not a power of two.
    """
    if reduction not in ("mass", "energy"):
        raise ValueError(f"reduction {reduction!r} has no kernel; use 'mass' or 'energy'")
    layers, n_queries, q_heads, dim = queries.shape
    kv_heads = key_buffers[0].shape[1]
    if dim & (dim - 1):
        raise ValueError(f"head dim {dim} is not a power of two")
    n_keys, device = slots.shape[0], slots.device
    if n_queries == 0 or n_keys == 0:
        return torch.zeros(n_keys, dtype=torch.float32, device=device)
    key_dtype = key_buffers[0].dtype
    exact = key_dtype == torch.float32
    dot_dtype = key_dtype if key_dtype in (torch.float32, torch.float16) else torch.bfloat16
    group = q_heads // kv_heads
    n_rows = group * n_queries
    # [L, H_kv, group * n_q, D]: the rows that read one KV head, query fastest
    rows = queries.view(layers, n_queries, kv_heads, group, dim).permute(0, 2, 3, 1, 4).contiguous().to(dot_dtype)
    causal = query_positions is not None and key_positions is not None
    row_positions = query_positions.repeat(group).to(device) if causal and query_positions is not None else slots
    key_at = key_positions.to(device) if causal and key_positions is not None else slots
    pointers = torch.tensor([b.data_ptr() for b in key_buffers], dtype=torch.int64).to(device, non_blocking=True)
    layer_heads = layers * kv_heads
    row_block = 16 if n_rows <= 16 else 64
    token_block = 64
    scale = scaling * key_scale * _LOG2E
    common = {
        "DIM": dim,
        "ROWS": row_block,
        "TOKENS": token_block,
        "CAUSAL": causal,
        "KEY_DTYPE": _TRITON_DTYPES[key_dtype],
        "DOT_DTYPE": _TRITON_DTYPES[dot_dtype],
        "PRECISION": "ieee" if exact else "tf32",
    }
    splits = triton.cdiv(n_keys, _KEY_SPLIT)
    maxima = torch.empty(splits, layer_heads, n_rows, dtype=torch.float32, device=device)
    sums = torch.empty_like(maxima)
    _log_sum_exp[(layer_heads, triton.cdiv(n_rows, row_block), splits)](
        rows, row_positions, pointers, slots, key_at, maxima, sums, n_rows, n_keys, kv_heads, scale, _KEY_SPLIT, **common
    )
    # log2-sum-exp2 over splits; a row that saw no key at all gets +inf, so that its probabilities vanish
    top = maxima.amax(0)
    anchor = torch.where(torch.isinf(top), 0.0, top)
    log_sums = anchor + torch.log2((sums * torch.exp2(maxima - anchor)).sum(0))
    log_sums = torch.where(torch.isinf(top), float("inf"), log_sums)
    head_splits = min(layer_heads, max(1, triton.cdiv(_PROGRAMS, triton.cdiv(n_keys, token_block))))
    heads_per_split = triton.cdiv(layer_heads, head_splits)
    head_splits = triton.cdiv(layer_heads, heads_per_split)
    partial = torch.empty(head_splits, n_keys, dtype=torch.float32, device=device)
    _sum_probabilities[(triton.cdiv(n_keys, token_block), head_splits)](
        rows, row_positions, pointers, slots, key_at, log_sums, partial, n_rows, n_keys, kv_heads, layer_heads, scale, heads_per_split,
        SQUARE=reduction == "energy", **common,
    )  # fmt: skip
    total = partial.sum(0)
    return total / n_queries if reduction == "energy" else total


_PROGRAMS = 1056
"""Programs pass 2 aims for: eight for each of the 132 multiprocessors of a Hopper GPU."""
