"""The radix backend ``intentkv``: SGLang's unified radix cache plus path queries, owners and pruning.

The logical tree is untouched: keys, lengths and matches are stock. Only slots die.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.unified_cache.components.tree_component import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from intentkv.kernels.compact import DEAD_SLOT
from intentkv_sglang.tree_component import IntentKVFullComponent, node_tag

_FULL = ComponentType.FULL
_OWNERS = 8
"""Owners a node names, at most."""
_DEAD_COUNTS = 4096
"""Cached dead counts, at most."""


class PathNode(NamedTuple):
    """A radix node and the logical positions ``[start, end)`` it holds."""

    node: Any
    start: int
    end: int


class CacheEvent(NamedTuple):
    """A request reached the tree: ``chunk`` within its prefill, ``checkpoint`` after it, ``finish`` at its end, ``drop`` when it left
    without inserting."""

    kind: str
    req: Any
    node_id: int


class IntegrityError(RuntimeError):
    """An invariant of the slot map or its ledgers does not hold; the message names every term."""


class IntentKVRadixCache(UnifiedRadixCache):
    """Unified radix cache whose nodes may hold dead positions.

    ``on_event`` is called at every checkpoint and finish, inside SGLang's own call; the listener must only take a note.
    """

    def __init__(self, params: Any) -> None:
        self.on_event: Callable[[CacheEvent], None] | None = None
        self.on_reset: Callable[[], None] | None = None
        self._dead_counts: dict[int, int] = {}
        params.tree_components = (_FULL,)
        params.component_registry_override = {_FULL: IntentKVFullComponent}
        super().__init__(params)

    @property
    def component(self) -> IntentKVFullComponent:
        component: IntentKVFullComponent = self.components[_FULL]
        return component

    def reset(self) -> None:
        super().reset()
        self.component.total_dead = 0
        self._dead_counts.clear()
        if self.on_reset is not None:
            self.on_reset()

    def cache_unfinished_req(self, req: Any, chunked: bool = False, **kwargs: Any) -> None:
        super().cache_unfinished_req(req, chunked=chunked, **kwargs)
        if self.on_event is not None:
            self.on_event(CacheEvent("chunk" if chunked else "checkpoint", req, req.last_node))

    def cache_finished_req(self, req: Any, is_insert: bool = True, **kwargs: Any) -> None:
        super().cache_finished_req(req, is_insert=is_insert, **kwargs)
        if self.on_event is not None:
            self.on_event(CacheEvent("finish" if is_insert else "drop", req, req.last_node))

    def checkpoint(self, req: Any, length: int) -> None:
        """Hand the first ``length`` positions of running ``req`` to the tree in mid-decode; their KV must have been computed.

        As SGLang does after a prefill, generated tokens included: afterwards ``[0, length)`` of its row is tree-owned and locked, and
        ``[length, allocated)`` still is the request's own.
        """
        prefill = req.extend_range
        req._refresh_fill_ids()
        req.set_extend_range(prefill.start, length)
        try:
            super().cache_unfinished_req(req)
        finally:
            req.extend_range = prefill

    # ---- Path queries: a node id stands for the tokens from the root to the node's end ----

    def has_node(self, node_id: int) -> bool:
        """Whether the node still is in the tree (eviction and reset remove nodes; ids are never reused)."""
        return node_id in self.tree_core._node_arena

    def path(self, node_id: int) -> list[PathNode]:
        """Nodes from the root (exclusive) to ``node_id``, with their logical positions."""
        nodes = []
        node = self.tree_core.node_by_id(node_id)
        while node is not self.tree_core.root_node:
            nodes.append(node)
            node = node.parent
        path, end = [], 0
        for node in reversed(nodes):
            start, end = end, end + len(node.key)
            path.append(PathNode(node, start, end))
        return path

    def path_length(self, node_id: int) -> int:
        """Logical tokens of the path."""
        path = self.path(node_id)
        return path[-1].end if path else 0

    def path_slots(self, node_id: int) -> torch.Tensor:
        """[n] int64 slots of the path, dead marks included."""
        values = [p.node.component_data[_FULL].value for p in self.path(node_id)]
        return torch.cat(values) if values else torch.empty(0, dtype=torch.int64, device=self.tree_core.device)

    def dead_mask(self, node_id: int) -> torch.Tensor:
        """[n] bool on the CPU, True where the path is dead."""
        path = self.path(node_id)
        mask = torch.zeros(path[-1].end if path else 0, dtype=torch.bool)
        for node, start, end in path:
            dead = node_tag(node).dead
            if dead is not None:
                mask[start:end] = dead
        return mask

    def n_dead(self, node_id: int) -> int:
        """Dead positions on the path. Cached: only pruning changes it, splitting and inserting do not."""
        if self.component.total_dead == 0:
            return 0
        count = self._dead_counts.get(node_id)
        if count is None:
            if len(self._dead_counts) >= _DEAD_COUNTS:
                self._dead_counts.clear()
            count = sum(node_tag(p.node).n_dead for p in self.path(node_id))
            self._dead_counts[node_id] = count
        return count

    def prunable_mask(self, node_id: int, owner: str, locks: int) -> torch.Tensor:
        """[n] bool on the CPU: positions that only ``owner`` uses.

        Args:
            owner: session that asks. A node that another session checkpointed through is shared and stays whole.
            locks: locks the asking request itself holds on the path (1 running, 0 finished). More means that another
                request is reading the node.
        """
        path = self.path(node_id)
        mask = torch.zeros(path[-1].end if path else 0, dtype=torch.bool)
        for node, start, end in path:
            mask[start:end] = node_tag(node).owners <= {owner} and node.component_data[_FULL].lock_ref == locks
        return mask

    # ---- Owners ----

    def owners(self, node_id: int) -> set[str]:
        """Sessions that checkpointed through the node; none for the root."""
        return set(node_tag(self.tree_core.node_by_id(node_id)).owners)

    def add_owner(self, node_id: int, owner: str) -> None:
        """Tag the path with ``owner``. Tags are passed on by splits, so a tagged node's ancestors are tagged too.

        A node that many sessions share names only the first of them: who else uses it makes no difference any more.
        """
        node = self.tree_core.node_by_id(node_id)
        while node is not self.tree_core.root_node:
            tag = node_tag(node)
            if owner in tag.owners or len(tag.owners) >= _OWNERS:
                return
            tag.owners.add(owner)
            node = node.parent

    def dead_spans(self, owner: str) -> list[tuple[int, int]]:
        """Dead spans ``[start, end)`` on the longest path that ``owner`` went through; empty when it has none."""
        owned = [node for node in self._nodes() if owner in node_tag(node).owners]
        leaf = max(owned, key=lambda node: self.path_length(node.id), default=None)
        if leaf is None:
            return []
        edges = torch.diff(torch.nn.functional.pad(self.dead_mask(leaf.id).to(torch.int8), (1, 1)))
        return list(zip((edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist(), strict=True))

    # ---- Pruning ----

    def prune(self, node_id: int, dead: torch.Tensor) -> torch.Tensor:
        """Redirect live positions ``dead`` ([m] int64 on the CPU, ascending) of the path to the dead mark.

        The caller has checked them against :meth:`prunable_mask`, rewrites the running request's row if there is one, and only then
        frees the returned slots with :meth:`free_slots`.

        Returns:
            [m] int64 slots no node names any more.

        Raises:
            ValueError: a position is dead already or outside the path.
        """
        path = self.path(node_id)
        length = path[-1].end if path else 0
        if dead.numel() and (int(dead[0]) < 0 or int(dead[-1]) >= length):
            raise ValueError(f"positions {int(dead[0])}..{int(dead[-1])} are outside the path of {length} tokens")
        if bool(self.dead_mask(node_id)[dead].any()):
            raise ValueError("a position to prune is dead already")
        freed = []
        for node, start, end in path:
            offsets = dead[(dead >= start) & (dead < end)] - start
            if offsets.numel():
                freed.append(self.component.mark_dead(node, offsets))
        self._dead_counts.clear()
        return torch.cat(freed) if freed else torch.empty(0, dtype=torch.int64, device=self.tree_core.device)

    def free_slots(self, slots: torch.Tensor) -> None:
        """Give pruned slots back to the pool."""
        self.token_to_kv_pool_allocator.free(slots)

    # ---- Integrity ----

    def _nodes(self) -> Iterator[Any]:
        stack = list(self.tree_core.root_node.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check_row(self, name: str, row: torch.Tensor, node_id: int) -> None:
        """Check that a running request's tree-owned row prefix names exactly its path's slots (invariant 3).

        Raises:
            IntegrityError: naming the request and the first position that differs.
        """
        slots = self.path_slots(node_id).to(row.dtype)
        if len(slots) != len(row):
            raise IntegrityError(f"request {name}: its row has {len(row)} tree-owned positions, its path {len(slots)}")
        differs = (slots != row).nonzero().flatten()
        if differs.numel():
            raise IntegrityError(f"request {name}: row and tree differ at {differs.numel()} positions, first {int(differs[0])}")

    def check_integrity(self, private: int = 0) -> None:
        """Check invariants 1-3 of the architecture on the tree and the allocator (slow: walks everything, reads the device).

        Args:
            private: slots that running requests hold outside the tree.

        Raises:
            IntegrityError: with every term of the sum, or the slots in question.
        """
        allocator = self.token_to_kv_pool_allocator
        free = torch.cat((allocator.free_pages, allocator.release_pages)).cpu()
        held = []
        evictable = protected = 0
        for node in self._nodes():
            data, tag = node.component_data[_FULL], node_tag(node)
            value = data.value.cpu()
            is_dead = value == DEAD_SLOT
            marked = tag.dead if tag.dead is not None else torch.zeros(len(value), dtype=torch.bool)
            if not torch.equal(is_dead, marked) or int(is_dead.sum()) != tag.n_dead:
                raise IntegrityError(f"node {node.id}: {int(is_dead.sum())} dead slots on the device, {tag.n_dead} on the host")
            held.append(value[~is_dead])
            if data.lock_ref:
                protected += len(value) - tag.n_dead
            else:
                evictable += len(value) - tag.n_dead
        live = torch.cat(held) if held else torch.empty(0, dtype=torch.int64)
        everything = torch.cat((free, live))
        if bool((free == DEAD_SLOT).any()):
            raise IntegrityError("the dead slot is in the free list")
        if torch.unique(everything).numel() != everything.numel():
            raise IntegrityError(f"a slot is in two places: {free.numel()} free, {live.numel()} live in the tree")
        if (evictable, protected) != (self.evictable_size(), self.protected_size()):
            raise IntegrityError(
                f"ledgers say evictable={self.evictable_size()} protected={self.protected_size()}, "
                f"the tree holds evictable={evictable} protected={protected}"
            )
        if free.numel() + evictable + protected + private != allocator.size:
            raise IntegrityError(f"available={free.numel()} + {evictable=} + {protected=} + {private=} != total={allocator.size}")
