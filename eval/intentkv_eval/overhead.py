"""What an agent does more than once: its tool calls, and how many of them repeat an earlier one of the same trajectory."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from intentkv.trajectories import Message, ToolCall

EMBEDDER = "character-trigram counts"
"""Of a call's name and arguments; what near duplicates are near in."""

NEAR = 0.9
"""Cosine above which a call counts as a near duplicate of an earlier one."""

_CHARACTERS = 1000
"""Of a call that are looked at: whole files are passed as arguments, and every pair of calls is compared."""


class CallCounts(NamedTuple):
    """Tool calls of one turn."""

    calls: int
    duplicates: int
    """Same name and arguments as an earlier call of the trajectory."""
    near_duplicates: int
    """Cosine to an earlier call above :data:`NEAR`, exact duplicates included."""


def _text(call: ToolCall) -> str:
    arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments, sort_keys=True, ensure_ascii=False)
    return f"{call.name} {arguments}"


def _unit(text: str) -> dict[str, float]:
    """Trigram counts scaled to length 1."""
    counts = Counter(text[i : i + 3] for i in range(min(len(text), _CHARACTERS)))
    norm = math.sqrt(sum(count * count for count in counts.values()))
    return {gram: count / norm for gram, count in counts.items()}


def _cosine(a: dict[str, float], b: dict[str, float]) -> float:
    small, large = sorted((a, b), key=len)
    return sum(value * large.get(gram, 0.0) for gram, value in small.items())


def count_calls(messages: Iterable[Message]) -> list[CallCounts]:
    """Counts of each message in turn, compared with all calls before it."""
    seen: set[str] = set()
    vectors: list[dict[str, float]] = []
    result = []
    for message in messages:
        duplicates = near = 0
        for call in message.tool_calls:
            text = _text(call)
            vector = _unit(text)
            exact = text in seen
            duplicates += exact
            near += exact or any(_cosine(vector, other) > NEAR for other in vectors)
            if not exact:
                seen.add(text)
                vectors.append(vector)
        result.append(CallCounts(len(message.tool_calls), duplicates, near))
    return result
