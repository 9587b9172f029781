"""Tensor parallelism: every rank evicts the same positions at the same iteration (architecture D10)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class RankGroup:
    """The ranks that share a request, each with its own heads."""

    size: int
    rank: int
    cpu_group: Any

    @classmethod
    def of(cls, scheduler: Any) -> RankGroup:
        group = scheduler.tp_group
        return cls(group.world_size, group.rank_in_group, group.cpu_group)

    def agree(self, select: Callable[[torch.Tensor], torch.Tensor], scores: torch.Tensor) -> torch.Tensor:
        """Sum ``scores`` ([n] float32, this rank's heads) over ranks on the CPU, let rank 0 ``select`` from the sum, share its answer.

        Returns:
            Rank 0's mask, [n] bool; on the scores' device when there is one rank.
        """
        if self.size == 1:
            return select(scores)
        total = scores.detach().cpu()
        dist.all_reduce(total, group=self.cpu_group)
        mask = select(total) if self.rank == 0 else torch.empty(total.shape[0], dtype=torch.bool)
        dist.broadcast(mask, dist.get_global_rank(self.cpu_group, 0), group=self.cpu_group)
        return mask
