"""LiveView: attention sees live slots only, whatever the backend.

Rows of ``req_to_token`` stay logical. Before a backend builds its metadata, the pruned lanes' rows are stream-compacted into shadow rows
of the same tensor, and the batch names those rows and live lengths for the duration of the call. RoPE positions and output slots are
untouched. Supporting a backend is one line in ``BACKENDS``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from intentkv.kernels.compact import compact_rows
from intentkv_sglang.capture import QueryTap

PASS_ATTRIBUTE = "intentkv_pass"
"""Name under which a ForwardBatch carries its LanePass."""


@dataclass
class LanePass:
    """Side channel of one forward pass: what the plugin knows of its lanes."""

    n_dead: list[int]
    """Dead positions of each lane's prefix."""
    tap: QueryTap | None = None


@dataclass
class LiveView:
    """Substitutes for a batch's fields; lanes keep their order."""

    fields: dict[str, Any]

    @contextmanager
    def applied(self, batch: Any) -> Iterator[None]:
        saved = {name: getattr(batch, name) for name in self.fields}
        for name, value in self.fields.items():
            setattr(batch, name, value)
        try:
            yield
        finally:
            for name, value in saved.items():
                setattr(batch, name, value)


def build_view(batch: Any, n_dead: list[int], req_to_token: torch.Tensor, shadow_start: int) -> LiveView | None:
    """Compact the pruned lanes of ``batch`` into shadow rows.

    Args:
        batch: ForwardBatch with ``req_pool_indices`` [B], ``seq_lens`` [B] and, in extend, ``extend_prefix_lens`` [B].
        n_dead: dead positions of each lane (host); must equal the dead marks in the lane's row.
        req_to_token: [rows, context] int32; rows from ``shadow_start`` on are ours.

    Returns:
        None when nothing is pruned: no work, no synchronisation.
    """
    pruned = [i for i, dead in enumerate(n_dead) if dead]
    if not pruned:
        return None
    device = req_to_token.device
    lanes = torch.tensor(pruned, dtype=torch.int64, device=device)
    shadow = lanes + shadow_start
    host_dead = torch.tensor(n_dead, dtype=batch.seq_lens.dtype)
    dead = host_dead.to(device, non_blocking=True)
    compact_rows(req_to_token, batch.req_pool_indices[lanes], batch.seq_lens[lanes], shadow)
    rows = batch.req_pool_indices.clone()
    rows[lanes] = shadow.to(rows.dtype)
    fields: dict[str, Any] = {"req_pool_indices": rows, "seq_lens": batch.seq_lens - dead}
    if batch.seq_lens_cpu is not None:
        fields["seq_lens_cpu"] = batch.seq_lens_cpu - host_dead.to(batch.seq_lens_cpu.dtype)
    if batch.seq_lens_sum is not None:
        fields["seq_lens_sum"] = batch.seq_lens_sum - sum(n_dead)
    if batch.extend_prefix_lens is not None:
        fields["extend_prefix_lens"] = batch.extend_prefix_lens - dead.to(batch.extend_prefix_lens.dtype)
    if batch.extend_prefix_lens_cpu is not None:
        fields["extend_prefix_lens_cpu"] = [p - d for p, d in zip(batch.extend_prefix_lens_cpu, n_dead, strict=True)]
    return LiveView(fields)


BACKENDS: dict[str, bool] = {"torch_native": True}
"""Wrapped attention backends; the value says whether the backend reads ``req_to_token`` inside forward and not only in its metadata."""


def with_live_view(backend: Any, name: str, shadow_start: int) -> Any:
    """Turn ``backend`` into a live-view backend in place and return it: its class becomes a subclass of its class."""
    reads_rows_in_forward = BACKENDS[name]

    class LiveViewBackend(type(backend)):  # type: ignore[misc]
        _view: LiveView | None = None

        def init_forward_metadata(self, forward_batch: Any) -> Any:
            lane_pass: LanePass | None = getattr(forward_batch, PASS_ATTRIBUTE, None)
            table = self.req_to_token_pool.req_to_token
            self._view = None if lane_pass is None else build_view(forward_batch, lane_pass.n_dead, table, shadow_start)
            with self._view.applied(forward_batch) if self._view is not None else nullcontext():
                return super().init_forward_metadata(forward_batch)

        def forward_extend(self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, **kwargs: Any) -> Any:
            _tap(q, layer, forward_batch)
            with self._view_in_forward(forward_batch):
                return super().forward_extend(q, k, v, layer, forward_batch, **kwargs)

        def forward_decode(self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, **kwargs: Any) -> Any:
            _tap(q, layer, forward_batch)
            with self._view_in_forward(forward_batch):
                return super().forward_decode(q, k, v, layer, forward_batch, **kwargs)

        def _view_in_forward(self, forward_batch: Any) -> AbstractContextManager[None]:
            if self._view is None or not reads_rows_in_forward:
                return nullcontext()
            return self._view.applied(forward_batch)

    backend.__class__ = LiveViewBackend
    return backend


def _tap(q: torch.Tensor, layer: Any, forward_batch: Any) -> None:
    lane_pass: LanePass | None = getattr(forward_batch, PASS_ATTRIBUTE, None)
    if lane_pass is not None and lane_pass.tap is not None:
        lane_pass.tap.write(layer.layer_id, q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim))
