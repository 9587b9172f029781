"""Readers of recorded agents."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from intentkv.config import ConfigError
from intentkv.trajectories import load_dataset

pytestmark = pytest.mark.unit

NATIVE = {
    "id": "a-1",
    "source": "shop",
    "license": "MIT",
    "task": "buy",
    "tools": [{"type": "function", "function": {"name": "find", "parameters": {}}}],
    "messages": [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "name": "find", "arguments": {"q": "x"}}]},
        {"role": "tool", "content": "found", "tool_call_id": "1", "name": "find"},
    ],
    "meta": {"group": "buy-x", "style": "native"},
}
OPENAI = {
    "messages": [
        {"role": "developer", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "U1"}, {"type": "text", "text": "U2"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": {"name": "find", "arguments": '{"q": "x"}'}}],
        },
        {"role": "function", "content": "found", "name": "find"},
        {
            "role": "assistant",
            "content": "bad call",
            "tool_calls": [{"type": "function", "function": {"name": "find", "arguments": '{"q": '}}],
        },
    ]
}


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_both_dialects_become_the_same_model(tmp_path: Path) -> None:
    """Catches a reader that loses the tool calls, the roles or the split key of one dialect."""
    file = write(tmp_path / "log.jsonl", NATIVE, "", OPENAI)
    native, openai = load_dataset([file]).trajectories
    assert (native.id, native.source, native.group) == ("a-1", "shop", "buy-x")
    assert native.tools == tuple(NATIVE["tools"])
    assert (openai.id, openai.source, openai.group) == ("log:3", "log", "log:3")
    assert [m.role for m in native.messages] == ["system", "user", "assistant", "tool"]
    assert [m.role for m in openai.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert [m.content for m in openai.messages] == ["S", "U1U2", "", "found", "bad call"]
    for trajectory in (native, openai):
        (call,) = trajectory.messages[2].tool_calls
        assert (call.name, call.arguments) == ("find", {"q": "x"})
    assert openai.messages[4].tool_calls[0].arguments == '{"q": '  # as recorded: agents do write broken JSON


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"messages": [', "Expecting value"),
        ('["a"]', "messages"),
        ('{"id": "x"}', "messages"),
        ('{"messages": []}', "messages"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "messages.0.role"),
        ('{"messages": [{"role": "user", "content": 3}]}', "messages.0.content"),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "only text"),
        ('{"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}', "messages.0.tool_calls"),
        ('{"messages": [{"role": "user", "content": "caf\\u00e9"}], "tools": "find"}', "tools"),
    ],
)
def test_broken_line_is_named_and_reading_goes_on(tmp_path: Path, line: str, reason: str) -> None:
    """Catches a reader that stops at, or silently drops, a broken line."""
    file = write(tmp_path / "log.jsonl", NATIVE, line, OPENAI)
    dataset = load_dataset([file])
    assert [t.id for t in dataset.trajectories] == ["a-1", "log:3"]
    (broken,) = dataset.broken
    assert broken.startswith(f"{file}:2: ")
    assert reason in broken
    assert "\n" not in broken


def test_bytes_that_are_not_utf8_break_one_line_only(tmp_path: Path) -> None:
    """Catches decoding the file as a whole, where one bad byte loses every trajectory."""
    file = tmp_path / "log.jsonl"
    file.write_bytes(b'{"messages": [{"role": "user", "content": "\xff"}]}\n' + json.dumps(NATIVE).encode() + b"\n")
    dataset = load_dataset([file])
    assert [t.id for t in dataset.trajectories] == ["a-1"]
    assert dataset.broken[0].startswith(f"{file}:1: ")


def test_hash_limit_and_repeated_ids_over_files(tmp_path: Path) -> None:
    """Catches a hash of less than all data, a limit per file, and two runs that results could not tell apart."""
    first, second = write(tmp_path / "a.jsonl", NATIVE, OPENAI), write(tmp_path / "b.jsonl", NATIVE, NATIVE)
    dataset = load_dataset([first, second], limit=3)
    assert [t.id for t in dataset.trajectories] == ["a-1", "a:2", "a-1#2"]
    assert dataset.sha256 == hashlib.sha256(first.read_bytes() + second.read_bytes()).hexdigest()


def test_unusable_input_is_one_sentence(tmp_path: Path) -> None:
    """Catches a traceback for a wrong path, and a run over nothing."""
    with pytest.raises(ConfigError, match="Cannot read"):
        load_dataset([tmp_path / "missing.jsonl"])
    with pytest.raises(ConfigError, match="No trajectory could be read"):
        load_dataset([write(tmp_path / "log.jsonl", "{")])
    with pytest.raises(ConfigError, match="empty"):
        load_dataset([write(tmp_path / "empty.jsonl")])
