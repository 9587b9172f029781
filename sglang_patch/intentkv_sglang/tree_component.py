"""The tree's KV component with ledgers in live units: dead positions own no slot and are counted nowhere.

A node's ``value`` stays as long as its key; evicted positions hold the dead mark (slot 0, the pool's padding row). Every place where
stock code books or frees ``len(value)`` slots for such a node is corrected here by the node's dead count, and only here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.mem_cache.unified_cache.components.full_component import FullComponent
from sglang.srt.mem_cache.unified_cache.components.tree_component import EvictLayer

from intentkv.kernels.compact import DEAD_SLOT
from intentkv.transfer import to_device

_TAG = "intentkv"


@dataclass
class NodeTag:
    """What the plugin knows of one radix node."""

    dead: torch.Tensor | None = None
    """[len(key)] bool on the CPU, or None while nothing is dead."""
    n_dead: int = 0
    owners: set[str] = field(default_factory=set)
    """Keys of the sessions that checkpointed a request through the node."""

    def split(self, at: int) -> NodeTag:
        """Cut off the part before offset ``at`` and return it; self keeps the rest."""
        head = NodeTag(owners=set(self.owners))
        if self.dead is not None:
            head.dead, self.dead = self.dead[:at].clone(), self.dead[at:].clone()
            head.n_dead = int(head.dead.sum())
            self.n_dead -= head.n_dead
        return head


def node_tag(node: Any) -> NodeTag:
    """The tag of a node's KV component, made on first use."""
    tag: NodeTag = node.component_data[FullComponent.component_type].metadata.setdefault(_TAG, NodeTag())
    return tag


class IntentKVFullComponent(FullComponent):
    """FullComponent whose evictable and protected sizes count live slots."""

    def __init__(self, cache: Any, params: Any) -> None:
        super().__init__(cache, params)
        self.total_dead = 0
        """Dead positions in the whole tree."""

    def redistribute_on_node_split(self, new_parent: Any, child: Any) -> None:
        super().redistribute_on_node_split(new_parent, child)
        head = node_tag(child).split(len(new_parent.key))
        new_parent.component_data[self.component_type].metadata[_TAG] = head

    def evict_component(self, node: Any, device_frees: Any, host_frees: Any, target: Any = EvictLayer.DEVICE) -> tuple[int, int]:
        data = node.component_data[self.component_type]
        evicts_device = EvictLayer.DEVICE in target and data.value is not None
        freed, host_freed = super().evict_component(node, device_frees, host_frees, target)
        tag = node_tag(node)
        if evicts_device and tag.dead is not None:
            # value = [live and dead slots, mixed]: the live ones are the node's, the dead mark is nobody's and is never freed.
            live = to_device(torch.nonzero(~tag.dead).flatten(), data.value.device)
            frees = device_frees[self.component_type]
            frees.pop()
            if live.numel():
                frees.append(data.value[live])
            self.tree_core.component_evictable_size_[self.component_type] += tag.n_dead
            freed -= tag.n_dead
            self.total_dead -= tag.n_dead
            tag.dead, tag.n_dead = None, 0
        return freed, host_freed

    def acquire_component_lock(self, node: Any, result: Any, lock_host: bool = False) -> Any:
        dead = 0 if lock_host else self._dead_on_path(node, lock_ref=0)
        result = super().acquire_component_lock(node, result, lock_host)
        if dead:
            self._move_dead(evictable=dead, protected=-dead)
            result.delta -= dead
        return result

    def release_component_lock(self, node: Any, params: Any, lock_host: bool = False) -> None:
        dead = 0 if lock_host else self._dead_on_path(node, lock_ref=1)
        super().release_component_lock(node, params, lock_host)
        if dead:
            self._move_dead(evictable=-dead, protected=dead)

    def _dead_on_path(self, node: Any, lock_ref: int) -> int:
        """Dead positions of the nodes from ``node`` up to the root whose lock count is ``lock_ref``.

        Those are the nodes that stock code moves between its two ledgers when a lock is taken (0 -> 1) or dropped (1 -> 0).
        """
        if self.total_dead == 0:
            return 0
        total = 0
        while node is not self.tree_core.root_node:
            if node.component_data[self.component_type].lock_ref == lock_ref:
                total += node_tag(node).n_dead
            node = node.parent
        return total

    def _move_dead(self, evictable: int, protected: int) -> None:
        self.tree_core.component_evictable_size_[self.component_type] += evictable
        self.tree_core.component_protected_size_[self.component_type] += protected

    def mark_dead(self, node: Any, offsets: torch.Tensor) -> torch.Tensor:
        """Redirect live ``offsets`` ([m] int64 on the CPU, ascending) of ``node`` to the dead mark.

        The node's value is replaced before its slots are given back: no moment exists at which a mapping names a freed slot.

        Returns:
            [m] slots that nobody names any more; the caller frees them.
        """
        data = node.component_data[self.component_type]
        tag = node_tag(node)
        index = to_device(offsets, data.value.device)
        slots: torch.Tensor = data.value[index]
        data.value = value = data.value.index_fill(0, index, DEAD_SLOT)
        if tag.dead is None:
            tag.dead = torch.zeros(len(value), dtype=torch.bool)
        tag.dead[offsets] = True
        tag.n_dead += offsets.numel()
        self.total_dead += offsets.numel()
        core = self.tree_core
        sizes = core.component_protected_size_ if data.lock_ref else core.component_evictable_size_
        sizes[self.component_type] -= offsets.numel()
        return slots
