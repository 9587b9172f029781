"""A small model, made-up agents and examples made from them; once a session."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

WORDS = ["open", "close", "file", "search", "result", "error", "total", "price", "city", "name", "value", "list", "status", "ready"]


def write_agents(file: Path, count: int, turns: int = 4, size: int = 60) -> Path:
    """Agents that call a tool and read what it returns; every third run repeats a task, so groups have several runs."""
    draw = random.Random(5)
    with file.open("w") as out:
        for number in range(count):
            messages = [{"role": "system", "content": "You are an agent with a shell."}, {"role": "user", "content": words(draw, 12)}]
            for turn in range(turns):
                # what the result before the newest said: history, not the current query
                key = f"ticket{number}x{turn - 1}" if turn > 1 else "start"
                call = {"name": "lookup", "arguments": {"key": key, "page": turn}}
                messages.append({"role": "assistant", "content": words(draw, 8), "tool_calls": [call]})
                messages.append({"role": "tool", "content": f"{words(draw, size)} ticket{number}x{turn + 1} {words(draw, size // 3)}"})
            messages.append({"role": "assistant", "content": words(draw, 10)})
            line = {"id": f"run{number}", "source": "made-up", "messages": messages, "meta": {"group": f"task{number // 3}"}}
            out.write(json.dumps(line) + "\n")
    return file


def words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(count))


@pytest.fixture(scope="session")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_agents(tmp_path_factory.mktemp("agents") / "agents.jsonl", 12)


@pytest.fixture(scope="session")
def frozen(tiny_model: Path):
    """The tiny model (two layers, random, attention spread wide)."""
    from intentkv_training.model import FrozenModel

    return FrozenModel(tiny_model, "cpu")


# The seed is one that leaves no split empty.
OPTIONS = {"min_history": 20, "per_piece": 2, "max_tokens": 1000, "validation": 0.25, "test": 0.25, "seed": 13}


@pytest.fixture(scope="session")
def example_folder(frozen, agents: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from intentkv_training.examples import build_examples, example_settings

    out = tmp_path_factory.mktemp("examples") / "examples"
    build_examples([agents], out, frozen, example_settings(frozen, [agents], **OPTIONS), shard_bytes=60_000)
    return out
