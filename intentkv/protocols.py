"""The six parts a method is composed of, and the two things an engine must lend to them.

All four source systems are one formula: *queries* (which Q) -> *aggregation* -> *budget* -> *selection* -> *trigger* -> *layout*.
Each part is a small protocol here; a method (``intentkv/methods``) is a preset that names one of each.
No part knows about SGLang, and no engine code knows a method's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from intentkv.scoring import Reduction
from intentkv.sessions import SessionState
from intentkv.spans import Prompt, Span


class KeyReader(Protocol):
    """Post-RoPE keys of one request, scored by logical position. Only live positions may be asked for."""

    @property
    def live(self) -> torch.Tensor:
        """[n] int64, all live positions, ascending."""
        ...

    def live_before(self, end: int) -> torch.Tensor:
        """[n] int64, the live positions below ``end``, ascending; must not wait for the device."""
        ...

    @property
    def n_layers(self) -> int:
        """L, the layers that are scored."""
        ...

    def scores(
        self, queries: torch.Tensor, positions: torch.Tensor, reduction: Reduction, query_positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Scores of the keys at ``positions``, summed over layers and query heads (see :func:`intentkv.scoring.key_scores`).

        Args:
            queries: [L, n_q, H_q, D] post-RoPE.
            positions: [n] int64.
            query_positions: [n_q] int64; when given, keys after a query are masked.

        Returns:
            [n] float32.
        """
        ...

    def layer_scores(
        self, queries: torch.Tensor, positions: torch.Tensor, reduction: Reduction, query_positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Like :meth:`scores`, before the sum over layers: [L, n] float32."""
        ...

    def mean_keys(self, positions: torch.Tensor) -> torch.Tensor:
        """Keys of ``positions`` ([n] int64, live), averaged over scored layers and KV heads: [n, D] float32."""
        ...

    def value_norms(self, positions: torch.Tensor) -> torch.Tensor:
        """Squared norms of the values of ``positions`` ([n] int64, live), averaged over KV heads: [n, L] float32."""
        ...

    def mean_over_heads(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` ([L, H_q, D] float32, of the layers and query heads whose queries are captured), averaged over layers and all query
        heads that the reader answers for: [D] float32."""
        ...


@dataclass(frozen=True)
class CaptureRequest:
    """Queries a method wants from the positions ``[start, end)`` when a forward pass computes them."""

    span: Span
    form: Literal["mean", "raw"]
    """``mean``: one averaged query a head. ``raw``: single queries, evenly sampled down to ``limit``."""
    limit: int = 0

    def sampled(self, start: int) -> range:
        """At most ``limit`` evenly spaced positions from ``start`` to the span's end, ascending, the last one among them."""
        stride = -(-(self.span.end - start) // self.limit)
        return range(self.span.end - 1, start - 1, -stride)[::-1]


@dataclass
class Captured:
    """Post-RoPE queries of one span, as far as this server computed them (a cached part has no queries)."""

    span: Span
    form: Literal["mean", "raw"]
    positions: torch.Tensor
    """[n] int64 logical positions the queries belong to; empty for ``mean``."""
    queries: torch.Tensor
    """``raw``: [L, n, H_q, D]; ``mean``: [L, H_q, D], float32. L runs over the layers that the engine scores."""


class QuerySource(Protocol):
    """Which queries to capture."""

    @property
    def decode(self) -> bool:
        """Also capture the assistant's own tokens while they are generated."""
        ...

    @property
    def decode_limit(self) -> int:
        """At most this many queries of one generated turn are kept, evenly spaced."""
        ...

    def requests(self, prompt: Prompt) -> list[CaptureRequest]:
        """The spans of ``prompt`` to capture, in order of position."""
        ...


class Aggregator(Protocol):
    """How captured queries become one score a position."""

    def absorb(self, state: SessionState, captured: Captured, keys: KeyReader, prompt: Prompt) -> None:
        """Fold one span's queries into the session's memory. Called in order of position."""
        ...

    def score(
        self, state: SessionState, history: torch.Tensor, captured: Sequence[Captured], keys: KeyReader, prompt: Prompt
    ) -> torch.Tensor:
        """Scores of ``history`` ([n] int64 live candidate positions): [n] float32, higher is kept longer."""
        ...


class Budget(Protocol):
    """How many history tokens may stay."""

    def keep_count(self, n_history: int, n_forced: int) -> int:
        """History tokens to keep, given ``n_history`` logical candidates and ``n_forced`` always-kept tokens."""
        ...


class Trigger(Protocol):
    """When an eviction happens."""

    def fires(self, n_live: int, n_target: int) -> bool:
        """Whether ``n_live`` live tokens are far enough over the ``n_target`` that would remain."""
        ...


Layout = Literal["redirect"]
"""``redirect``: evicted positions point at the dead mark, nothing moves (page size 1)."""
