"""Stream compaction in Triton. Oracle: a Python list without its zeros."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("length", [1, 5, 2047, 2048, 2049, 5000])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_live_slots_in_order(interpreted, length, share):
    """Catches: entries lost at block borders, order changed, dead marks copied, entries behind the length copied."""
    generator = torch.Generator().manual_seed(length)
    table = torch.randint(1, 9999, (6, 6000), generator=generator, dtype=torch.int32)
    table[:, :length][torch.rand(6, length, generator=generator) < share] = 0
    before = table.clone()
    kernel = interpreted("compact_triton").compact_rows_triton
    kernel(table, torch.tensor([1]), torch.tensor([length]), torch.tensor([4]))
    live = [s for s in before[1, :length].tolist() if s]
    assert table[4, : len(live)].tolist() == live
    assert torch.equal(table[4, len(live) :], before[4, len(live) :])
    assert torch.equal(table[[0, 1, 2, 3, 5]], before[[0, 1, 2, 3, 5]])


def test_several_rows_from_strided_arguments(interpreted):
    """Arguments that are columns of one tensor. Catches: a kernel that reads them flat (seen: illegal accesses with two pruned lanes)."""
    table = torch.randint(0, 3, (8, 64), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    before = table.clone()
    arguments = torch.tensor([[1, 60], [2, 3], [3, 41]])
    rows, lengths = arguments.unbind(1)
    interpreted("compact_triton").compact_rows_triton(table, rows, lengths, rows + 4)
    for row, length in arguments.tolist():
        live = [s for s in before[row, :length].tolist() if s]
        assert table[row + 4, : len(live)].tolist() == live
