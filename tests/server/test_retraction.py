"""Under pressure: retraction, eviction and cancellation, with and without pruning.

Catches a prefix that stays locked or is freed twice when a request is retracted, a resumed request that reads another's slots, state of an
admission that failed, unrelated requests that change when one is cancelled.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from .harness import TIGHT_POOL, Answer, Chat, Client, at_once, generate_body
from .oracle import FIRST_STEP, DenseModel, greedy_gap


def test_full_outputs_survive_retraction(tight: Client, served: Client, new_chat: Callable[[], Chat]) -> None:
    """Eight generations that do not fit together give what they give with room to spare."""
    prompts = [new_chat().say("system", 10).say("user", 20 + 25 * i).ask() for i in range(8)]
    sizes = [150 + 20 * i for i in range(8)]
    assert sum(map(len, prompts)) + sum(sizes) > 1.5 * TIGHT_POOL
    options = {"method": "full"}
    crowded = at_once([partial(tight.generate, ids, size, options) for ids, size in zip(prompts, sizes, strict=True)])
    assert any(a.meta["num_retractions"] for a in crowded), "nothing was retracted: the test shows nothing"
    ample = [served.generate(ids, size, options) for ids, size in zip(prompts, sizes, strict=True)]
    assert [a.output_ids for a in crowded] == [a.output_ids for a in ample]


@pytest.mark.parametrize("method", ["snapkv", "assistant"])
def test_pruned_sessions_under_pressure(tight: Client, new_chat: Callable[[], Chat], method: str) -> None:
    """Eight sessions that fit only pruned, and only for a while: they are retracted after their eviction, resumed, and evicted by turns.

    One method evicts from prompts only, the other from running generations, too.
    """
    options = {"method": method, "budget": 120, "hysteresis": 0}
    talks = [(f"pressed-{method}-{i}", new_chat().say("system", 15).say("user", 60)) for i in range(8)]
    answers: list[Answer] = []
    evicted_own_text = False
    for new_tokens in (16, 200, 200):
        sent = [partial(tight.generate, chat.ask(), new_tokens, options, session_id=session) for session, chat in talks]
        answers += at_once(sent)
        for (session, chat), answer in zip(talks, answers[-8:], strict=True):
            assert len(answer.output_ids) == new_tokens
            own_text = {position for position in tight.dead(session) if position >= chat.generation_start}
            # A retracted request comes back with what it had written: to a method that evicts from prompts that is no history yet.
            assert method == "assistant" or not own_text
            evicted_own_text |= bool(own_text)
            chat.answered(answer.output_ids).say("tool", 60)
    if method == "assistant":
        assert evicted_own_text
    else:
        assert any(a.meta["num_retractions"] and a.figures["pruned_tokens"] for a in answers[8:16]), "nothing pruned was retracted"


def test_pruned_session_reads_right_after_eviction(tight: Client, dense: DenseModel, new_chat: Callable[[], Chat]) -> None:
    """Other requests evict the tail of an idle pruned session. What is left of it is still read right, and what is gone computed anew."""
    chat = new_chat().say("system", 20).say("user", 60)
    chat.answered(tight.generate(chat.ask(), 16, {"method": "full"}, session_id="idle").output_ids)
    prompt = chat.say("tool", 90).ask()
    chat.answered(tight.generate(prompt, 16, {"budget": 120, "hysteresis": 0}, session_id="idle").output_ids)
    dead = tight.dead("idle")
    assert len(dead) > 30
    following = chat.say("user", 20).ask()
    for size in (400, 500, 600, 700):
        tight.generate(new_chat().words(size), 200, {"method": "full"})
    answer = tight.generate(following, 24, {"method": "full"}, session_id="idle")
    mask = {j: len(prompt) + FIRST_STEP for j in dead if j < answer.cached_tokens}
    assert answer.figures["dead_tokens"] == len(mask)
    assert answer.cached_tokens < len(following) - 20, "nothing was evicted: the test shows nothing"
    if answer.cached_tokens < len(prompt):
        # Behind the prefix that is left everything was computed again, over what is left alive of it.
        mask = dict.fromkeys(mask, answer.cached_tokens)
    assert greedy_gap(dense, following, answer.output_ids, mask) < 1e-3


def test_cancellation_race(served: Client, new_chat: Callable[[], Chat]) -> None:
    """Requests are cancelled at random times; those that run beside them must not notice."""
    kept = [new_chat().say("system", 10).say("user", 30 + 40 * i).ask() for i in range(4)]
    doomed = [new_chat().say("system", 10).say("user", 40 * i).say("assistant", 20).say("user", 30).ask() for i in range(1, 13)]
    undisturbed = [served.generate(ids, 100, {"method": "full"}).output_ids for ids in kept]
    served.flush()
    chance = random.Random(0)

    def cancel(number: int, prompt: list[int]) -> Any:
        rid = f"doomed-{number}"
        options = {"budget": 60, "hysteresis": 0} if number % 2 else {"method": "full"}
        with ThreadPoolExecutor(1) as sender:
            reply = sender.submit(served.post, "/generate", generate_body(prompt, 400, options, rid=rid))
            time.sleep(chance.random())
            served.post("/abort_request", {"rid": rid})
            return reply.result().json()["meta_info"]["finish_reason"]["type"]

    def cancel_all() -> list[Any]:
        return [end for i in range(0, 12, 3) for end in at_once([partial(cancel, n, doomed[n]) for n in range(i, i + 3)])]

    with ThreadPoolExecutor(1) as other:
        ends = other.submit(cancel_all)
        rounds = 0
        while not ends.done() or not rounds:
            answers = at_once([partial(served.generate, ids, 100, {"method": "full"}) for ids in kept])
            assert [a.output_ids for a in answers] == undisturbed
            rounds += 1
    assert "abort" in ends.result()
