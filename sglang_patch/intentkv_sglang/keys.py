"""Reads a request's keys from SGLang's KV pool by logical position."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from intentkv.kernels.paged_keys import PagedKV
from intentkv.scoring import LayerwiseKeys, Reduction
from intentkv.transfer import to_device


class PoolKeys(LayerwiseKeys):
    """Keys and values of one path of the tree. SGLang stores K after RoPE, so q.K * scaling is the true logit."""

    def __init__(self, pages: PagedKV, slots: torch.Tensor, live: torch.Tensor, layers: Sequence[int], scaling: float) -> None:
        """``pages``: of ``layers``, in their order; ``slots``: [n] int64 of the path, dead marks included; ``live``: [m] int64 on the CPU,
        its live positions, ascending."""
        self._pages = pages
        self._slots = slots
        self._live_on_host = live
        self.live = to_device(live, slots.device)
        self.layers = layers
        self.scaling = scaling

    def live_before(self, end: int) -> torch.Tensor:
        """[m] int64, the live positions below ``end``."""
        return self.live[: int(torch.searchsorted(self._live_on_host, end))]

    def keys(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """[n, H_kv, D] float32; ``positions`` ([n] int64) must be live."""
        return self._pages.keys.read(self.layers.index(layer), self._slots[positions])

    def values(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """[n, H_kv, D_v] float32; ``positions`` ([n] int64) must be live."""
        return self._pages.values.read(self.layers.index(layer), self._slots[positions])

    def scores(
        self, queries: torch.Tensor, positions: torch.Tensor, reduction: Reduction, query_positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """All layers at once in Triton on a GPU, layer by layer in torch elsewhere."""
        if not positions.is_cuda or reduction == "max":
            return super().scores(queries, positions, reduction, query_positions)
        from intentkv.kernels.attention_scores import paged_key_scores

        key_positions = positions if query_positions is not None else None
        return paged_key_scores(queries, self._pages.keys, self._slots[positions], self.scaling, reduction, query_positions, key_positions)

    def layer_scores(
        self, queries: torch.Tensor, positions: torch.Tensor, reduction: Reduction, query_positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As :meth:`scores`, not summed over layers."""
        if not positions.is_cuda or reduction == "max":
            return super().layer_scores(queries, positions, reduction, query_positions)
        from intentkv.kernels.attention_scores import paged_layer_scores

        key_positions = positions if query_positions is not None else None
        return paged_layer_scores(
            queries, self._pages.keys, self._slots[positions], self.scaling, reduction, query_positions, key_positions
        )

    def mean_keys(self, positions: torch.Tensor) -> torch.Tensor:
        """One read of K in Triton on a GPU, layer by layer in torch elsewhere."""
        if not positions.is_cuda:
            return super().mean_keys(positions)
        from intentkv.kernels.averages import mean_keys

        return mean_keys(self._pages.keys, self._slots[positions])

    def value_norms(self, positions: torch.Tensor) -> torch.Tensor:
        """One read of V in Triton on a GPU, layer by layer in torch elsewhere."""
        if not positions.is_cuda:
            return super().value_norms(positions)
        from intentkv.kernels.averages import squared_norms

        return squared_norms(self._pages.values, self._slots[positions])
