"""Stream compaction of slot rows in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from intentkv.kernels.compact import DEAD_SLOT

_BLOCK = 2048


@triton.jit(do_not_specialize_on_alignment=["rows", "lengths", "targets"])
def _compact_row(table, rows, lengths, targets, stride, DEAD: tl.constexpr, BLOCK: tl.constexpr):
    """One program a row: block by block, live entries go behind those of the blocks before."""
    lane = tl.program_id(0)
    source = table + tl.load(rows + lane).to(tl.int64) * stride
    target = table + tl.load(targets + lane).to(tl.int64) * stride
    length = tl.load(lengths + lane)
    written = 0
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        slot = tl.load(source + at, mask=at < length, other=DEAD)
        live = (slot != DEAD).to(tl.int32)
        tl.store(target + written + tl.cumsum(live, 0) - 1, slot, mask=live > 0)
        written += tl.sum(live, 0)


def compact_rows_triton(table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, targets: torch.Tensor) -> None:
    """See :func:`intentkv.kernels.compact.compact_rows`."""
    # the kernel indexes them flat
    rows, lengths, targets = rows.contiguous(), lengths.contiguous(), targets.contiguous()
    _compact_row[(rows.shape[0],)](table, rows, lengths, targets, table.stride(0), DEAD=DEAD_SLOT, BLOCK=_BLOCK)
