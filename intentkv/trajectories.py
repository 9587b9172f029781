"""Recorded agents, read from five formats into one model.

* the project's trajectory logs, one JSON object a line with ``messages`` (``arguments`` of a tool call is an object);
* OpenAI-style message logs, likewise (``function.arguments`` is JSON text, ``content`` may be a list of parts);
* our own request logs (:mod:`intentkv.recording`): of each conversation the longest request, with the token ids the server saw;
* mini-SWE-agent's ``.traj.json`` and the Agent Trajectory Interchange Format (ATIF): one JSON document a file.

A file is recognised by its content. A line that cannot be read is reported as ``file:line: reason``, and reading goes on.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator

from intentkv.config import ConfigError
from intentkv.recording import SCHEMA as LOG_SCHEMA
from intentkv.recording import RequestRecord

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
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    token_ids: tuple[int, ...] = ()
    """The whole conversation as the server saw it, where the log has it; else it is rendered from ``messages``."""

    @field_validator("tools", mode="before")
    @classmethod
    def _none(cls, value: Any) -> Any:
        return () if value is None else value

    @model_validator(mode="after")
    def _something(self) -> Trajectory:
        if not self.messages and not self.token_ids:
            raise ValueError("neither messages nor token ids")
        return self


class Broken(NamedTuple):
    """Something that could not be read."""

    where: str
    """``file:line``."""
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


class Dataset(NamedTuple):
    trajectories: list[Trajectory]
    broken: list[str]
    """One ``file:line: reason`` a line that could not be read."""
    sha256: str
    """Of the files' bytes, in the order given."""


def load_dataset(files: Iterable[Path], limit: int | None = None) -> Dataset:
    """Read whole files into memory; a broken line is reported and reading goes on.

    Args:
        limit: stop after this many good trajectories.

    Raises:
        ConfigError: a file cannot be read, or no line of any file could.
    """
    files = list(files)
    trajectories: list[Trajectory] = []
    broken: list[str] = []
    for item in read_trajectories(files):
        if isinstance(item, Broken):
            broken.append(str(item))
        elif not item.messages:
            broken.append(f"{item.id}: the log holds its token ids only, no messages")
        elif limit is None or len(trajectories) < limit:
            trajectories.append(item)
    if not trajectories:
        raise ConfigError(f"No trajectory could be read; {broken[0] if broken else 'the input is empty'}.")
    return Dataset(trajectories, broken, sha256_of(files))


def sha256_of(files: Iterable[Path]) -> str:
    """Of the files' bytes, one after the other.

    Raises:
        ConfigError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for file in files:
        with _opened(file) as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def read_trajectories(files: Iterable[Path]) -> Iterator[Trajectory | Broken]:
    """The trajectories of ``files`` in order, one at a time: memory does not grow with the logs.

    Ids that occur again get a suffix, ``#2`` and so on. Request logs are one sequence over all files that hold them, read last.

    Raises:
        ConfigError: a file cannot be read.
    """
    runs: Counter[str] = Counter()
    logs = []
    for file in files:
        if is_request_log(file):
            logs.append(file)
            continue
        for item in _read_file(file):
            yield _numbered(item, runs)
    for item in _read_request_logs(logs):
        yield _numbered(item, runs)


def _numbered(item: Trajectory | Broken, runs: Counter[str]) -> Trajectory | Broken:
    if isinstance(item, Broken):
        return item
    # logs of several trials may reuse an id; results are told apart by it
    runs[item.id] += 1
    return item if runs[item.id] == 1 else item.model_copy(update={"id": f"{item.id}#{runs[item.id]}"})


def _opened(file: Path) -> BinaryIO:
    try:
        return file.open("rb")
    except OSError as error:
        raise ConfigError(f"Cannot read {str(file)!r}: {error.strerror}; give a file of trajectories.") from error


def _read_file(file: Path) -> Iterator[Trajectory | Broken]:
    if file.suffix == ".json":
        yield from _parsed(file, 1, _opened(file).read())
        return
    with _opened(file) as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield from _parsed(file, number, line)


def _parsed(file: Path, number: int, text: bytes) -> Iterator[Trajectory | Broken]:
    where = f"{file}:{number}"
    try:
        yield _parse(json.loads(text), file, number)
    except ValidationError as error:
        yield Broken(where, _reason(error))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:  # not JSON, not UTF-8, or no trajectory at all
        yield Broken(f"{file}:{error.lineno}" if isinstance(error, json.JSONDecodeError) and number == 1 else where, str(error))


def _reason(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'trajectory'}: {first['msg'].removeprefix('Value error, ')}"


def _parse(record: Any, file: Path, number: int) -> Trajectory:
    stem = file.name.removesuffix(".json").removesuffix(".jsonl").removesuffix(".traj")
    if isinstance(record, dict) and str(record.get("schema_version", "")).startswith("ATIF-"):
        return _from_atif(record, stem)
    if not isinstance(record, dict) or "messages" not in record:
        raise ValueError("no top-level 'messages'")
    if str(record.get("trajectory_format", "")).startswith("mini-swe-agent"):
        return _from_mini_swe(record, stem)
    meta = record.get("meta")
    group = meta.get("group") if isinstance(meta, dict) else None
    identity = str(record.get("id") or f"{stem}:{number}")
    messages = record["messages"]
    if messages == [] or messages is None:
        raise ValueError("messages: empty")
    return Trajectory(
        id=identity,
        source=str(record.get("source") or stem),
        group=str(group or record.get("group") or identity),
        messages=messages,
        tools=record.get("tools", ()),
    )


def _from_mini_swe(record: dict[str, Any], stem: str) -> Trajectory:
    """One run: chat messages, and a closing one of role ``exit`` that the model never saw."""
    messages = [m for m in record["messages"] if not (isinstance(m, dict) and m.get("role") == "exit")]
    identity = str(record.get("instance_id") or stem)
    return Trajectory.model_validate({"id": identity, "source": "mini-swe-agent", "group": identity, "messages": messages})


def _from_atif(record: dict[str, Any], stem: str) -> Trajectory:
    """One run: steps by system, user or agent; an agent's step carries its tool calls and what they returned."""
    steps = record.get("steps")
    if not isinstance(steps, list):
        raise ValueError("no list of 'steps'")
    agent = record.get("agent") or {}
    identity = str(record.get("trajectory_id") or record.get("session_id") or stem)
    messages = [message for number, step in enumerate(steps, 1) for message in _atif_step(step, number)]
    tools = agent.get("tool_definitions") if isinstance(agent, dict) else None
    source = f"atif:{agent.get('name', 'unknown') if isinstance(agent, dict) else 'unknown'}"
    return Trajectory.model_validate({"id": identity, "source": source, "group": identity, "messages": messages, "tools": tools})


def _atif_step(step: Any, number: int) -> Iterator[dict[str, Any]]:
    roles = {"system": "system", "user": "user", "agent": "assistant"}
    if not isinstance(step, dict) or step.get("source") not in roles:
        raise ValueError(f"step {number}: 'source' must be system, user or agent")
    calls = [{"name": c.get("function_name"), "arguments": c.get("arguments") or {}} for c in step.get("tool_calls") or []]
    yield {"role": roles[step["source"]], "content": step.get("message"), "tool_calls": calls}
    for result in (step.get("observation") or {}).get("results") or []:
        yield {"role": "tool" if calls else "user", "content": result.get("content")}


# ---- Our own request logs ----


def is_request_log(file: Path) -> bool:
    """Whether ``intentkv record`` wrote it.

    Raises:
        ConfigError: it cannot be read.
    """
    with _opened(file) as stream:
        return LOG_SCHEMA.encode() in stream.readline(256)


class Place(NamedTuple):
    """Of a line; ``offset`` in bytes."""

    file: Path
    number: int
    offset: int


def _read_request_logs(files: list[Path]) -> Iterator[Trajectory | Broken]:
    """Of each conversation its longest request and what was generated: the requests before it are its prefixes.

    Two passes. The first keeps a digest and a file position for each conversation, not its text.
    """
    ends: dict[bytes, Place] = {}
    lengths: set[int] = set()
    for place, parsed in request_records(files):
        if isinstance(parsed, Broken):
            yield parsed
            continue
        for digest in prefix_digests(parsed.input_ids, lengths):
            ends.pop(digest, None)
        whole = ids_digest(parsed.input_ids)
        ends[whole] = place
        lengths.add(len(parsed.input_ids))
    for place in ends.values():
        with _opened(place.file) as stream:
            stream.seek(place.offset)
            yield _from_record(RequestRecord.model_validate_json(stream.readline()))


def request_records(files: Iterable[Path]) -> Iterator[tuple[Place, RequestRecord | Broken]]:
    """The lines of request logs, in order.

    Raises:
        ConfigError: a file cannot be read.
    """
    for file in files:
        offset = 0
        with _opened(file) as stream:
            for number, line in enumerate(stream, 1):
                place, offset = Place(file, number, offset), offset + len(line)
                if not line.strip():
                    continue
                try:
                    yield place, RequestRecord.model_validate_json(line)
                except ValidationError as error:
                    yield place, Broken(f"{file}:{number}", _reason(error))


def ids_digest(ids: list[int]) -> bytes:
    """What tells one sequence of token ids from another: 16 bytes."""
    return hashlib.blake2b(array("q", ids).tobytes(), digest_size=16).digest()


def prefix_digests(ids: list[int], lengths: Iterable[int]) -> Iterator[bytes]:
    """Digests of the prefixes of ``ids`` with the given lengths, shortest first, in one pass over it; lengths beyond it are left out."""
    data, state, at = array("q", ids).tobytes(), hashlib.blake2b(digest_size=16), 0
    for length in sorted(n for n in lengths if n <= len(ids)):
        state.update(data[8 * at : 8 * length])
        at = length
        yield state.digest()


def _from_record(record: RequestRecord) -> Trajectory:
    messages = [m for m in record.messages if m.get("role") in {*get_args(Role), *_ROLES}]
    if record.output_text or record.tool_calls:
        messages.append({"role": "assistant", "content": record.output_text})
    identity = record.session or record.id
    return Trajectory.model_validate(
        {
            "id": identity,
            "source": "intentkv-log",
            "group": identity,
            "messages": messages if record.messages else (),
            "tools": record.tools,
            "token_ids": (*record.input_ids, *record.output_ids),
        }
    )
