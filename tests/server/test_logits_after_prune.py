"""After an eviction every logit equals that of the full cache with the evicted positions masked to -inf, and only for queries behind it.

Catches dead slots that attention still reads (or live ones it does not), live lengths off by one, shadow rows of another lane, positions
that shift when slots die, KV written to a freed slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from .harness import CHUNK, Answer, Chat, Client, at_once
from .oracle import FIRST_STEP, DenseModel, check_greedy, greedy_gap

TOLERANCE = 1e-4


@dataclass
class Pruned:
    """A session whose last prompt was pruned, and the prompt that continues it."""

    session: str
    chat: Chat
    prompt: list[int]
    known: int
    """Positions of ``prompt`` that the server has seen."""
    hidden_from: dict[int, int]


def prune_session(server: Client, chat: Chat, session: str, budget: int = 120) -> Pruned:
    options = {"budget": budget, "hysteresis": 0}
    first = chat.say("system", 20).say("user", 60).ask()
    chat.answered(server.generate(first, 16, options, session_id=session).output_ids)
    second = chat.say("tool", 90).ask()
    answer = server.generate(second, 16, options, session_id=session)
    dead = server.dead(session)
    assert len(dead) == answer.figures["dead_tokens"] > 30
    known = len(chat.ids) + 16
    prompt = chat.answered(answer.output_ids).say("user", 25).ask()
    return Pruned(session, chat, prompt, known, dict.fromkeys(dead, len(second) + FIRST_STEP))


def check_logprobs(dense: DenseModel, prompt: list[int], answer: Answer, hidden_from: dict[int, int]) -> None:
    """Prompt and output log-probabilities of an answer during which nothing was evicted."""
    whole = prompt + answer.output_ids
    measured = torch.cat((answer.input_logprobs, answer.output_logprobs))
    start = len(whole) - len(measured)
    expected = dense.forward(whole, hidden_from, first=start - 1).of_tokens(whole, start)
    assert (measured - expected).abs().max() < TOLERANCE
    if hidden_from:
        unmasked = dense.forward(whole, first=start - 1).of_tokens(whole, start)
        assert (measured - unmasked).abs().max() > 100 * TOLERANCE, "nothing was masked: the comparison shows nothing"
    check_greedy(dense, prompt, answer.output_ids, hidden_from)


@pytest.mark.parametrize("name", ["served", "tight"])
def test_next_turn(request: pytest.FixtureRequest, dense: DenseModel, new_chat: Callable[[], Chat], name: str) -> None:
    """Extend over a pruned prefix (in two chunks on the server that chunks), then decode."""
    server: Client = request.getfixturevalue(name)
    pruned = prune_session(server, new_chat(), f"logits-{name}")
    prompt = pruned.chat.say("tool", 140).ask()
    answer = server.generate(
        prompt, 24, {"method": "full"}, session_id=pruned.session, return_logprob=True, logprob_start_len=pruned.known - 1
    )
    assert answer.cached_tokens == pruned.known - 1
    assert len(answer.input_logprobs) == len(prompt) - pruned.known
    check_logprobs(dense, prompt, answer, pruned.hidden_from)


@pytest.mark.parametrize("method", ["streamingllm", "random"])
def test_chunked_prompt_without_system(tight: Client, dense: DenseModel, new_chat: Callable[[], Chat], method: str) -> None:
    """A prompt of several chunks that is pruned from its first tokens on; then its own decode steps, then the next turn, in chunks too."""
    chat = new_chat().say("user", 60).say("assistant", 150).say("user", 80)
    prompt = chat.ask()
    assert len(prompt) > 2 * CHUNK
    options = {"method": method, "budget_ratio": 0.25, "hysteresis": 0}
    answer = tight.generate(prompt, 12, options, session_id=method, return_logprob=True)
    mask = dict.fromkeys(tight.dead(method), len(prompt) + FIRST_STEP)
    assert len(mask) == answer.figures["pruned_tokens"] > 150
    assert min(mask) < 10
    check_logprobs(dense, prompt, answer, mask)
    known = len(prompt) + 12
    following = chat.answered(answer.output_ids).say("tool", 150).ask()
    answer = tight.generate(following, 12, {"method": "full"}, session_id=method, return_logprob=True, logprob_start_len=known - 1)
    assert answer.cached_tokens == known - 1
    check_logprobs(dense, following, answer, mask)


def test_pruned_and_whole_in_one_batch(served: Client, dense: DenseModel, new_chat: Callable[[], Chat]) -> None:
    """Lanes of one batch, prefill and decode: pruned, whole, pruned otherwise, short and new. Each in its own view."""
    one, two = prune_session(served, new_chat(), "mixed-1"), prune_session(served, new_chat(), "mixed-2", budget=160)
    whole = new_chat().say("system", 10).say("user", 120)
    whole.answered(served.generate(whole.ask(), 16, {"method": "full"}).output_ids)
    fresh = new_chat().say("user", 3).ask()
    prompts = [one.prompt, whole.say("user", 40).ask(), two.prompt, fresh]
    masks = [one.hidden_from, {}, two.hidden_from, {}]
    answers = served.generate_batch(prompts, 24, {"method": "full"}, return_logprob=True, logprob_start_len=-1)
    assert [a.figures["dead_tokens"] for a in answers] == [len(mask) for mask in masks]
    for prompt, answer, mask in zip(prompts, answers, masks, strict=True):
        check_logprobs(dense, prompt, answer, mask)


def test_pruned_while_others_decode(served: Client, dense: DenseModel, new_chat: Callable[[], Chat]) -> None:
    """Eight lanes that start and end at different steps; four are pruned in the middle of the others' decoding."""
    sessions = [(f"lanes-{i}", new_chat().say("system", 20).say("user", 60)) for i in range(4)]
    for session, chat in sessions:
        answer = served.generate(chat.ask(), 8, {"method": "full"}, session_id=session)
        chat.answered(answer.output_ids).say("tool", 80)
    options = {"budget": 120, "hysteresis": 0}
    pruning = [partial(served.generate, chat.ask(), 10 + 6 * i, options, session_id=s) for i, (s, chat) in enumerate(sessions)]
    others = [new_chat().say("system", 5).say("user", 20 * i).ask() for i in range(1, 5)]
    whole = [partial(served.generate, prompt, 8 * i, {"method": "full"}) for i, prompt in enumerate(others, 1)]
    answers = at_once([job for pair in zip(pruning, whole, strict=True) for job in pair])
    for (session, chat), answer in zip(sessions, answers[::2], strict=True):
        assert answer.figures["pruned_tokens"] > 30
        # Whether the first decode step still read everything depends on what was scheduled in between.
        masks = [dict.fromkeys(served.dead(session), len(chat.ids) + step) for step in (0, FIRST_STEP)]
        assert min(greedy_gap(dense, chat.ids, answer.output_ids, mask) for mask in masks) < 1e-3
    for prompt, answer in zip(others, answers[1::2], strict=True):
        check_greedy(dense, prompt, answer.output_ids)


def test_whole_prompt_again(served: Client, dense: DenseModel, new_chat: Callable[[], Chat]) -> None:
    """Asking for the log-probabilities of the whole prompt bypasses the cache: its prefill is computed in full again."""
    pruned = prune_session(served, new_chat(), "again")
    answer = served.generate(pruned.prompt, 12, {"method": "full"}, session_id="again", return_logprob=True, logprob_start_len=0)
    assert answer.cached_tokens == 0
    full = dense.forward(pruned.prompt).of_tokens(pruned.prompt, 1)
    assert (answer.input_logprobs - full).abs().max() < TOLERANCE
    # Insertion repointed the row to what the tree held: the second copy of every position was freed, dead ones stay dead.
    assert answer.figures["dead_tokens"] == len(pruned.hidden_from)
    assert served.dead("again") == set(pruned.hidden_from)
