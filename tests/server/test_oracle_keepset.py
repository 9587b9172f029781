"""The strongest test: each method evicts exactly the positions that its formula says, computed densely by transformers.

Catches queries taken from the wrong token, layer or lane, before RoPE or from a padded step; keys read from a freed slot or at a shifted
position; chunks counted twice; memories that are not decayed, not truncated or mixed up between sessions; a wrong forced keep.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .harness import Chat, Client
from .oracle import RULES, DenseModel, SessionOracle


@pytest.fixture(params=["whole prefills", "chunks of 128"])
def server(request: pytest.FixtureRequest) -> Client:
    name = "served" if request.param == "whole prefills" else "tight"
    client: Client = request.getfixturevalue(name)
    return client


def follow(server: Client, oracle: SessionOracle, chat: Chat, session: str, said: list[tuple[str, int]], new_tokens: int = 20) -> int:
    """Send one turn a message of ``said``, closed loop; returns how many positions died."""
    evicted = computed = 0
    for role, size in said:
        prompt = chat.say(role, size).ask()
        answer = server.generate(prompt, new_tokens, oracle.options, session_id=session)
        # The newest token of a turn may not have been fed back yet.
        assert answer.cached_tokens >= computed - 1, "the prefix was not reused"
        evicted += oracle.check_turn(chat, answer, server.dead(session))
        chat.answered(answer.output_ids)
        computed = len(prompt) + new_tokens
    return evicted


@pytest.mark.parametrize("method", RULES)
def test_generated_turns(server: Client, dense: DenseModel, new_chat: Callable[[], Chat], method: str) -> None:
    """A closed loop of five turns. Their queries come from decode, and later evictions meet what earlier ones left."""
    chat = new_chat().say("system", 20)
    oracle = SessionOracle(dense, method, budget=150)
    # The short result makes SnapKV's window reach into the history, where causality matters.
    evicted = follow(server, oracle, chat, f"generated-{method}", [("user", 60), ("tool", 130), ("tool", 8), ("user", 70), ("tool", 40)])
    assert evicted > 150


@pytest.mark.parametrize("method", RULES)
def test_recorded_turns(server: Client, dense: DenseModel, new_chat: Callable[[], Chat], method: str) -> None:
    """A client sends a conversation that was recorded elsewhere: assistant queries come from extend, of one turn that must be sampled."""
    chat = new_chat().say("system", 15).say("user", 50).say("assistant", 90).say("tool", 110).say("assistant", 12)
    evicted = follow(
        server, SessionOracle(dense, method, budget=120), chat, f"recorded-{method}", [("tool", 35), ("user", 25), ("tool", 60)]
    )
    assert evicted > 150


def test_no_system_prompt(server: Client, dense: DenseModel, new_chat: Callable[[], Chat]) -> None:
    """Without a system prefix nothing but the sinks holds the start."""
    oracle = SessionOracle(dense, "streamingllm", budget=80)
    assert follow(server, oracle, new_chat(), "sinks", [("user", 60), ("tool", 40), ("tool", 30)]) > 50


@pytest.mark.parametrize("method", ["assistant", "intentkv"])
def test_ratio_and_protected_spans(server: Client, dense: DenseModel, new_chat: Callable[[], Chat], method: str) -> None:
    """The request's own options: a share of the history to keep, and spans that never die."""
    oracle = SessionOracle(dense, method, ratio=0.3, protected=((40, 55), (100, 5000)))
    chat = new_chat().say("system", 20)
    assert follow(server, oracle, chat, f"ratio-{method}", [("user", 50), ("tool", 60), ("tool", 30)]) > 20
    assert not oracle.hidden_from.keys() & set(range(40, 55))
    assert max(oracle.hidden_from) < 100


@pytest.mark.parametrize("method", ["assistant", "intentkv"])
def test_rewritten_answer(server: Client, dense: DenseModel, new_chat: Callable[[], Chat], method: str) -> None:
    """A client re-tokenises the end of an answer: what the session remembers of the replaced positions is forgotten, and no more."""
    session = f"rewritten-{method}"
    chat = new_chat().say("system", 20)
    oracle = SessionOracle(dense, method, ratio=0.75)
    for role, size in [("user", 60), ("tool", 50), ("tool", 30)]:
        answer = server.generate(chat.say(role, size).ask(), 20, oracle.options, session_id=session)
        oracle.check_turn(chat, answer, server.dead(session))
        rewritten = answer.output_ids[:-12] + chat.words(10)
        chat.answered(rewritten)
    assert len(oracle.hidden_from) > 20
    computed = len(chat.ids) - 12
    answer = server.generate(chat.say("user", 10).ask(), 4, oracle.options, session_id=session)
    assert answer.cached_tokens == computed, "the prefix up to the rewritten part must hit"
