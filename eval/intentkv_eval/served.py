"""Turns of real clients, from the logs that ``intentkv record`` and ``intentkv serve --record`` write.

A trajectory is a client's ``session_id``. Without one it is a chain of requests, each of which begins with the whole prompt of the one
before. What a log does not hold, its turns do not have.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from intentkv.recording import RequestRecord
from intentkv.trajectories import Broken, Message, ToolCall, ids_digest, prefix_digests, request_records
from intentkv_eval.overhead import count_calls
from intentkv_eval.turns import TurnRecord, arm_name, measured

SOURCE = "serve"
"""Source of every such turn."""
UNNAMED = "served"
"""Arm of a log that does not say which method served."""


class Served(NamedTuple):
    turns: list[TurnRecord]
    """In the order in which they finished; all of one method and limit have one arm."""
    broken: list[str]
    """``file:line: reason`` of what could not be read."""


class _Figures(BaseModel):
    """What a record must hold to be a finished turn."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    logical_tokens: int
    live_tokens: int
    dead_tokens: int
    live_cached_tokens: int
    peak_live_tokens: int
    pruned_tokens: int
    forced_tokens: int
    target_tokens: int
    ttft: float | None = None
    e2e_latency: float | None = None


class _Conversations:
    """Which conversation a request without a session goes on with."""

    def __init__(self) -> None:
        self._ends: dict[bytes, list[str]] = {}
        """Conversations by the prompt of their latest request; those of one prompt in the order they came."""
        self._lengths: Counter[int] = Counter()
        """Of these prompts."""

    def of(self, ids: list[int], request: str) -> str:
        """The conversation with the longest prompt that ``ids`` begins with and is longer than; else a new one, called ``request``."""
        name = request
        for digest, length in reversed([*zip(prefix_digests(ids, self._lengths), sorted(self._lengths), strict=False)]):
            if length < len(ids) and digest in self._ends:
                name = self._take(digest, length)
                break
        self._ends.setdefault(ids_digest(ids), []).append(name)
        self._lengths[len(ids)] += 1
        return name

    def _take(self, digest: bytes, length: int) -> str:
        waiting = self._ends[digest]
        name = waiting.pop(0)
        if not waiting:
            del self._ends[digest]
        self._lengths[length] -= 1
        if not self._lengths[length]:
            del self._lengths[length]
        return name


def read_served(files: Iterable[Path]) -> Served:
    """The turns of request logs, which are read as one sequence; of each request only its figures are kept in memory.

    Raises:
        ConfigError: a file cannot be read.
    """
    conversations = _Conversations()
    numbers: Counter[str] = Counter()
    calls: dict[str, list[tuple[int, Message]]] = {}
    turns: list[TurnRecord] = []
    broken: list[str] = []
    for _, record in request_records(files):
        if isinstance(record, Broken):
            broken.append(str(record))
            continue
        trajectory = record.session or conversations.of(record.input_ids, record.id)
        turn = _turn(record, trajectory, numbers[trajectory])
        numbers[trajectory] += 1
        if len(record.output_ids) >= turn.generated:  # a stream in increments is logged with its last piece only: its calls are not known
            message = Message(role="assistant", tool_calls=tuple(_call(call) for call in record.tool_calls))
            calls.setdefault(trajectory, []).append((len(turns), message))
        turns.append(turn)
    for made in calls.values():
        _count_calls(turns, made)
    return Served(turns, broken)


def _turn(record: RequestRecord, trajectory: str, number: int) -> TurnRecord:
    turn = TurnRecord(
        trajectory=trajectory,
        source=SOURCE,
        turn=number,
        arm=arm_name(record.method, record.budget, record.budget_ratio) if record.method else UNNAMED,
        status="aborted",
        prompt_tokens=len(record.input_ids),
    )
    if record.finish == "abort":
        return turn
    try:
        figures = _Figures.model_validate(record.figures)
    except ValidationError:
        return turn.model_copy(update={"status": "no figures in the log"})
    return measured(
        turn,
        figures.prompt_tokens,
        figures.cached_tokens,
        figures.completion_tokens,
        figures.model_dump(),
        figures.ttft,
        figures.e2e_latency,
    )


def _call(call: dict[str, Any]) -> ToolCall:
    arguments = call.get("arguments")
    return ToolCall(name=str(call.get("name")), arguments=arguments if isinstance(arguments, (dict, str)) else json.dumps(arguments))


def _count_calls(turns: list[TurnRecord], made: Sequence[tuple[int, Message]]) -> None:
    """Enter the tool calls of one trajectory into its turns, whose places in ``turns`` come with them."""
    for (place, _), counts in zip(made, count_calls(message for _, message in made), strict=True):
        update = {"tool_calls": counts.calls, "duplicate_calls": counts.duplicates, "near_duplicate_calls": counts.near_duplicates}
        turns[place] = turns[place].model_copy(update=update)
