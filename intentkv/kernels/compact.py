"""Stream compaction of slot rows: the live slots of a row, in order, without the dead marks."""

from __future__ import annotations

import torch

DEAD_SLOT = 0
"""The mark: the pool's padding row, which no allocator hands out."""


def compact_rows_reference(table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, targets: torch.Tensor) -> None:
    """Torch reference of :func:`compact_rows`."""
    for row, length, target in zip(rows.tolist(), lengths.tolist(), targets.tolist(), strict=True):
        source = table[row, :length]
        live = source[source != DEAD_SLOT]
        table[target, : live.shape[0]] = live


def compact_rows(table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, targets: torch.Tensor) -> None:
    """Write the non-dead entries of ``table[rows[i], :lengths[i]]`` to the start of ``table[targets[i]]``, order kept.

    What lies behind the live entries of a target row is undefined. On a GPU one Triton kernel, no synchronisation.

    Args:
        table: [R, C] integer slots.
        rows: [n] source rows.
        lengths: [n] logical lengths.
        targets: [n] target rows, disjoint from ``rows``.
    """
    if table.is_cuda:
        from intentkv.kernels.compact_triton import compact_rows_triton

        compact_rows_triton(table, rows, lengths, targets)
    else:
        compact_rows_reference(table, rows, lengths, targets)
