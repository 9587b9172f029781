"""Recorded agents: readers of JSONL files with one trajectory a line.

Two dialects are read into one model: the project's trajectory logs (``arguments`` of a tool call is an object) and OpenAI-style message
logs (``function.arguments`` is JSON text, ``content`` may be a list of parts). Both have a top-level ``messages``.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from intentkv.config import ConfigError

Role = Literal["system", "user", "assistant", "tool"]

_ROLES = {"developer": "system", "function": "tool"}
"""Older and newer names of the same roles."""


class ToolCall(BaseModel):
    model_config = ConfigDict(frozen=True)

    name: str
    arguments: dict[str, Any] | str
    """Text where the recorded arguments are not a JSON object."""

    @model_validator(mode="before")
    @classmethod
    def _openai(cls, value: Any) -> Any:
        return value["function"] if isinstance(value, dict) and isinstance(value.get("function"), dict) else value

    @field_validator("arguments", mode="before")
    @classmethod
    def _object(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            parsed = json.loads(value)
        except ValueError:
            return value
        return parsed if isinstance(parsed, dict) else value


class Message(BaseModel):
    model_config = ConfigDict(frozen=True)

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @field_validator("role", mode="before")
    @classmethod
    def _same_role(cls, value: Any) -> Any:
        return _ROLES.get(value, value) if isinstance(value, str) else value

    @field_validator("content", mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        if value is None:
            return ""
        if isinstance(value, list):
            if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
                raise ValueError("only text parts can be replayed")
            return "".join(part["text"] for part in value)
        return value

    @field_validator("tool_calls", mode="before")
    @classmethod
    def _none(cls, value: Any) -> Any:
        return () if value is None else value


class Trajectory(BaseModel):
    """One recorded run of an agent."""

    model_config = ConfigDict(frozen=True)

    id: str
    source: str
    group: str
    """Split key: runs of one task share it."""
    messages: tuple[Message, ...] = Field(min_length=1)
    tools: tuple[dict[str, Any], ...] = ()

    @field_validator("tools", mode="before")
    @classmethod
    def _none(cls, value: Any) -> Any:
        return () if value is None else value


class Dataset(NamedTuple):
    trajectories: list[Trajectory]
    broken: list[str]
    """One ``file:line: reason`` a line that could not be read."""
    sha256: str
    """Of the files' bytes, in the order given."""


def load_dataset(files: Iterable[Path], limit: int | None = None) -> Dataset:
    """Read JSONL files; a broken line is reported and reading goes on.

    Args:
        limit: stop after this many good trajectories.

    Raises:
        ConfigError: a file cannot be read, or no line of any file could.
    """
    trajectories: list[Trajectory] = []
    runs: Counter[str] = Counter()
    broken: list[str] = []
    digest = hashlib.sha256()
    for file in files:
        try:
            data = file.read_bytes()
        except OSError as error:
            raise ConfigError(f"Cannot read {str(file)!r}: {error.strerror}; give a JSONL file of trajectories.") from error
        digest.update(data)
        for item in _read_lines(file, data):
            if isinstance(item, str):
                broken.append(item)
            elif limit is None or len(trajectories) < limit:
                runs[item.id] += 1
                again = runs[item.id] > 1  # logs of several trials may reuse an id; results are told apart by it
                trajectories.append(item.model_copy(update={"id": f"{item.id}#{runs[item.id]}"}) if again else item)
    if not trajectories:
        raise ConfigError(f"No trajectory could be read; {broken[0] if broken else 'the input is empty'}.")
    return Dataset(trajectories, broken, digest.hexdigest())


def _read_lines(file: Path, data: bytes) -> Iterator[Trajectory | str]:
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            yield _parse(json.loads(line), file.stem, number)
        except ValidationError as error:
            first = error.errors()[0]
            yield f"{file}:{number}: {'.'.join(map(str, first['loc'])) or 'trajectory'}: {first['msg'].removeprefix('Value error, ')}"
        except ValueError as error:  # not JSON, not UTF-8, or no trajectory at all
            yield f"{file}:{number}: {error}"


def _parse(record: Any, stem: str, number: int) -> Trajectory:
    if not isinstance(record, dict) or "messages" not in record:
        raise ValueError("no top-level 'messages'")
    meta = record.get("meta")
    group = meta.get("group") if isinstance(meta, dict) else None
    identity = str(record.get("id") or f"{stem}:{number}")
    return Trajectory(
        id=identity,
        source=str(record.get("source") or stem),
        group=str(group or record.get("group") or identity),
        messages=record["messages"],
        tools=record.get("tools", ()),
    )
