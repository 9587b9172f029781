"""Capture of post-RoPE queries while attention runs, in extend and in decode.

Single queries go into a *bank*: one static tensor per server, rows leased to requests, written by index. Writing by index into static
storage is what a recorded CUDA graph can replay too: only the row numbers change between steps, and lanes that capture nothing write to
the trash row. Means are summed in float32 beside it.
What the layers give is collected and stored once, behind the last captured layer: a store of its own in every layer costs a decode step
of an 8B model 1.5 % (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from intentkv.protocols import Captured
from intentkv.spans import Span
from intentkv.transfer import to_device


class QueryBank:
    """``rows`` query rows shared by all running requests, and one trash row behind them.

    Storage is [L, rows + 1, H_q, D] in the model's dtype. A row is leased to at most one owner.
    """

    def __init__(self, layers: Sequence[int], rows: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.layers = layers
        self.trash = rows
        self.storage = torch.zeros(len(layers), rows + 1, heads, dim, dtype=dtype, device=device)
        self._free = list(range(rows - 1, -1, -1))

    @property
    def available(self) -> int:
        return len(self._free)

    def lease(self) -> int | None:
        """A free row, or None when all are taken."""
        return self._free.pop() if self._free else None

    def release(self, rows: list[int]) -> None:
        self._free.extend(rows)

    def write(self, rows: torch.Tensor, queries: list[torch.Tensor]) -> None:
        """Store ``queries`` (of each captured layer [n, H_q, D]) in ``rows`` ([n] int64)."""
        self.storage.index_copy_(1, rows, torch.stack(queries).to(self.storage.dtype))

    def read(self, rows: list[int]) -> torch.Tensor:
        """[L, n, H_q, D] float32."""
        return self.storage[:, to_device(torch.tensor(rows, dtype=torch.int64), self.storage.device)].float()


@dataclass
class RowLease:
    """Rows that hold single queries of one span, evenly spaced whatever the span's final length.

    Every ``stride``-th token of the span is kept. When ``limit`` rows are full every other one is given back and the stride doubles, so
    a turn of unknown length stays evenly sampled within bounded memory.
    """

    bank: QueryBank
    limit: int
    stride: int = 1
    positions: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    _seen: int = 0

    def offer(self, position: int) -> int | None:
        """The row for the query at logical ``position``, or None when it is not sampled (or the bank is full)."""
        index, self._seen = self._seen, self._seen + 1
        if index % self.stride:
            return None
        if len(self.rows) == self.limit:
            self.bank.release(self.rows[1::2])
            self.rows, self.positions = self.rows[::2], self.positions[::2]
            self.stride *= 2
            if index % self.stride:
                return None
        row = self.bank.lease()
        if row is not None:
            self.rows.append(row)
            self.positions.append(position)
        return row

    def captured(self, span: Span) -> Captured:
        """The queries at positions inside ``span``."""
        inside = [i for i, p in enumerate(self.positions) if span.start <= p < span.end]
        return Captured(
            span=span,
            form="raw",
            positions=to_device(torch.tensor([self.positions[i] for i in inside], dtype=torch.int64), self.bank.storage.device),
            queries=self.bank.read([self.rows[i] for i in inside]),
        )

    def close(self) -> None:
        """Give all rows back."""
        self.bank.release(self.rows)
        self.rows, self.positions = [], []


class MeanSum:
    """Running sum of one span's queries: [L, H_q, D] float32."""

    def __init__(self, bank: QueryBank) -> None:
        shape = bank.storage.shape
        self._total = torch.zeros(shape[0], shape[2], shape[3], dtype=torch.float32, device=bank.storage.device)
        self.count = 0

    def add(self, sums: list[torch.Tensor]) -> None:
        """Add what each captured layer summed up ([H_q, D] float32)."""
        self._total += torch.stack(sums)

    def captured(self, span: Span) -> Captured:
        if self._total.is_cuda:
            # Summed on the forward stream, read on the scheduler's: its memory must outlive the read.
            self._total.record_stream(torch.cuda.current_stream())
        empty = torch.empty(0, dtype=torch.int64, device=self._total.device)
        return Captured(span=span, form="mean", positions=empty, queries=self._total / max(1, self.count))


@dataclass
class CapturePlan:
    """What one forward pass captures. Built once a pass, used by every layer."""

    tokens: list[int] = field(default_factory=list)
    """Token indices of the pass whose query goes to the row of the same place in ``rows``."""
    rows: list[int] = field(default_factory=list)
    means: list[tuple[MeanSum, int, int]] = field(default_factory=list)
    """(sum, first token index, end token index) of the pass."""

    def __bool__(self) -> bool:
        return bool(self.tokens or self.means)


class QueryTap:
    """Applies a plan to the queries of each layer."""

    def __init__(self, bank: QueryBank, plan: CapturePlan) -> None:
        device = bank.storage.device
        self._bank = bank
        self._means = plan.means
        # A row that was given back and leased again within the pass is its last taker's.
        by_row = dict(zip(plan.rows, plan.tokens, strict=True))
        self.targets = [(token, row) for row, token in by_row.items()]
        self._rows, self._tokens = to_device(torch.tensor([list(by_row), list(by_row.values())], dtype=torch.int64), device)
        self._single: list[torch.Tensor] = []
        self._sums: list[list[torch.Tensor]] = [[] for _ in self._means]

    def write(self, layer: int, queries: torch.Tensor) -> None:
        """Capture from ``queries`` ([tokens of the pass, H_q, D], post-RoPE) of ``layer``; layers come in ascending order."""
        if layer not in self._bank.layers:
            return
        # Copies at once: the next layer may compute its queries in the same memory.
        if self._rows.numel():
            self._single.append(queries[self._tokens])
        for sums, (_, start, end) in zip(self._sums, self._means, strict=True):
            sums.append(queries[start:end].sum(0, dtype=torch.float32))
        if layer == self._bank.layers[-1]:
            if self._single:
                self._bank.write(self._rows, self._single)
            for sums, (total, _, _) in zip(self._sums, self._means, strict=True):
                total.add(sums)


class DecodeTap:
    """Capture from inside a recorded decode graph: one static row number a lane.

    The graph replays ``storage[:, row] = q`` for every lane; before each replay :meth:`aim` sets the rows. Lanes that capture nothing,
    padded ones among them, write to the trash row.
    """

    def __init__(self, bank: QueryBank, lanes: int) -> None:
        self._bank = bank
        self._rows = torch.full((lanes,), bank.trash, dtype=torch.int64, device=bank.storage.device)
        self._aimed = 0
        self._recorded: list[torch.Tensor] = []

    def aim(self, tap: QueryTap | None) -> None:
        """Set the rows for the next replay: those of ``tap`` (a decode pass: token index = lane), trash for all others."""
        if tap is None and not self._aimed:
            return
        rows = torch.full((self._rows.shape[0],), self._bank.trash, dtype=torch.int64)
        targets = tap.targets if tap is not None else []
        for lane, row in targets:
            rows[lane] = row
        self._rows.copy_(to_device(rows, self._rows.device))
        self._aimed = len(targets)

    def write(self, layer: int, queries: torch.Tensor) -> None:
        """Record the capture of ``queries`` ([lanes of the graph, H_q, D]) of ``layer``; layers come in ascending order.

        Nothing is copied before the last layer: held here, their memory in the graph is not given to anything else.
        """
        if layer == self._bank.layers[0]:
            self._recorded = []
        if layer in self._bank.layers:
            self._recorded.append(queries)
        if layer == self._bank.layers[-1]:
            self._bank.write(self._rows[: queries.shape[0]], self._recorded)
            self._recorded = []
