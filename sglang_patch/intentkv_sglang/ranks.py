"""Tensor parallelism: every rank evicts the same positions at the same iteration (architecture D10).

Everything here goes over SGLang's CPU group, never over the device's. The forward passes own the device's communicators: they use several,
on a stream of their own and from recorded graphs. A collective of ours on another stream could start before a pass on one rank and behind
it on the next, and each would wait for the other. On the CPU group all is called by the scheduler's thread, in program order, which is the
same on all ranks: SGLang gives them the same requests. A rank that waits here has launched the same passes as the one it waits for, so no
device waits for a host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from intentkv.config import Config
from intentkv.methods import Method
from intentkv.protocols import KeyReader
from intentkv.scoring import Reduction
from intentkv.transfer import to_device


@dataclass(frozen=True)
class RankGroup:
    """The ranks that share a request, each with its own heads: equally many query heads and equally many KV heads."""

    size: int
    rank: int
    cpu_group: Any

    @classmethod
    def of(cls, scheduler: Any) -> RankGroup:
        group = scheduler.tp_group
        return cls(group.world_size, group.rank_in_group, group.cpu_group)

    def reader(self, keys: KeyReader, whole: bool) -> KeyReader:
        """This rank's ``keys``; with ``whole`` a reader of all ranks' heads, each of whose answers all ranks must ask for together."""
        return AllHeads(keys, self) if whole and self.size > 1 else keys

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` (float32, of one shape on all ranks) added over ranks, on their device.

        Waits for the device and for the other ranks.
        """
        return to_device(self._sum_on_host(values), values.device)

    def _sum_on_host(self, values: torch.Tensor) -> torch.Tensor:
        # A copy in any case: gloo adds in place, and only what is contiguous.
        total = torch.empty(values.shape, dtype=torch.float32, pin_memory=values.is_cuda)
        total.copy_(values)
        dist.all_reduce(total, group=self.cpu_group)
        return total

    def agree(self, select: Callable[[torch.Tensor], torch.Tensor], scores: torch.Tensor, whole: bool = False) -> torch.Tensor:
        """Sum ``scores`` ([n] float32, this rank's heads) over ranks on the CPU, let rank 0 ``select`` from the sum, share its answer.

        Args:
            whole: the scores are those of all heads already; they are not summed.

        Returns:
            Rank 0's mask, [n] bool; on the scores' device when there is one rank.
        """
        if self.size == 1:
            return select(scores)
        total = scores.cpu() if whole else self._sum_on_host(scores)
        mask = select(total) if self.rank == 0 else torch.empty(total.shape[0], dtype=torch.bool)
        dist.broadcast(mask, dist.get_global_rank(self.cpu_group, 0), group=self.cpu_group)
        return mask


@dataclass(frozen=True)
class AllHeads:
    """A KeyReader of all ranks' heads: each answer is one all-reduce of this rank's.

    Sums over heads are sums over ranks. A mean over heads is the mean of the ranks' means, since all have equally many; KV heads that
    SGLang gives to several ranks, when there are more ranks than heads, then weigh the same, too.
    The largest answers for n = 32,768 tokens of a model with 36 layers and D = 128: [L, n] 4.7 MB, mean keys [n, D] 16.8 MB; all those of
    one turn and one eviction with a head and its layered features are 31 MB a rank.
    """

    own: KeyReader
    ranks: RankGroup

    @property
    def live(self) -> torch.Tensor:
        return self.own.live

    def live_before(self, end: int) -> torch.Tensor:
        return self.own.live_before(end)

    @property
    def n_layers(self) -> int:
        return self.own.n_layers

    def scores(
        self, queries: torch.Tensor, positions: torch.Tensor, reduction: Reduction, query_positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.ranks.sum(self.own.scores(queries, positions, reduction, query_positions))

    def layer_scores(
        self, queries: torch.Tensor, positions: torch.Tensor, reduction: Reduction, query_positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.ranks.sum(self.own.layer_scores(queries, positions, reduction, query_positions))

    def mean_keys(self, positions: torch.Tensor) -> torch.Tensor:
        return self._mean(self.own.mean_keys(positions))

    def value_norms(self, positions: torch.Tensor) -> torch.Tensor:
        return self._mean(self.own.value_norms(positions))

    def mean_over_heads(self, values: torch.Tensor) -> torch.Tensor:
        return self._mean(self.own.mean_over_heads(values))

    def _mean(self, values: torch.Tensor) -> torch.Tensor:
        return self.ranks.sum(values) / self.ranks.size


def needs_all_heads(method: Method, config: Config) -> bool:
    """Whether ``method`` must read keys through :class:`AllHeads` on a server of ``config``.

    Where a trained head can be asked for, all methods do: a session's memory serves rules and heads, whichever its next request names, so
    it must not hold one rank's share at one turn and everything at another.
    """
    return config.head is not None or not method.splits_by_head
