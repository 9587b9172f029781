"""A KV pool as scoring reads it: one buffer a layer, any slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class PagedKeys:
    """Post-RoPE key buffers (or value buffers) of the layers to score. Made once a pool: kernels read their addresses from device memory.

    Args:
        buffers: L tensors [pool, H_kv, D] of one shape and dtype (float32, bfloat16, float16 or fp8), contiguous; they must not move.
        scales: L dequantisation factors (key = stored value * factor), 1 where left out.

    Raises:
        ValueError: buffers that differ or are not contiguous, or a factor that is not positive.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], scales: Sequence[float] | None = None) -> None:
        first = buffers[0]
        if first.dim() != 3 or any((b.shape, b.dtype, b.device) != (first.shape, first.dtype, first.device) for b in buffers):
            raise ValueError("the key buffers of all layers must be [pool, H_kv, D] tensors of one shape, dtype and device")
        if not all(b.is_contiguous() for b in buffers):
            raise ValueError("key buffers must be contiguous")
        scales = [1.0] * len(buffers) if scales is None else scales
        if len(scales) != len(buffers) or min(scales) <= 0:
            raise ValueError(f"{len(buffers)} positive dequantisation factors are needed, got {list(scales)}")
        self.buffers = tuple(buffers)
        self.kv_heads, self.dim = first.shape[1], first.shape[2]
        self.dtype = first.dtype
        self._factors = tuple(scales)
        self.pointers = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.int64, device=first.device)
        """[L] int64 addresses."""
        self.scales = torch.tensor(scales, dtype=torch.float32, device=first.device)
        """[L] float32."""

    def __len__(self) -> int:
        return len(self.buffers)

    def read(self, index: int, slots: torch.Tensor) -> torch.Tensor:
        """[n, H_kv, D] float32, dequantised: the keys in ``slots`` ([n] int64) of the ``index``-th layer."""
        buffer, factor = self.buffers[index], self._factors[index]
        # Whole rows: on a CPU several times faster than buffer[slots]. torch has no gather of 8-bit floats on every device; bytes can be
        # gathered everywhere.
        rows = buffer if buffer.element_size() > 1 else buffer.view(torch.uint8)
        keys = rows.index_select(0, slots).view(self.dtype).float()
        return keys if factor == 1 else keys * factor


class PagedKV(NamedTuple):
    """Keys and values of the layers to score."""

    keys: PagedKeys
    values: PagedKeys
