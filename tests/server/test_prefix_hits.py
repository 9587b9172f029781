"""The prefix cache keeps hitting while tokens die, and who shares a prefix is never harmed.

One test a row of the list of situations that broke others: reuse of generated tokens, divergence in a shared prefix, short prompts, sharing
sessions, forks, re-tokenised tails, identical prompts at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import pytest

from .harness import Answer, Chat, Client, at_once, generate_body
from .oracle import FIRST_STEP, DenseModel, SessionOracle, check_greedy

TURNS = [("user", 50), ("tool", 120), ("tool", 5), ("user", 60), ("tool", 200), ("user", 1)]
NEW_TOKENS = 16


def closed_loop(server: Client, chat: Chat, options: dict[str, Any] | None, cut: int = 0, **fields: Any) -> list[Answer]:
    """Answers of one session. The client replaces the last ``cut`` tokens of each before it sends them back."""
    answers = []
    for role, size in TURNS:
        answer = server.generate(chat.say(role, size).ask(), NEW_TOKENS, options, **fields)
        answers.append(answer)
        chat.answered(answer.output_ids[: NEW_TOKENS - cut] + chat.words(cut))
    return answers


@pytest.mark.parametrize("cut", [0, 5], ids=["generated tokens sent back", "re-tokenised tail"])
@pytest.mark.parametrize("session", ["hits", None], ids=["session id", "chain"])
@pytest.mark.parametrize("method", ["assistant", "intentkv", "random"])
def test_hits_equal_stock(served: Client, stock: Client, new_chat: Callable[[], Chat], method: str, session: str | None, cut: int) -> None:
    """Turn by turn the same prefix is found as on the stock server, although most of it is dead."""
    options = {"method": method, "budget": 120, "hysteresis": 0}
    reference = closed_loop(stock, new_chat().say("system", 20), None, cut)
    answers = closed_loop(served, new_chat().say("system", 20), options, cut, session_id=session)
    assert [a.meta["prompt_tokens"] for a in answers] == [a.meta["prompt_tokens"] for a in reference]
    assert [a.cached_tokens for a in answers] == [a.cached_tokens for a in reference]
    for answer in answers:
        figures = answer.figures
        assert figures["live_tokens"] + figures["dead_tokens"] == figures["logical_tokens"] == answer.meta["prompt_tokens"] + NEW_TOKENS
        if figures["pruned_tokens"]:
            assert figures["live_tokens"] - NEW_TOKENS == figures["target_tokens"]
            assert figures["target_tokens"] <= max(120, figures["forced_tokens"])
    assert sum(a.figures["pruned_tokens"] > 0 for a in answers) >= 3
    assert answers[-1].figures["dead_tokens"] == sum(a.figures["pruned_tokens"] for a in answers) > 200


def test_divergence_inside_a_pruned_prefix(served: Client, dense: DenseModel, new_chat: Callable[[], Chat]) -> None:
    """Another continuation splits a node in the middle of dead positions; the first chain must not notice."""
    chat = new_chat().say("system", 20)
    oracle = SessionOracle(dense, "assistant", budget=100)
    for role, size in [("user", 80), ("tool", 60)]:
        answer = served.generate(chat.say(role, size).ask(), NEW_TOKENS, oracle.options, session_id="first")
        oracle.check_turn(chat, answer, served.dead("first"))
        chat.answered(answer.output_ids)
    dead = served.dead("first")
    middle = sorted(dead)[len(dead) // 2]
    for at in (middle, middle + 1, middle - 7):
        other = chat.ids[:at] + new_chat().words(30)
        answer = served.generate(other, 8, {"method": "full"})
        assert answer.cached_tokens == at
        # Whoever continues a pruned prefix reads what is left of it (sharing = "any").
        inherited = {j: 0 for j in dead if j < at}
        assert answer.figures["dead_tokens"] == len(inherited)
        check_greedy(dense, other, answer.output_ids, {j: oracle.hidden_from[j] for j in inherited} | _hidden_at(inherited, at))
        assert served.dead("first") == dead
    oracle.protected = ((0, middle - 7),)
    oracle.shared = middle + 1
    answer = served.generate(chat.say("tool", 50).ask(), NEW_TOKENS, {**oracle.options, "keep": []}, session_id="first")
    oracle.check_turn(chat, answer, served.dead("first"))


def _hidden_at(positions: dict[int, int], since: int) -> dict[int, int]:
    return dict.fromkeys(positions, since)


def test_extra_key_keeps_prefixes_apart(served: Client, dense: DenseModel, new_chat: Callable[[], Chat]) -> None:
    """The same prompt under another ``extra_key`` never meets what one tenant pruned."""
    chat = new_chat().say("system", 20).say("user", 60).say("assistant", 20).say("user", 20)
    prompt = chat.ask()
    pruned = served.generate(prompt, 8, {"budget": 60, "hysteresis": 0}, extra_key="a")
    assert pruned.figures["pruned_tokens"] > 30
    for again in range(2):
        other = served.generate(prompt, 8, {"method": "full"}, extra_key="b")
        assert other.cached_tokens == (len(prompt) - 1 if again else 0)
        assert other.figures["dead_tokens"] == 0
        check_greedy(dense, prompt, other.output_ids)
    assert served.generate(prompt, 1, {"method": "full"}, extra_key="a").figures["dead_tokens"] == pruned.figures["dead_tokens"]


def test_short_prompts(served: Client, dense: DenseModel, new_chat: Callable[[], Chat]) -> None:
    """Keys of one and two tokens, sent twice, and none at all."""
    words = new_chat().words
    for ids in (words(1), words(2), words(3)):
        for cached in (0, len(ids) - 1):
            answer = served.generate(ids, 6, {"budget": 1, "hysteresis": 0}, session_id=f"short-{len(ids)}")
            assert answer.cached_tokens == cached
            dead = served.dead(f"short-{len(ids)}")
            # No message is recognised in it, so the uncached part is forced keep and the rest is history.
            assert dead == set(range(cached))
            check_greedy(dense, ids, answer.output_ids, dict.fromkeys(dead, len(ids) + FIRST_STEP))
    assert served.post("/generate", generate_body([], 1)).status_code == httpx.codes.BAD_REQUEST
    assert served.post("/generate", {"text": "", "sampling_params": {"max_new_tokens": 1}}).status_code == httpx.codes.BAD_REQUEST


def test_sessions_share_a_long_prefix(served: Client, dense: DenseModel, new_chat: Callable[[], Chat]) -> None:
    """What two sessions use is pruned by neither, whichever is over budget; both go on as their oracles say."""
    stem = new_chat().say("system", 60).say("user", 120).say("assistant", 30)
    chats = []
    for _ in range(2):
        chat = new_chat()
        chat.ids, chat.spans = list(stem.ids), list(stem.spans)
        chats.append(chat.say("tool", 40))
    shared = next(i for i, (a, b) in enumerate(zip(chats[0].ask(), chats[1].ask(), strict=True)) if a != b)
    assert shared >= len(stem.ids)
    oracles = [SessionOracle(dense, method, budget=100_000, shared=shared) for method in ("assistant", "intentkv")]
    for budget, size in [(100_000, 0), (150, 90), (150, 40)]:
        for name, chat, oracle in zip("ab", chats, oracles, strict=True):
            oracle.budget = budget
            if size:
                chat.say("tool", size).ask()
            answer = served.generate(chat.ids, NEW_TOKENS, oracle.options, session_id=f"sharing-{name}")
            oracle.check_turn(chat, answer, served.dead(f"sharing-{name}"))
            chat.answered(answer.output_ids)
    for oracle in oracles:
        assert len(oracle.hidden_from) > 50
        assert min(oracle.hidden_from) >= shared


def test_fork(served: Client, new_chat: Callable[[], Chat]) -> None:
    """Without session ids, two continuations of one chain are two sessions; the first one keeps the chain's state."""
    options = {"budget": 10_000}
    chat = new_chat().say("system", 20).say("user", 60)
    chat.answered(served.generate(chat.ask(), NEW_TOKENS, options).output_ids)
    (root,) = served.status()["sessions"]["items"]
    branches = [Chat(chat.tokenizer, f"{chat.seed}/{i}", list(chat.ids), list(chat.spans)).say("tool", 30) for i in range(2)]
    for branch in branches:
        branch.answered(served.generate(branch.ask(), NEW_TOKENS, options).output_ids)
    first, second = sorted(served.status()["sessions"]["items"], key=lambda item: item["key"] != root["key"])
    assert first["key"] == root["key"] != second["key"]
    assert first["turns"] == 2
    # Each goes on under its own name, and what both stand on stays whole.
    for branch in branches:
        answer = served.generate(branch.say("tool", 50).ask(), NEW_TOKENS, {"budget": 100, "hysteresis": 0})
        assert answer.figures["live_cached_tokens"] == answer.cached_tokens, "a shared position died"
        assert answer.figures["pruned_tokens"] > 20
    assert {item["key"] for item in served.status()["sessions"]["items"]} == {first["key"], second["key"]}


def test_identical_prompts_at_once(served: Client, dense: DenseModel, new_chat: Callable[[], Chat]) -> None:
    """Several copies of one prompt in one batch, as a batch, as ``n``, and as requests of their own."""
    chats = [new_chat().say("system", 10).say("user", 100) for _ in range(3)]
    prompts = [chat.ask() for chat in chats]
    options = {"budget": 40, "hysteresis": 0}
    batch = served.generate_batch([prompts[0]] * 4, NEW_TOKENS, options)
    body = generate_body(prompts[1], NEW_TOKENS, options)
    body["sampling_params"]["n"] = 3
    copies = [Answer.of(reply) for reply in served.post("/generate", body).json()]
    alone = at_once([partial(served.generate, prompts[2], NEW_TOKENS, options)] * 4)
    for prompt, answers in zip(prompts, (batch, copies, alone), strict=True):
        assert len({tuple(a.output_ids) for a in answers}) == 1
        check_greedy(dense, prompt, answers[0].output_ids)


def test_identical_conversations_at_once(served: Client, dense: DenseModel, new_chat: Callable[[], Chat]) -> None:
    """The same over-budget session prompt several times at once: whoever is first may prune, no slot is freed twice."""
    chat = new_chat().say("system", 20).say("user", 60).say("assistant", 40).say("tool", 40)
    prompt = chat.ask()
    options = {"budget": 80, "hysteresis": 0}
    at_once([partial(served.generate, prompt, NEW_TOKENS, options, session_id="twins")] * 6)
    at_once([partial(served.generate, prompt, NEW_TOKENS, options)] * 6)
    dead = served.dead("twins")
    again = served.generate(prompt, NEW_TOKENS, {"method": "full"}, session_id="twins")
    assert again.cached_tokens == len(prompt) - 1
    assert again.figures["dead_tokens"] == len(dead)
    check_greedy(dense, prompt, again.output_ids, dict.fromkeys(dead, len(prompt) - 1))
