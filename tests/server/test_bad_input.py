"""Wrong input ends as one sentence, and broken-off requests leave nothing behind: no held slot, no half-written prefix.

After each test the server must still answer and account for every slot (see conftest).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from .harness import CHUNK, PATIENCE_S, POOL, Chat, Client, generate_body
from .oracle import FIRST_STEP, DenseModel, SessionOracle, check_greedy

WRONG: dict[str, tuple[Any, str]] = {
    "wrong type": ({"intentkv": {"budget": "many"}}, "budget"),
    "unknown method": ({"intentkv": {"method": "magic"}}, "choose one of"),
    "negative budget": ({"intentkv": {"budget": -5}}, "budget"),
    "both budgets": ({"intentkv": {"budget": 100, "budget_ratio": 0.5}}, "not both"),
    "ratio above one": ({"intentkv": {"budget_ratio": 1.5}}, "budget_ratio"),
    "unknown option": ({"intentkv": {"budgget": 100}}, "no such option"),
    "not an object": ({"intentkv": [1, 2]}, "JSON object"),
    "backward span": ({"intentkv": {"keep": [[9, 3]]}}, "start < end"),
    "custom_params is text": ("intentkv", "custom_params must be a JSON object"),
}


def one_sentence(response: httpx.Response) -> str:
    """The message of an error reply, of either API."""
    reply = response.json()
    message = reply["error"]["message"] if "error" in reply else reply["message"]
    assert isinstance(message, str)
    assert "\n" not in message
    assert "Traceback" not in message
    assert message.endswith(".")
    return message


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options(served: Client, case: str) -> None:
    """A 400 for that request, on both APIs, alone or in a batch; the server goes on."""
    custom, expected = WRONG[case]
    sampling = {"temperature": 0, "max_new_tokens": 1}
    wrong = sampling | {"custom_params": custom}
    bodies: list[dict[str, Any]] = [
        {"input_ids": [1000, 1001], "sampling_params": wrong},
        {"input_ids": [[1000, 1001], [1002]], "sampling_params": [sampling, wrong]},
    ]
    for body in bodies:
        response = served.post("/generate", body)
        assert response.status_code == httpx.codes.BAD_REQUEST
        assert expected in one_sentence(response)
    message = {"role": "user", "content": "hello"}
    for stream in (False, True):
        chat = {"model": "tiny", "messages": [message], "max_tokens": 1, "custom_params": custom, "stream": stream}
        assert served.post("/v1/chat/completions", chat).status_code == httpx.codes.BAD_REQUEST
    assert len(served.generate([1000, 1001], 2).output_ids) == 2


def test_valid_options_work_on_both_apis(served: Client) -> None:
    """The same way in for right options, with text and with nested lists, which SGLang's wire type cannot hold."""
    custom = {"intentkv": {"method": "random", "budget": 40, "hysteresis": 0, "keep": [[0, 3], [10, 12]]}}
    messages = [
        {"role": "user", "content": "one two three " * 20},
        {"role": "assistant", "content": "four"},
        {"role": "user", "content": "five"},
    ]
    body = {"model": "tiny", "messages": messages, "max_tokens": 3, "custom_params": custom, "temperature": 0, "session_id": "chat"}
    assert served.post("/v1/chat/completions", body).status_code == httpx.codes.OK
    dead = served.dead("chat")
    assert len(dead) > 10
    assert not dead & {0, 1, 2, 10, 11}


def test_longer_than_the_pool(served: Client, new_chat: Callable[[], Chat]) -> None:
    response = served.post("/generate", generate_body(new_chat().words(POOL + 100), 1))
    assert response.status_code == httpx.codes.BAD_REQUEST
    assert "exceeds the maximum allowed length" in one_sentence(response)
    # SGLang runs a refused request as one of a single token.
    assert served.idle_status()["pool"]["evictable"] <= 1


def test_budget_below_forced_keep(served: Client, dense: DenseModel, new_chat: Callable[[], Chat]) -> None:
    """The budget cannot be met: all history goes, the forced keep stays whole, and the counter says so."""
    chat = new_chat().say("system", 30)
    oracle = SessionOracle(dense, "assistant", budget=10)
    before = served.status()["counters"]["declined"].get("budget_below_forced_keep", 0)
    for role, size in [("user", 40), ("tool", 50)]:
        answer = served.generate(chat.say(role, size).ask(), 8, oracle.options, session_id="below")
        oracle.check_turn(chat, answer, served.dead("below"))
        chat.answered(answer.output_ids)
    assert answer.figures["target_tokens"] == answer.figures["forced_tokens"] > 10
    assert served.status()["counters"]["declined"]["budget_below_forced_keep"] == before + 1


def test_keep_spans_beyond_the_prompt(served: Client, new_chat: Callable[[], Chat]) -> None:
    prompt = new_chat().say("system", 5).say("user", 60).say("assistant", 5).say("user", 5).ask()
    answer = served.generate(prompt, 2, {"budget": 20, "hysteresis": 0, "keep": [[30, 10**6], [10**6, 10**7]]}, session_id="beyond")
    assert answer.figures["pruned_tokens"] > 0
    assert max(served.dead("beyond")) < 30


# ---- Broken off ----


def test_disconnect_in_mid_decode(served: Client, dense: DenseModel, new_chat: Callable[[], Chat]) -> None:
    """The client of a pruned session goes away while it streams; the same prompt, and the next turn, are then served right."""
    chat = new_chat().say("system", 20).say("user", 60)
    oracle = SessionOracle(dense, "assistant", budget=90)
    answer = served.generate(chat.ask(), 8, oracle.options, session_id="gone")
    oracle.check_turn(chat, answer, served.dead("gone"))
    chat.answered(answer.output_ids)
    prompt = chat.say("tool", 60).ask()
    body = generate_body(prompt, 3000, oracle.options, session_id="gone", stream=True)
    with served.http.stream("POST", "/generate", json=body) as response:
        chunks = (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {"))
        received = next(c["output_ids"] for c in chunks if c["meta_info"]["completion_tokens"] >= 6)
    pool = served.idle_status()["pool"]
    assert pool["evictable"] < 1500, "it was decoded to the end all the same"
    dead = served.dead("gone")
    assert len(dead) > 30
    mask = dict.fromkeys(dead, len(prompt) + FIRST_STEP)
    check_greedy(dense, prompt, received, mask)
    again = served.generate(prompt, 8, {"method": "full"}, session_id="gone")
    assert again.cached_tokens == len(prompt) - 1
    check_greedy(dense, prompt, again.output_ids, dict.fromkeys(dead, len(prompt) - 1))


def test_abort_in_mid_prefill(tight: Client, dense: DenseModel, new_chat: Callable[[], Chat]) -> None:
    """Some chunks are in the tree, the rest never comes; what is there must be right, and the prompt served again.

    Catches pages freed that the tree kept, a plan of captured queries that outlives its request, and rows of the bank that are lost.
    """
    chat = new_chat().say("system", 30).say("user", 400).say("assistant", 100).say("tool", 500)
    prompt = chat.ask()
    left = _abort_while_prefilling(tight, prompt)
    answer = tight.generate(prompt, 12, {"method": "full"})
    assert answer.cached_tokens == left
    check_greedy(dense, prompt, answer.output_ids)
    # And pruned: every query of the bank must be there again.
    tight.flush()
    oracle = SessionOracle(dense, "assistant", budget=600)
    answer = tight.generate(prompt, 12, oracle.options, session_id="whole")
    oracle.check_turn(chat, answer, tight.dead("whole"))


def _abort_while_prefilling(server: Client, prompt: list[int]) -> int:
    """Abort a request between two of its chunks; returns the tokens it left in the tree."""
    deadline = time.monotonic() + PATIENCE_S
    body = generate_body(prompt, 50, {"method": "assistant", "budget": 100_000}, rid="to-abort")
    with ThreadPoolExecutor(1) as sender:
        while time.monotonic() < deadline:
            server.flush()
            sent = sender.submit(server.post, "/generate", body)
            while not sent.done():
                pool = server.status()["pool"]
                if pool["protected"] + pool["private"] >= CHUNK:
                    assert server.post("/abort_request", {"rid": "to-abort"}).status_code == httpx.codes.OK
                    break
            sent.result()
            left: int = server.idle_status()["pool"]["evictable"]
            if CHUNK <= left < len(prompt):
                return left
    pytest.fail("never caught the request in mid-prefill")


def test_aborts_lose_no_query_rows(tight: Client, dense: DenseModel, new_chat: Callable[[], Chat]) -> None:
    """Dozens of requests broken off behind their first chunk, which captured a turn's 64 queries: the bank's 2048 rows outlive them."""
    cancelled = 0
    deadline = time.monotonic() + PATIENCE_S
    with ThreadPoolExecutor(1) as sender:
        while cancelled < 40 and time.monotonic() < deadline:
            rid = f"row-{cancelled}"
            prompt = new_chat().say("user", 10).say("assistant", 90).say("user", 700).ask()
            sent = sender.submit(tight.post, "/generate", generate_body(prompt, 1, {"budget": 100_000}, rid=rid))
            while not sent.done() and tight.status()["pool"]["protected"] < CHUNK:
                pass
            tight.post("/abort_request", {"rid": rid})
            cancelled += not sent.result().json()["output_ids"]
    assert cancelled == 40
    assert "query_rows" not in tight.idle_status()["counters"]["declined"]
    tight.flush()
    oracle = SessionOracle(dense, "assistant", budget=100)
    chat = new_chat().say("user", 10).say("assistant", 90).say("user", 50)
    answer = tight.generate(chat.ask(), 8, oracle.options, session_id="after")
    assert oracle.check_turn(chat, answer, tight.dead("after")) > 20


def test_aborted_turn_leaves_its_session_open(served: Client, new_chat: Callable[[], Chat]) -> None:
    """Without a session id, a chain whose turn was cancelled goes on as the same session: the cancelled request does not stay active."""
    chat = new_chat().say("system", 10).say("user", 30)
    chat.answered(served.generate(chat.ask(), 8).output_ids)
    prompt = chat.say("tool", 30).ask()
    with ThreadPoolExecutor(1) as sender:
        sent = sender.submit(served.post, "/generate", generate_body(prompt, 3000, rid="cancelled"))
        while served.status()["pool"]["private"] < 5:
            assert not sent.done()
        served.post("/abort_request", {"rid": "cancelled"})
        sent.result()
    served.generate(prompt, 8)
    (session,) = served.status()["sessions"]["items"]
    assert session["turns"] == 3


def test_abort_all_while_decoding(served: Client, dense: DenseModel, new_chat: Callable[[], Chat]) -> None:
    chats = [new_chat().say("system", 10).say("user", 50).say("assistant", 20).say("user", 20) for _ in range(6)]
    prompts = [chat.ask() for chat in chats]
    options = {"budget": 60, "hysteresis": 0}
    before = served.status()["counters"]["prune_events"]
    with ThreadPoolExecutor(1) as sender:
        sent = sender.submit(served.post, "/generate", generate_body(prompts, 600, options))
        while served.status()["counters"]["prune_events"] < before + 6:
            assert not sent.done()
        served.post("/abort_request", {"rid": "", "abort_all": True})
        assert all(reply["meta_info"]["finish_reason"]["type"] == "abort" for reply in sent.result().json())
    assert served.idle_status()["pool"]["dead"] > 0
    served.flush()
    for prompt in prompts[:2]:
        check_greedy(dense, prompt, served.generate(prompt, 6, {"method": "full"}).output_ids)


def test_flush(served: Client, dense: DenseModel, new_chat: Callable[[], Chat]) -> None:
    """Flushing drops sessions and dead positions, is refused while a request runs, and the same session then starts anew."""
    chat = new_chat().say("system", 20).say("user", 100).say("assistant", 30).say("tool", 30)
    oracle = SessionOracle(dense, "assistant", budget=90)
    answer = served.generate(chat.ask(), 8, oracle.options, session_id="flushed")
    oracle.check_turn(chat, answer, served.dead("flushed"))
    assert served.idle_status()["pool"]["dead"] > 30
    body = generate_body(chat.ids, 1000, oracle.options, session_id="flushed", stream=True)
    with served.http.stream("POST", "/generate", json=body) as response:
        next(response.iter_lines())
        assert served.post("/flush_cache", {}).status_code == httpx.codes.BAD_REQUEST
    served.flush()
    status = served.status()
    assert status["pool"]["available"] == status["pool"]["total"]
    assert status["pool"]["dead"] == status["sessions"]["count"] == 0
    fresh = SessionOracle(dense, "assistant", budget=90)
    again = served.generate(chat.ids, 8, fresh.options, session_id="flushed")
    assert again.cached_tokens == 0
    fresh.check_turn(chat, again, served.dead("flushed"))
    assert again.output_ids == answer.output_ids
