"""One eviction, from the decision to the freed slots. Knows requests only by what it needs of them: a session, a budget, a trigger."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from intentkv.kernels.compact import DEAD_SLOT
from intentkv.protocols import Budget, Trigger
from intentkv.selection import top_positions
from intentkv.sessions import SessionState
from intentkv.transfer import HostCopy, to_device
from intentkv_sglang.figures import Figures
from intentkv_sglang.radix_cache import IntentKVRadixCache
from intentkv_sglang.ranks import RankGroup


@dataclass
class Counters:
    """Totals since start. Tokens unless named otherwise."""

    prune_events: int = 0
    pruned_tokens: int = 0
    freed_slots: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    live_cached_tokens: int = 0
    prune_seconds: float = 0.0
    declined: Counter[str] = field(default_factory=Counter)


class Evictable(Protocol):
    """A request as an eviction sees it."""

    req: Any
    budget: Budget
    trigger: Trigger
    state: SessionState
    figures: Figures
    whole: bool
    """Its scores are of all ranks' heads, not of this rank's."""

    def touch(self) -> None:
        """Its row has changed below ``cache_protected_len``."""
        ...

    def book(self, dead: int) -> None:
        """It now has ``dead`` dead positions."""
        ...


class Decision(NamedTuple):
    """An eviction that is due."""

    candidates: torch.Tensor
    """[n] int64 on the CPU, ascending: live positions that may go."""
    keep: int
    """How many of them stay."""
    n_forced: int
    """Live positions that stay in any case."""

    @property
    def target(self) -> int:
        """Live tokens afterwards."""
        return self.n_forced + min(self.keep, self.candidates.numel())


@dataclass
class Pending:
    """An eviction whose keep-set is under way to the host."""

    request: Evictable
    node_id: int
    decision: Decision
    kept: HostCopy
    seconds: float
    """Host time so far."""


class Evictions:
    """Decides, selects and commits for one scheduler process."""

    def __init__(self, cache: IntentKVRadixCache, counters: Counters, req_to_token: torch.Tensor, ranks: RankGroup) -> None:
        """``req_to_token``: [rows, context] int32 slots of the running requests."""
        self._cache = cache
        self._counters = counters
        self._req_to_token = req_to_token
        self._ranks = ranks
        self._pending: list[Pending] = []
        self.deferred = req_to_token.is_cuda
        """Commit in a later pass than the one that scored: nobody waits for the device."""
        self.durations: list[float] = []
        """Seconds of host time of the events since the exporter last looked."""

    def decide(self, request: Evictable, node_id: int, forced: torch.Tensor, running: bool) -> Decision | None:
        """What an eviction of the first ``len(forced)`` positions would do, or None when none is due.

        Args:
            node_id: end of the request's path; positions behind it are its own and count as live and unshared.
            forced: [n] bool on the CPU, positions the method always keeps.
            running: the request itself holds a lock on the path.
        """
        n = forced.shape[0]
        dead, own = torch.zeros(n, dtype=torch.bool), torch.ones(n, dtype=torch.bool)
        known = self._cache.dead_mask(node_id)[:n]
        dead[: known.shape[0]] = known
        own[: known.shape[0]] = self._cache.prunable_mask(node_id, request.state.key, locks=int(running))[:n]
        fixed = forced | ~own
        n_forced = int((fixed & ~dead).sum())
        keep = request.budget.keep_count(int((~fixed).sum()), n_forced)
        decision = Decision(torch.nonzero(~fixed & ~dead).flatten(), keep, n_forced)
        if not request.trigger.fires(n - int(dead.sum()), decision.target):
            return None
        return decision

    def select(
        self,
        request: Evictable,
        node_id: int,
        decision: Decision,
        score: Callable[[torch.Tensor], torch.Tensor],
        running: bool,
        started: float,
    ) -> None:
        """Score the candidates ([n] int64 on the device -> [n] float32), keep the best, and commit now or in a later pass.

        A request that has left cannot wait: its session's next turn would lock the path.
        """
        if decision.keep == 0:
            self._counters.declined["budget_below_forced_keep"] += 1
        scores = score(to_device(decision.candidates, self._req_to_token.device))
        kept = self._ranks.agree(lambda total: top_positions(total, decision.keep), scores, request.whole)
        pending = Pending(request, node_id, decision, HostCopy(kept), time.perf_counter() - started)
        if self.deferred and running:
            self._pending.append(pending)
        else:
            self._commit(pending)

    def waiting(self, request: Evictable) -> bool:
        """Whether an eviction of ``request`` is under way."""
        return any(p.request is request for p in self._pending)

    def commit(self, finishing: Evictable | None = None) -> bool:
        """Commit what has arrived, and whatever ``finishing`` has under way, its request about to be forgotten; True when something was.

        Keep-sets of several ranks were agreed on the CPU and always have arrived, so all ranks commit in the same pass.
        """
        due = [p for p in self._pending if p.request is finishing or (finishing is None and p.kept.arrived())]
        for pending in due:
            self._pending.remove(pending)
            self._commit(pending)
        return bool(due)

    def drop(self, request: Evictable) -> None:
        """Forget what ``request`` has under way: it left without inserting."""
        self._pending = [p for p in self._pending if p.request is not request]

    def clear(self) -> None:
        """Forget everything under way: the tree is gone."""
        self._pending.clear()

    def _commit(self, pending: Pending) -> None:
        """Redirect, then free.

        Interval [0, cache_protected_len) of the request's row belongs to the tree: its nodes own those slots, the row only names
        them. Everything evicted lies in there, so the request's own frees, which start at cache_protected_len, never meet it.
        A pass already launched may still read the row and the slots: SGLang orders its own writes to rows behind that pass's reads (the
        scheduler's write-after-read barrier on its stream, where this runs, too), and a freed slot is first written by a later pass.
        """
        started = time.perf_counter()
        request, req, decision = pending.request, pending.request.req, pending.decision
        if not self._cache.has_node(pending.node_id):
            return
        running = req.kv is not None
        evicted = decision.candidates[~pending.kept.wait()]
        # Another request may have come to share or lock a node since the scores were taken.
        evicted = evicted[self._cache.prunable_mask(pending.node_id, request.state.key, locks=int(running))[evicted]]
        if evicted.numel():
            if running and int(evicted[-1]) >= req.cache_protected_len:
                raise RuntimeError(f"position {int(evicted[-1])} is not tree-owned: only {req.cache_protected_len} positions are")
            slots = self._cache.prune(pending.node_id, evicted)
            if running:
                row = self._req_to_token[req.req_pool_idx]
                row.index_fill_(0, to_device(evicted, row.device), DEAD_SLOT)
                req.prefix_indices = self._cache.path_slots(req.last_node)
                request.touch()
            self._cache.free_slots(slots)
            self._counters.prune_events += 1
            self._counters.pruned_tokens += evicted.numel()
            self._counters.freed_slots += evicted.numel()
            request.state.pruned_tokens += evicted.numel()
            seconds = pending.seconds + time.perf_counter() - started
            self._counters.prune_seconds += seconds
            self.durations.append(seconds)
        request.figures.evicted(evicted.numel(), decision.n_forced, decision.target)
        request.book(self._cache.n_dead(req.last_node))
