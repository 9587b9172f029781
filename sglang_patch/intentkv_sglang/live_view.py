"""LiveView: attention sees live slots only, whatever the backend.

Rows of ``req_to_token`` stay logical. Every row has a shadow row in the same tensor. Before a backend builds its metadata, the pruned
lanes' live slots are in their shadow rows, and the batch names those rows and live lengths for the duration of the call. RoPE positions
and output slots are untouched. Supporting a backend is one line in ``BACKENDS``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from intentkv.kernels.compact import compact_rows
from intentkv.transfer import to_device
from intentkv_sglang.capture import DecodeTap, QueryTap


@dataclass(frozen=True)
class Lane:
    """One request in one forward pass, as the host knows it."""

    row: int
    """Its row in ``req_to_token``."""
    start: int
    """First logical position the pass computes."""
    end: int
    """One past the last: the lane's logical length."""
    n_dead: int = 0
    """Dead positions among ``[0, start)``; must equal the dead marks in the row."""
    version: int = -1
    """Changes whenever the row's entries below ``start`` may have; -1: not tracked, never reuse a shadow row."""


@dataclass
class LanePass:
    """Side channel of one forward pass: what the plugin knows of its lanes, in batch order."""

    lanes: list[Lane]
    tap: QueryTap | None = None


@dataclass
class PassChannel:
    """Carries the pass that is about to run to the attention backends of this process.

    The scheduler thread builds a pass and launches it before it builds the next one, so one place is enough. Attributes on the batch would
    not reach a replayed CUDA graph, whose metadata is built from a view of the runner's own buffers.
    """

    current: LanePass | None = None
    decode_tap: DecodeTap | None = None
    """Set where a recorded decode graph captures queries."""


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


@dataclass
class ShadowRows:
    """Live slots of pruned rows, kept from pass to pass: row ``r`` has its shadow at ``r + offset``.

    A decode step only appends one slot. The whole row is compacted when its prefix changed or several positions were computed.
    """

    table: torch.Tensor
    """``req_to_token``, [rows, context] int32."""
    offset: int
    _filled: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Row -> (version, logical end) its shadow holds."""

    def view(self, batch: Any, lanes: list[Lane]) -> LiveView | None:
        """The substitutes for ``batch``, or None when no lane is pruned: no kernel, no synchronisation.

        Args:
            batch: ForwardBatch or a graph runner's padded view of one: ``req_pool_indices`` [B], ``seq_lens`` [B] and, in extend,
                ``extend_prefix_lens`` [B]. Lanes behind ``lanes`` are padding.
        """
        pruned = [(i, lane) for i, lane in enumerate(lanes) if lane.n_dead]
        if not pruned:
            return None
        device = self.table.device
        append: list[tuple[int, int, int]] = []
        compact: list[tuple[int, int]] = []
        for _, lane in pruned:
            if lane.end == lane.start + 1 and self._filled.get(lane.row) == (lane.version, lane.start) and lane.version >= 0:
                append.append((lane.row, lane.start, lane.start - lane.n_dead))
            else:
                compact.append((lane.row, lane.end))
            self._filled[lane.row] = (lane.version, lane.end)
        if compact:
            rows, lengths = to_device(torch.tensor(list(zip(*compact, strict=True))), device)
            compact_rows(self.table, rows, lengths, rows + self.offset)
        if append:
            rows, source, target = to_device(torch.tensor(list(zip(*append, strict=True))), device)
            self.table[rows + self.offset, target] = self.table[rows, source]
        n_dead = [lane.n_dead for lane in lanes] + [0] * (batch.seq_lens.shape[0] - len(lanes))
        host_dead = torch.tensor(n_dead, dtype=torch.int64)
        dead = to_device(host_dead, device)
        shifted = batch.req_pool_indices + (dead > 0) * self.offset
        fields: dict[str, Any] = {
            "req_pool_indices": shifted.to(batch.req_pool_indices.dtype),
            "seq_lens": (batch.seq_lens - dead).to(batch.seq_lens.dtype),
        }
        if getattr(batch, "seq_lens_cpu", None) is not None:
            fields["seq_lens_cpu"] = (batch.seq_lens_cpu - host_dead).to(batch.seq_lens_cpu.dtype)
        if getattr(batch, "seq_lens_sum", None) is not None:
            fields["seq_lens_sum"] = batch.seq_lens_sum - sum(n_dead)
        if getattr(batch, "extend_prefix_lens", None) is not None:
            fields["extend_prefix_lens"] = (batch.extend_prefix_lens - dead).to(batch.extend_prefix_lens.dtype)
        if getattr(batch, "extend_prefix_lens_cpu", None) is not None:
            # A list of the real lanes, also where the tensors are padded.
            fields["extend_prefix_lens_cpu"] = [p - d for p, d in zip(batch.extend_prefix_lens_cpu, n_dead, strict=False)]
        return LiveView(fields)


BACKENDS: dict[str, bool] = {"torch_native": True, "triton": False, "flashinfer": False, "fa3": False}
"""Wrapped attention backends; the value says whether the backend reads ``req_to_token`` inside forward and not only in its metadata."""


def with_live_view(backend: Any, name: str, shadows: ShadowRows, channel: PassChannel) -> Any:
    """Turn ``backend`` into a live-view backend in place and return it: its class becomes a subclass of its class."""
    reads_rows_in_forward = BACKENDS[name]

    class LiveViewBackend(type(backend)):  # type: ignore[misc]
        sees_live_slots_only = True
        _view: LiveView | None = None

        def init_forward_metadata(self, forward_batch: Any) -> Any:
            with self._prepared(forward_batch):
                return super().init_forward_metadata(forward_batch)

        def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> Any:
            if in_capture or self._view is not None:
                # Recording, or called by an init_forward_metadata that has substituted already.
                return super().init_forward_metadata_out_graph(forward_batch, in_capture)
            if channel.decode_tap is not None:
                channel.decode_tap.aim(channel.current.tap if channel.current is not None else None)
            with self._prepared(forward_batch):
                return super().init_forward_metadata_out_graph(forward_batch, in_capture)

        @contextmanager
        def _prepared(self, forward_batch: Any) -> Iterator[None]:
            self._view = shadows.view(forward_batch, channel.current.lanes) if channel.current is not None else None
            try:
                with self._view.applied(forward_batch) if self._view is not None else nullcontext():
                    yield
            finally:
                if not reads_rows_in_forward:
                    self._view = None

        def forward_extend(self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, **kwargs: Any) -> Any:
            _tap(channel, q, layer)
            with self._view_in_forward(forward_batch):
                return super().forward_extend(q, k, v, layer, forward_batch, **kwargs)

        def forward_decode(self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, **kwargs: Any) -> Any:
            if q.is_cuda and torch.cuda.is_current_stream_capturing():
                if channel.decode_tap is not None:
                    channel.decode_tap.write(layer.layer_id, _by_head(q, layer))
            else:
                _tap(channel, q, layer)
            with self._view_in_forward(forward_batch):
                return super().forward_decode(q, k, v, layer, forward_batch, **kwargs)

        def _view_in_forward(self, forward_batch: Any) -> AbstractContextManager[None]:
            return self._view.applied(forward_batch) if self._view is not None else nullcontext()

    backend.__class__ = LiveViewBackend
    return backend


def _by_head(q: torch.Tensor, layer: Any) -> torch.Tensor:
    return q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)


def _tap(channel: PassChannel, q: torch.Tensor, layer: Any) -> None:
    if channel.current is not None and channel.current.tap is not None:
        channel.current.tap.write(layer.layer_id, _by_head(q, layer))
