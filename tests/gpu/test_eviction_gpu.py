"""An eviction from its decision to the freed slots, while the device is busy: the host never waits for it.

Catches what only a profile of a busy server had shown: a number assigned into a tensor (``x[index] = 0``) is copied to the device from
pageable memory, and the host waits for all that is queued before it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.unified_cache.components.tree_component import ComponentType

from intentkv.budgets import FixedTokens
from intentkv.sessions import SessionState
from intentkv.triggers import OverTarget
from intentkv_sglang.eviction import Counters, Evictions
from intentkv_sglang.ranks import RankGroup
from intentkv_sglang.tree_component import IntentKVFullComponent, node_tag

N, BUDGET, LAYERS, HEADS, DIM = 20_000, 3000, 4, 2, 128
FULL = ComponentType.FULL


class Cache:
    """One node with all positions of one request; only what an eviction asks of the radix cache."""

    def __init__(self, slots: torch.Tensor) -> None:
        data = SimpleNamespace(value=slots, metadata={}, lock_ref=1)
        self.node = SimpleNamespace(component_data={FULL: data})
        sizes = {FULL: N}
        core = SimpleNamespace(component_protected_size_=sizes, component_evictable_size_=sizes)
        self.component = SimpleNamespace(component_type=FULL, total_dead=0, tree_core=core)
        self.freed: list[torch.Tensor] = []

    def dead_mask(self, node: int) -> torch.Tensor:
        return torch.zeros(N, dtype=torch.bool)

    def prunable_mask(self, node: int, owner: str, locks: int) -> torch.Tensor:
        return torch.ones(N, dtype=torch.bool)

    def has_node(self, node: int) -> bool:
        return True

    def n_dead(self, node: int) -> int:
        return node_tag(self.node).n_dead

    def path_slots(self, node: int) -> torch.Tensor:
        return self.node.component_data[FULL].value

    def prune(self, node: int, dead: torch.Tensor) -> torch.Tensor:
        return IntentKVFullComponent.mark_dead(self.component, self.node, dead)  # type: ignore[arg-type]

    def free_slots(self, slots: torch.Tensor) -> None:
        self.freed.append(slots)


class Request:
    def __init__(self) -> None:
        self.req = SimpleNamespace(kv=object(), req_pool_idx=1, last_node=0, cache_protected_len=N, prefix_indices=None)
        self.budget, self.trigger = FixedTokens(BUDGET), OverTarget(0)
        self.state = SessionState("s")
        self.figures = SimpleNamespace(evicted=lambda *figures: None)
        self.whole = False

    def touch(self) -> None: ...
    def book(self, dead: int) -> None: ...


def test_no_step_waits_for_the_device() -> None:
    # here, so that collecting this file leaves the kernels to those who want them interpreted
    from intentkv.kernels.attention_scores import paged_key_scores
    from intentkv.kernels.paged_keys import PagedKeys

    slots = torch.randperm(N, device="cuda") + 1
    table = torch.zeros(3, N, dtype=torch.int32, device="cuda")
    table[1] = slots
    pages = PagedKeys([torch.randn(N + 1, HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)])
    queries = torch.randn(LAYERS, 16, 4 * HEADS, DIM, device="cuda")
    forced = torch.zeros(N, dtype=torch.bool)
    forced[:100] = True

    def run(asleep: bool) -> tuple[Cache, Evictions]:
        cache = Cache(slots.clone())
        evictions = Evictions(cache, Counters(), table, RankGroup(1, 0, None))  # type: ignore[arg-type]
        request: Any = Request()
        if asleep:
            torch.cuda._sleep(4_000_000_000)
            torch.cuda.set_sync_debug_mode("error")
        try:
            decision = evictions.decide(request, 0, forced, running=True)
            assert decision is not None
            evictions.select(
                request, 0, decision, lambda history: paged_key_scores(queries, pages, slots[history], 0.1, "energy"), True, 0.0
            )
            if asleep:
                assert evictions.commit() is False, "nothing has arrived yet"
                assert not torch.cuda.current_stream().query(), "the host waited for the device"
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        if asleep:
            torch.cuda._sleep(4_000_000_000)
            torch.cuda.set_sync_debug_mode("error")
        try:
            # its keep-set has arrived; what it changes on the device is only queued
            assert evictions.commit() is True
            waited = torch.cuda.current_stream().query()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if asleep:
            assert not waited, "the host waited for the device"
        torch.cuda.synchronize()
        return cache, evictions

    run(asleep=False)  # compiles, and takes pinned memory
    table[1] = slots
    cache, _ = run(asleep=True)
    value, row = cache.node.component_data[FULL].value, table[1]
    assert torch.equal(value.int(), row)
    assert int((row == 0).sum()) == N - BUDGET == cache.n_dead(0)
    assert bool((row[:100] != 0).all())
    assert torch.equal(torch.cat(cache.freed).sort().values, slots[row == 0].sort().values)


@pytest.mark.parametrize("count", [0, 1, 500])
def test_selection_is_queued_only(count: int) -> None:
    from intentkv.selection import top_positions

    scores = torch.randint(0, 50, (1000,), device="cuda").float()
    torch.cuda.set_sync_debug_mode("error")
    try:
        kept = top_positions(scores, count)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(kept.cpu(), top_positions(scores.cpu(), count))
