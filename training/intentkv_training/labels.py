"""What the future says about a history token: labels for training, and the oracles of the evaluation."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch

from intentkv.scoring import attention_probabilities
from intentkv.spans import Span
from intentkv.trajectories import Message
from intentkv_training.model import Reading

Label = Literal["published", "mass", "energy", "value_energy"]
LABELS: tuple[Label, ...] = ("published", "mass", "energy", "value_energy")


@dataclass(frozen=True)
class FutureAttention:
    """What later queries do to the first ``n`` positions, summed over layers and heads, averaged over queries: [n] float32 each."""

    mass: torch.Tensor
    energy: torch.Tensor
    """alpha squared."""
    value_energy: torch.Tensor
    """alpha squared times the squared norm of the value."""


def future_attention(reading: Reading, n: int, positions: Sequence[int]) -> FutureAttention:
    """Attention of the queries at ``positions`` (at least one, all from ``n`` on) over what they see; its first ``n`` are returned."""
    device = reading.device
    totals = torch.zeros(3, n, device=device)
    at = torch.tensor(positions, dtype=torch.int64, device=device)
    everything = torch.arange(int(at.max()) + 1, device=device)
    for layer in reading.layers:
        keys = reading.all_keys[layer][: everything.shape[0]]
        norms = reading.all_values[layer][:n].float().square().sum(-1).transpose(0, 1)
        norms = norms.repeat_interleave(reading.queries[layer].shape[1] // norms.shape[0], 0)
        for alpha in attention_probabilities(reading.queries[layer][at], keys, reading.scaling, at, everything, reading.query_block):
            seen = alpha[:, :, :n]
            energy = seen.square().sum(1)
            totals += torch.stack([seen.sum((0, 1)), energy.sum(0), (energy * norms).sum(0)])
    totals /= len(positions)
    return FutureAttention(*totals)


def future_queries(answers: Sequence[Span], limit: int) -> list[int]:
    """Positions of the assistant's tokens in ``answers``, evenly sampled down to ``limit``."""
    positions = [p for span in answers for p in range(span.start, span.end)]
    return positions[:: max(1, -(-len(positions) // limit))]


# ---- The published label ----

_SHORTEST = 4
"""Characters below which a word of an argument says nothing (ours; the paper does not say)."""


def argument_texts(messages: Sequence[Message], calls: int) -> list[str]:
    """Texts in the arguments of the first ``calls`` tool calls of ``messages``: whole values and their words."""
    found: dict[str, None] = {}
    values = [call.arguments for message in messages for call in message.tool_calls][:calls]
    for value in values:
        for text in _leaves(value):
            for piece in (text, *text.split()):
                if len(piece.strip()) >= _SHORTEST:
                    found[piece.strip()] = None
    return list(found)


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif value is not None and not isinstance(value, bool):
        yield str(value)


def matched_tokens(pieces: Sequence[str], wanted: Sequence[str]) -> torch.Tensor:
    """Tokens that lie in an occurrence of a wanted text: [n] bool. ``pieces``: the text of each token, in order."""
    text = "".join(pieces)
    ends = list(accumulate(len(piece) for piece in pieces))
    starts = [end - len(piece) for end, piece in zip(ends, pieces, strict=True)]
    hit = torch.zeros(len(pieces), dtype=torch.bool)
    for sought in wanted:
        at = text.find(sought)
        while at >= 0:
            hit[bisect_right(ends, at) : bisect_left(starts, at + len(sought))] = True
            at = text.find(sought, at + 1)
    return hit
