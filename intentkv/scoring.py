"""Attention scores of key positions under a set of queries: the torch references.

Memory is O(heads x keys) per call: queries are taken a few at a time, so no (queries x keys) matrix for a whole span exists.
Callers go layer by layer; keys are read once a call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Literal

import torch

Reduction = Literal["mass", "energy", "max"]

_QUERY_BLOCK = 16
"""Queries per block; bounds the logits to H_q x 16 x n_keys floats."""


def attention_probabilities(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scaling: float,
    query_positions: torch.Tensor | None = None,
    key_positions: torch.Tensor | None = None,
    block: int = _QUERY_BLOCK,
) -> Iterator[torch.Tensor]:
    """Softmax attention of ``queries`` over ``keys``, a block of queries at a time.

    Args:
        queries: [n_q, H_q, D] post-RoPE.
        keys: [n, H_kv, D] post-RoPE; query head h reads KV head h // (H_q // H_kv).
        query_positions: [n_q] int64; with ``key_positions`` [n] int64, keys after a query are masked (causal).
        block: queries at a time; bounds the logits to H_q x block x n floats.

    Yields:
        [H_q, block, n] float32 probabilities; a query that sees no key has a row of zeros.
    """
    n_queries, q_heads, dim = queries.shape
    kv_heads = keys.shape[1]
    grouped = (queries.float() * scaling).reshape(n_queries, kv_heads, q_heads // kv_heads, dim)
    by_head = keys.float().permute(1, 2, 0)
    for start in range(0, n_queries, block):
        some = grouped[start : start + block]
        size = some.shape[0]
        # [H_kv, group * block, D] @ [H_kv, D, n]: one matrix product per KV head
        logits = torch.matmul(some.permute(1, 2, 0, 3).reshape(kv_heads, -1, dim), by_head).view(q_heads, size, -1)
        if query_positions is not None and key_positions is not None:
            hidden = key_positions[None, :] > query_positions[start : start + size, None]
            # in place, and added: a copy of the logits, or a fill by a mask that repeats over heads, costs as much as a softmax
            logits += torch.zeros_like(logits[0]).masked_fill_(hidden, float("-inf"))
            yield torch.softmax(logits, -1).nan_to_num_(nan=0.0)
        else:
            yield torch.softmax(logits, -1)


def key_scores(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scaling: float,
    reduction: Reduction,
    query_positions: torch.Tensor | None = None,
    key_positions: torch.Tensor | None = None,
    block: int = _QUERY_BLOCK,
) -> torch.Tensor:
    """One score a key, summed over query heads.

    ``mass``: sum over queries of alpha (IntentKV rule, SnapKV). ``energy``: mean over queries of alpha squared (the square of the RMS
    attention of online compaction's token eviction). ``max``: largest alpha of any query.

    Returns:
        [n] float32.
    """
    n_queries, q_heads, _ = queries.shape
    if n_queries == 0 or keys.shape[0] == 0:
        return torch.zeros(keys.shape[0], dtype=torch.float32, device=keys.device)
    total = torch.zeros(q_heads, keys.shape[0], dtype=torch.float32, device=keys.device)
    for alpha in attention_probabilities(queries, keys, scaling, query_positions, key_positions, block):
        if reduction == "mass":
            total += alpha.sum(1)
        elif reduction == "energy":
            total += alpha.square_().sum(1)
        else:
            total = torch.maximum(total, alpha.amax(1))
    if reduction == "energy":
        total /= n_queries
    return total.sum(0)


class LayerwiseKeys(ABC):
    """A KeyReader that scores layer by layer with :func:`key_scores`; subclasses say where the keys are."""

    layers: Sequence[int]
    """Layer ids to score, ascending."""
    scaling: float
    """Multiplies q.k to give the attention logit."""
    query_block: int = _QUERY_BLOCK
    """Queries scored at a time."""

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @abstractmethod
    def keys(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """Keys of ``positions`` ([n] int64, live) in ``layer``: [n, H_kv, D], float32."""

    @abstractmethod
    def values(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """Values of ``positions`` ([n] int64, live) in ``layer``: [n, H_kv, D_v], float32."""

    def scores(
        self, queries: torch.Tensor, positions: torch.Tensor, reduction: Reduction, query_positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See :meth:`intentkv.protocols.KeyReader.scores`."""
        total = torch.zeros(positions.shape[0], dtype=torch.float32, device=positions.device)
        key_positions = positions if query_positions is not None else None
        for index, layer in enumerate(self.layers):
            keys = self.keys(layer, positions)
            total += key_scores(queries[index], keys, self.scaling, reduction, query_positions, key_positions, self.query_block)
        return total

    def layer_scores(
        self, queries: torch.Tensor, positions: torch.Tensor, reduction: Reduction, query_positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See :meth:`intentkv.protocols.KeyReader.layer_scores`."""
        at = positions if query_positions is not None else None
        return torch.stack(
            [
                key_scores(queries[i], self.keys(layer, positions), self.scaling, reduction, query_positions, at, self.query_block)
                for i, layer in enumerate(self.layers)
            ]
        )

    def mean_keys(self, positions: torch.Tensor) -> torch.Tensor:
        """See :meth:`intentkv.protocols.KeyReader.mean_keys`."""
        total: torch.Tensor | None = None
        for layer in self.layers:
            mean = self.keys(layer, positions).mean(1)
            total = mean if total is None else total.add_(mean)
        if total is None:
            raise ValueError("there are no layers to average")
        return total / len(self.layers)

    def value_norms(self, positions: torch.Tensor) -> torch.Tensor:
        """See :meth:`intentkv.protocols.KeyReader.value_norms`."""
        return torch.stack([self.values(layer, positions).square().sum(-1).mean(1) for layer in self.layers], 1)

    def mean_over_heads(self, values: torch.Tensor) -> torch.Tensor:
        """See :meth:`intentkv.protocols.KeyReader.mean_over_heads`."""
        return values.mean((0, 1))
