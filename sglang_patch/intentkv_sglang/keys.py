"""Reads a request's keys from SGLang's KV pool by logical position."""

from __future__ import annotations

from typing import Any

import torch


class PoolKeyReader:
    """KeyReader over one path of the tree. SGLang stores K after RoPE, so q.K * scaling is the true logit."""

    def __init__(self, kv_pool: Any, slots: torch.Tensor, layers: range, scaling: float) -> None:
        self._kv_pool = kv_pool
        self._slots = slots
        self.layers = layers
        self.scaling = scaling

    def keys(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """[n, H_kv, D] float32; ``positions`` ([n] int64) must be live."""
        keys: torch.Tensor = self._kv_pool.get_key_buffer(layer)[self._slots[positions]]
        return keys.float()
