"""Reads a request's keys from SGLang's KV pool by logical position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from intentkv.scoring import LayerwiseKeys, Reduction


class PoolKeys(LayerwiseKeys):
    """Keys of one path of the tree. SGLang stores K after RoPE, so q.K * scaling is the true logit."""

    def __init__(self, kv_pool: Any, slots: torch.Tensor, live: torch.Tensor, layers: Sequence[int], scaling: float) -> None:
        """``slots``: [n] int64 of the path, dead marks included; ``live``: [m] int64, its live positions."""
        self._kv_pool = kv_pool
        self._slots = slots
        self.live = live
        self.layers = layers
        self.scaling = scaling

    def keys(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """[n, H_kv, D] float32; ``positions`` ([n] int64) must be live."""
        keys: torch.Tensor = self._kv_pool.get_key_buffer(layer)[self._slots[positions]]
        return keys.float()

    def scores(
        self, queries: torch.Tensor, positions: torch.Tensor, reduction: Reduction, query_positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """All layers at once in Triton on a GPU, layer by layer in torch elsewhere."""
        if not positions.is_cuda or reduction == "max":
            return super().scores(queries, positions, reduction, query_positions)
        from intentkv.kernels.attention_scores import paged_key_scores

        buffers = [self._kv_pool.get_key_buffer(layer) for layer in self.layers]
        key_positions = positions if query_positions is not None else None
        return paged_key_scores(queries, buffers, self._slots[positions], self.scaling, reduction, query_positions, key_positions)

    def layer_scores(
        self, queries: torch.Tensor, positions: torch.Tensor, reduction: Reduction, query_positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One launch of the kernels a layer on a GPU."""
        if not positions.is_cuda or reduction == "max":
            return super().layer_scores(queries, positions, reduction, query_positions)
        from intentkv.kernels.attention_scores import paged_key_scores

        slots, at = self._slots[positions], positions if query_positions is not None else None
        buffers = [self._kv_pool.get_key_buffer(layer) for layer in self.layers]
        return torch.stack(
            [
                paged_key_scores(queries[i : i + 1], [buffer], slots, self.scaling, reduction, query_positions, at)
                for i, buffer in enumerate(buffers)
            ]
        )
