"""Two ranks, each with half of the heads, evict what one rank with all of them does (architecture D10)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from intentkv_eval.server import running_server

from .conftest import _COMMON
from .harness import DECODE_INTERVAL, POOL, Chat, Client


@pytest.fixture
def start_two_ranks(
    alarms: None, tiny_model: Path, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., AbstractContextManager[Client]]:
    # SGLang asks for a core list a rank on machines with one NUMA node.
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")

    @contextmanager
    def start(name: str, *more: str) -> Iterator[Client]:
        arguments = ["--model", str(tiny_model), *_COMMON, "--max-total-tokens", str(POOL), "--tp-size", "2", *more]
        with running_server(arguments, logs / f"{name}.log") as server:
            client = Client(server)
            yield client
            client.check_idle()

    return start


@pytest.fixture
def two_ranks(start_two_ranks: Callable[..., AbstractContextManager[Client]]) -> Iterator[Client]:
    with start_two_ranks("two_ranks") as client:
        yield client


@pytest.fixture
def two_ranks_with_head(start_two_ranks: Callable[..., AbstractContextManager[Client]], head: Path) -> Iterator[Client]:
    with start_two_ranks("two_ranks_with_head", "--head", str(head)) as client:
        yield client


def test_two_ranks_evict_what_one_does(served: Client, two_ranks: Client, new_chat: Callable[[], Chat]) -> None:
    """Catches: a rank that selects by its own heads' scores, ranks that free different slots, an iteration's difference between them
    (the leak checks and INTENTKV_DEBUG of each rank end the server)."""
    for method in ("intentkv", "assistant", "random", "snapkv"):
        options = {"method": method, "budget": 150, "hysteresis": 0}
        chat = new_chat().say("system", 10).say("user", 40)
        for turn in range(3):
            prompt = chat.say("tool", 60).ask()
            answers = [server.generate(prompt, 12, options, session_id=method) for server in (served, two_ranks)]
            assert answers[0].output_ids == answers[1].output_ids, (method, turn)
            chat.answered(answers[0].output_ids)
        dead = [server.dead(method) for server in (served, two_ranks)]
        assert dead[0] == dead[1], method
        assert len(dead[0]) > 50, "too little was evicted to tell"


def test_two_ranks_with_a_head(learned: Client, two_ranks_with_head: Client, new_chat: Callable[[], Chat]) -> None:
    """Behind prompts and, in the last turn, in mid-generation, where the head's rule scores. One session changes its method.

    Catches: a head that sees a rank's own heads, a session's memory that is one rank's at one turn and all ranks' at the next, ranks that
    wait for each other for ever.
    """
    for methods in (["assistant-learned"] * 3, ["assistant-learned", "assistant", "assistant"]):
        chat = new_chat().say("system", 10).say("user", 40)
        for method, size in zip(methods, (12, 12, 2 * DECODE_INTERVAL + 8), strict=True):
            prompt = chat.say("tool", 60).ask()
            options = {"method": method, "budget": 150, "hysteresis": 0}
            answers = [server.generate(prompt, size, options, session_id=str(methods)) for server in (learned, two_ranks_with_head)]
            assert answers[0].output_ids == answers[1].output_ids
            chat.answered(answers[0].output_ids)
        dead = [server.dead(str(methods)) for server in (learned, two_ranks_with_head)]
        assert dead[0] == dead[1], methods
        assert any(position >= len(prompt) for position in dead[0]), "nothing of the running generation was evicted"
