"""Triton kernels of :mod:`intentkv.kernels.attention_scores`. Logits are base 2: alpha = 2 ** (logit - log-sum-exp).

Two ways to the same sums:

- *two reads* of K: :func:`log_sum_exp` walks the keys for each block of query rows, :func:`sum_probabilities` walks the rows for each block
  of keys;
- *one read*, for few queries: :func:`store_logits` keeps the logits of some layers, :func:`sum_stored` turns them into probabilities.

:func:`merge_splits` stands between the two steps of either. All sums run in a fixed order.

Shapes: queries [L, KV_HEADS, n_rows, D] contiguous, the rows that read one KV head: n_rows = n_q * GROUP, query by query.
A key's KV heads lie side by side, so a program (or neighbouring ones) that takes all KV heads of its tokens reads whole keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from intentkv.kernels.paged_triton import layer_base

_NEVER = tl.constexpr(2**31 - 1)
"""Position of a key that no query sees."""


@triton.jit
def _dot(q, k, PRECISION: tl.constexpr):
    """[rows, D] x [tokens, D] -> [rows, tokens] float32."""
    return tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)


@triton.jit
def _key_positions(key_at, tokens, last, CAUSAL: tl.constexpr):
    """Positions of ``tokens``; those from ``last`` on are seen by no query, and without causality all others by every one."""
    if CAUSAL:
        return tl.load(key_at + tokens, mask=tokens < last, other=_NEVER).to(tl.int32)
    return tl.where(tokens < last, 0, _NEVER)


@triton.jit
def _fold_keys(
    top, total, q, row_at, keys, slots, key_at, first, last, scale,
    STRIDE: tl.constexpr, TOKENS: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold the keys [first, last) into each row's running maximum and sum; not MASKED: whole tiles that every row sees."""
    # the next tile's slots are loaded one turn ahead: the compiler can then have several tiles of keys under way
    slot = tl.load(slots + first + tl.arange(0, TOKENS), mask=first + tl.arange(0, TOKENS) < last, other=0)
    for start in tl.range(first, last, TOKENS):
        tokens = start + tl.arange(0, TOKENS)
        k = tl.load(keys + slot[:, None].to(tl.int64) * STRIDE)
        slot = tl.load(slots + tokens + TOKENS, mask=tokens + TOKENS < last, other=0)
        logits = _dot(q, k, PRECISION)
        if MASKED:
            logits = tl.where(_key_positions(key_at, tokens, last, CAUSAL)[None, :] <= row_at[:, None], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1) * scale)
        # a row that has seen no key yet keeps -inf; 0 in its place avoids -inf - -inf
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
        total = total * tl.exp2(top - anchor) + tl.sum(tl.exp2(logits * scale - anchor[:, None]), 1)
        top = new_top
    return top, total


@triton.jit(do_not_specialize=["n_rows", "n_keys", "keys_per_split"])
def log_sum_exp(
    queries, query_at, key_pointers, key_scales, slots, key_at, split_lse, n_rows, n_keys, scaling, keys_per_split,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    CAUSAL: tl.constexpr, KEY_DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp of ROWS query rows of one KV head over one split of the keys; -inf for a row that sees none of them.

    Grid: (KV heads x row blocks, splits, layers). ``split_lse``: [splits, L, KV_HEADS, n_rows] float32.
    """
    head = tl.program_id(0) % KV_HEADS
    split, layer = tl.program_id(1), tl.program_id(2)
    rows = tl.program_id(0) // KV_HEADS * ROWS + tl.arange(0, ROWS)
    row_ok = rows < n_rows
    dims = tl.arange(0, DIM)
    queries += (layer * KV_HEADS + head).to(tl.int64) * n_rows * DIM
    q = tl.load(queries + rows[:, None] * DIM + dims[None, :], mask=row_ok[:, None], other=0.0)
    keys = layer_base(key_pointers, layer, KEY_DTYPE) + head * DIM + dims[None, :]
    scale = tl.load(key_scales + layer) * scaling
    first = split * keys_per_split
    last = tl.minimum(first + keys_per_split, n_keys)
    free = first + (last - first) // TOKENS * TOKENS
    row_at = tl.zeros([ROWS], tl.int32)
    if CAUSAL:
        row_at = tl.load(query_at + rows // GROUP, mask=row_ok, other=_NEVER).to(tl.int32)
        newest = tl.load(key_at + first).to(tl.int32)
        for start in tl.range(first, last, 1024):
            tokens = start + tl.arange(0, 1024)
            newest = tl.maximum(newest, tl.max(tl.load(key_at + tokens, mask=tokens < last, other=-_NEVER).to(tl.int32), 0))
        free = tl.where(newest <= tl.min(row_at, 0), free, first)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top, total = _fold_keys(
        top, total, q, row_at, keys, slots, key_at, first, free, scale, KV_HEADS * DIM, TOKENS, False, CAUSAL, PRECISION
    )  # fmt: skip
    top, total = _fold_keys(
        top, total, q, row_at, keys, slots, key_at, free, last, scale, KV_HEADS * DIM, TOKENS, True, CAUSAL, PRECISION
    )  # fmt: skip
    out = ((split * tl.num_programs(2) + layer) * KV_HEADS + head).to(tl.int64) * n_rows + rows
    tl.store(split_lse + out, top + tl.log2(total), mask=row_ok)


@triton.jit(do_not_specialize=["n_splits", "n"])
def merge_splits(split_lse, row_lse, n_splits, n, SPLITS: tl.constexpr, ROWS: tl.constexpr):
    """Log-sum-exp over splits: [n_splits, n] -> [n] float32. A row that saw no key gets +inf, so that its probabilities vanish."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in tl.range(0, n_splits, SPLITS):
        splits = start + tl.arange(0, SPLITS)
        seen = (splits < n_splits)[:, None] & (rows < n)[None, :]
        part = tl.load(split_lse + splits[:, None].to(tl.int64) * n + rows[None, :], mask=seen, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(part, 0))
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp2(top - anchor) + tl.sum(tl.exp2(part - anchor[None, :]), 0)
        top = new_top
    tl.store(row_lse + rows, tl.where(top == float("-inf"), float("inf"), top + tl.log2(total)), mask=rows < n)


@triton.jit
def _add_probabilities(
    score, k, queries, query_at, row_lse, head, start, at_keys, n_rows, scale,
    POWER: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``score`` [ROWS, TOKENS] plus alpha ** POWER of the rows from ``start`` on of one KV head."""
    rows = tl.arange(0, ROWS)
    row_ok = rows < n_rows - start
    # a scalar address plus fixed offsets: nothing else to compute in the loop
    at = head * n_rows + start
    q = tl.load(queries + at * DIM + (rows[:, None] * DIM + tl.arange(0, DIM)[None, :]), mask=row_ok[:, None], other=0.0)
    lse = tl.load(row_lse + at + rows, mask=row_ok, other=float("inf"))
    logits = _dot(q, k, PRECISION)
    if MASKED:
        row_at = tl.load(query_at + (start + rows) // GROUP, mask=row_ok, other=_NEVER).to(tl.int32)
        logits = tl.where(at_keys[None, :] <= row_at[:, None], logits, float("-inf"))
    return score + tl.exp2(logits * (scale * POWER) - (lse * POWER)[:, None])


@triton.jit
def _sum_heads(
    queries, query_at, keys, row_lse, at_keys, n_rows, scale,
    POWER: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    ONE_BLOCK: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[TOKENS] sums of alpha ** POWER over all rows and KV heads of a layer; ``keys``: [TOKENS, D] pointers to KV head 0."""
    score = tl.zeros([ROWS, TOKENS], tl.float32)
    if ONE_BLOCK:
        # one loop over heads, so that the next head's keys load meanwhile
        for head in tl.range(0, KV_HEADS):
            k = tl.load(keys + head * DIM)
            score = _add_probabilities(
                score, k, queries, query_at, row_lse, head, 0, at_keys, n_rows, scale, POWER, GROUP, DIM, ROWS, MASKED, PRECISION
            )
    else:
        for head in tl.range(0, KV_HEADS, num_stages=1):
            k = tl.load(keys + head * DIM)
            for start in tl.range(0, n_rows, ROWS):
                score = _add_probabilities(
                    score, k, queries, query_at, row_lse, head, start, at_keys, n_rows, scale, POWER, GROUP, DIM, ROWS, MASKED, PRECISION
                )
    return tl.sum(score, 0)


@triton.jit(do_not_specialize=["n_rows", "n_keys"])
def sum_probabilities(
    queries, query_at, key_pointers, key_scales, slots, key_at, row_lse, partial, n_rows, n_keys, scaling, weight,
    POWER: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    ONE_BLOCK: tl.constexpr, CAUSAL: tl.constexpr, KEY_DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``partial`` [L, n_keys] float32: weight * sum of alpha ** POWER over the rows of a layer. ``row_lse``: [L, KV_HEADS, n_rows].

    Grid: (token blocks, layers). ONE_BLOCK: n_rows <= ROWS.
    """
    layer = tl.program_id(1)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slots + tokens, mask=tokens < n_keys, other=0).to(tl.int64)
    keys = layer_base(key_pointers, layer, KEY_DTYPE) + slot[:, None] * (KV_HEADS * DIM) + tl.arange(0, DIM)[None, :]
    scale = tl.load(key_scales + layer) * scaling
    queries += layer.to(tl.int64) * n_rows * KV_HEADS * DIM
    row_lse += layer.to(tl.int64) * n_rows * KV_HEADS
    if CAUSAL:
        at_keys = tl.load(key_at + tokens, mask=tokens < n_keys, other=-_NEVER).to(tl.int32)
        oldest = tl.load(query_at).to(tl.int32)
        for start in tl.range(0, n_rows // GROUP, 256):
            query = start + tl.arange(0, 256)
            oldest = tl.minimum(oldest, tl.min(tl.load(query_at + query, mask=query < n_rows // GROUP, other=_NEVER).to(tl.int32), 0))
        if tl.max(at_keys, 0) <= oldest:
            score = _sum_heads(
                queries, query_at, keys, row_lse, at_keys, n_rows, scale,
                POWER, KV_HEADS, GROUP, DIM, ROWS, TOKENS, ONE_BLOCK, False, PRECISION,
            )  # fmt: skip
        else:
            score = _sum_heads(
                queries, query_at, keys, row_lse, at_keys, n_rows, scale,
                POWER, KV_HEADS, GROUP, DIM, ROWS, TOKENS, ONE_BLOCK, True, PRECISION,
            )  # fmt: skip
    else:
        score = _sum_heads(
            queries, query_at, keys, row_lse, tokens, n_rows, scale,
            POWER, KV_HEADS, GROUP, DIM, ROWS, TOKENS, ONE_BLOCK, False, PRECISION,
        )  # fmt: skip
    tl.store(partial + layer.to(tl.int64) * n_keys + tokens, score * weight, mask=tokens < n_keys)


@triton.jit(do_not_specialize=["n_rows", "n_keys", "first_layer"])
def store_logits(
    queries, query_at, key_pointers, key_scales, slots, key_at, stored, tile_lse, n_rows, n_keys, scaling, first_layer,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    CAUSAL: tl.constexpr, KEY_DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Logits of all rows of a layer at TOKENS keys, and their log-sum-exp.

    One matrix product with the queries as a block-diagonal matrix [KV_HEADS * n_rows, KV_HEADS * D]: a token's keys of all KV heads are one
    long row, and the softmax runs once over full tiles instead of once a KV head over mostly padding.

    Grid: (token tiles, layers of the group). With rows = KV_HEADS * n_rows <= ROWS: ``stored`` [layers, rows, tiles * TOKENS] float32,
    ``tile_lse`` [tiles, layers, rows] float32.
    """
    tile, local = tl.program_id(0), tl.program_id(1)
    layer = first_layer + local
    tokens = tile * TOKENS + tl.arange(0, TOKENS)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    all_rows = KV_HEADS * n_rows
    row_ok = rows < all_rows
    queries += layer.to(tl.int64) * all_rows * DIM
    slot = tl.load(slots + tokens, mask=tokens < n_keys, other=0).to(tl.int64)
    keys = layer_base(key_pointers, layer, KEY_DTYPE) + slot[:, None] * (KV_HEADS * DIM) + dims[None, :]
    logits = tl.zeros([ROWS, TOKENS], tl.float32)
    for head in tl.range(0, KV_HEADS):
        k = tl.load(keys + head * DIM)
        own = (rows >= head * n_rows) & (rows < (head + 1) * n_rows)
        q = tl.load(queries + (rows[:, None] * DIM + dims[None, :]), mask=own[:, None], other=0.0)
        logits = tl.dot(q, tl.trans(k.to(q.dtype)), logits, input_precision=PRECISION)
    row_at = tl.zeros([ROWS], tl.int32)
    if CAUSAL:
        row_at = tl.load(query_at + rows % n_rows // GROUP, mask=row_ok, other=0).to(tl.int32)
    seen = _key_positions(key_at, tokens, n_keys, CAUSAL)[None, :] <= row_at[:, None]
    logits = tl.where(seen, logits * (tl.load(key_scales + layer) * scaling), float("-inf"))
    top = tl.max(logits, 1)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    lse = top + tl.log2(tl.sum(tl.exp2(logits - anchor[:, None]), 1))
    padded = tl.num_programs(0) * TOKENS
    tl.store(stored + (local * all_rows + rows)[:, None].to(tl.int64) * padded + tokens[None, :], logits, mask=row_ok[:, None])
    tl.store(tile_lse + (tile * tl.num_programs(1) + local) * all_rows + rows, lse, mask=row_ok)


@triton.jit(do_not_specialize=["all_rows", "n_keys", "first_layer", "tiles"])
def sum_stored(
    stored, row_lse, partial, all_rows, n_keys, tiles, weight, first_layer,
    POWER: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, STORED_TOKENS: tl.constexpr,
):  # fmt: skip
    """``partial`` [L, n_keys] float32: weight * sum of alpha ** POWER over stored rows. Grid: (token blocks, layers of the group)."""
    local = tl.program_id(1)
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    rows = tl.arange(0, ROWS)
    row_ok = rows < all_rows
    # masked by whole tiles, which the compiler knows to be aligned; behind the last key they hold -inf
    padded = tiles * STORED_TOKENS
    at = (local * all_rows + rows)[:, None].to(tl.int64) * padded + tokens[None, :]
    logits = tl.load(stored + at, mask=row_ok[:, None] & (tokens < padded)[None, :], other=float("-inf"))
    lse = tl.load(row_lse + local * all_rows + rows, mask=row_ok, other=float("inf"))
    score = tl.sum(tl.exp2((logits - lse[:, None]) * POWER), 0)
    tl.store(partial + (first_layer + local).to(tl.int64) * n_keys + tokens, score * weight, mask=tokens < n_keys)
