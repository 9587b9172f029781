"""Two ranks, each with half of the heads, evict what one rank with all of them does (architecture D10)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from intentkv_eval.server import running_server

from .conftest import _COMMON
from .harness import POOL, Chat, Client


@pytest.fixture
def two_ranks(alarms: None, tiny_model: Path, logs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    # SGLang asks for a core list a rank on machines with one NUMA node.
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    arguments = ["--model", str(tiny_model), *_COMMON, "--max-total-tokens", str(POOL), "--tp-size", "2"]
    with running_server(arguments, logs / "two_ranks.log") as server:
        client = Client(server)
        yield client
        client.check_idle()


def test_two_ranks_evict_what_one_does(served: Client, two_ranks: Client, new_chat: Callable[[], Chat]) -> None:
    """Catches: a rank that selects by its own heads' scores, ranks that free different slots, an iteration's difference between them
    (the leak checks and INTENTKV_DEBUG of each rank end the server)."""
    for method in ("intentkv", "assistant", "random"):
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
