"""Tensor parallelism on the CPU: two gloo processes agree on what rank 0 selects from the sum of their scores (decision D10).

Run as a script, this file is one rank.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from intentkv.selection import top_positions
from intentkv.transfer import HostCopy
from intentkv_sglang.ranks import RankGroup

pytestmark = pytest.mark.unit

# (scores of rank 0, scores of rank 1, kept). The second: neither rank alone would choose what the sum does. The third: a tie.
CASES = [
    ([1.0, 2.0, 3.0], [0.0, 0.0, 0.0], 1),
    ([9.0, 0.0, 5.0, 0.0], [0.0, 9.0, 5.0, 1.0], 1),
    ([1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0], 2),
    ([1.0, 2.0], [1.0, 2.0], 0),
    ([1.0, 2.0], [1.0, 2.0], 2),
    ([], [], 0),
]


def one_rank(rank: int, meeting_point: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=2)
    group = RankGroup.of(SimpleNamespace(tp_group=SimpleNamespace(world_size=2, rank_in_group=rank, cpu_group=dist.group.WORLD)))
    called, masks = [], []

    def select(total: torch.Tensor, count: int) -> torch.Tensor:
        called.append(total.tolist())
        # Rank 1 would choose otherwise, if it were asked.
        return top_positions(total if rank == 0 else -total, count)

    for *scores, kept in CASES:
        own = torch.tensor(scores[rank], dtype=torch.float32)
        mask = group.agree(partial(select, count=kept), own)
        assert own.tolist() == scores[rank], "a rank's own scores were written to"
        assert mask.dtype == torch.bool
        masks.append(mask.tolist())
    ones = torch.ones(2)
    shared = group.agree(lambda total: total > 1, ones, whole=True).tolist()
    table = torch.arange(6.0).view(2, 3).T * (rank + 1)
    summed = group.sum(table).tolist(), table.tolist()
    dist.destroy_process_group()
    print(json.dumps({"masks": masks, "called": called, "shared": shared, "summed": summed}))


def test_two_ranks_agree(two_processes, tmp_path):
    first, second = two_processes(__file__, tmp_path / "store")
    expected = []
    for one, two, kept in CASES:
        order = sorted(range(len(one)), key=lambda i: (one[i] + two[i], i))
        expected.append([i in order[len(order) - kept :] for i in range(len(one))])
    assert first["masks"] == second["masks"] == expected
    assert first["called"] == [[a + b for a, b in zip(one, two, strict=True)] for one, two, _ in CASES]
    assert second["called"] == [], "rank 1 selected by itself"
    assert first["shared"] == second["shared"] == [False, False], "scores of all heads were added up again"
    for rank, result in enumerate((first, second)):
        total, own = (torch.tensor(values) for values in result["summed"])
        assert torch.equal(total, 3 * torch.arange(6.0).view(2, 3).T)
        assert torch.equal(own, (rank + 1) * torch.arange(6.0).view(2, 3).T), "a rank's own values were written to"


def test_one_rank_needs_no_group():
    group = RankGroup(1, 0, None)
    assert group.agree(lambda scores: scores > 1, torch.tensor([1.0, 2.0])).tolist() == [False, True]


def test_host_copy_on_the_cpu():
    mask = torch.tensor([True, False])
    assert torch.equal(HostCopy(mask).wait(), mask)


if __name__ == "__main__":
    one_rank(int(sys.argv[1]), str(Path(sys.argv[2]).absolute()))
