"""Logs of what a server saw: one record a request, in JSONL shards that are rotated and bounded.

A record holds messages, token ids, tool calls and figures, and nothing of the HTTP request itself: no header, key or address.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA: Final = "intentkv-log/1"
_SHARD = re.compile(r"requests-(\d{6})\.jsonl")


class RequestRecord(BaseModel):
    """One finished request."""

    model_config = ConfigDict(extra="ignore")

    schema_version: Literal["intentkv-log/1"] = SCHEMA
    id: str
    """The server's request id."""
    session: str | None = None
    """The client's ``session_id``."""
    finished: float = 0.0
    """Unix time, seconds."""
    model: str = ""
    method: str = ""
    """What decided which of its tokens stayed; empty in logs that do not say."""
    budget: int | None = None
    budget_ratio: float | None = None
    """The method's limit: tokens, or a share of the history."""
    finish: str = ""
    """Why it ended: ``stop``, ``length`` or ``abort``; empty in logs that do not say."""
    messages: list[dict[str, Any]] = Field(default_factory=list)
    """Of a chat request, as the client sent them; empty for ``/generate``."""
    tools: list[dict[str, Any]] = Field(default_factory=list)
    input_ids: list[int]
    output_ids: list[int]
    output_text: str = ""
    tool_calls: list[dict[str, Any]] = Field(default_factory=list)
    """``{"name", "arguments"}`` of each call in ``output_text``."""
    figures: dict[str, Any] = Field(default_factory=dict)
    """What the turn cost: prompt, cached, completion, logical, live, dead and pruned tokens; ``ttft`` (arrival to the end of the prefill)
    and ``e2e_latency``, both in seconds and measured in the server."""


def shards(folder: Path) -> list[Path]:
    """The log files of a folder, oldest first.

    Raises:
        OSError: it cannot be read.
    """
    return sorted(p for p in folder.iterdir() if _SHARD.fullmatch(p.name))


class ShardWriter:
    """Appends lines to ``requests-000000.jsonl`` and so on in a folder of its own, readable by its owner only.

    A full shard is closed and the next one begun; beyond the limit of all shards together the oldest are deleted.
    """

    def __init__(self, folder: Path, limit_bytes: int, shard_bytes: int) -> None:
        """Raises:
        OSError: the folder cannot be made.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._limit = limit_bytes
        self._shard_bytes = min(shard_bytes, limit_bytes)
        earlier = shards(folder)
        # Never appended to an earlier run's shard: its last line may be cut short.
        self._number = _number(earlier[-1]) + 1 if earlier else 0
        self._size = 0

    def write(self, line: bytes) -> None:
        """Append one line (without its newline).

        Raises:
            OSError: the disk is full or the folder is gone.
        """
        if self._size and self._size + len(line) + 1 > self._shard_bytes:
            self._number += 1
            self._size = 0
        self._trim(len(line) + 1)
        descriptor = os.open(self._folder / f"requests-{self._number:06d}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "ab") as file:
            file.write(line + b"\n")
        self._size += len(line) + 1

    def _trim(self, coming: int) -> None:
        there = shards(self._folder)
        sizes = [p.stat().st_size for p in there]
        total = sum(sizes) + coming
        for shard, size in zip(there, sizes, strict=True):
            if total <= self._limit or _number(shard) == self._number:
                return
            shard.unlink()
            total -= size


def _number(shard: Path) -> int:
    match = _SHARD.fullmatch(shard.name)
    return int(match.group(1)) if match else -1
