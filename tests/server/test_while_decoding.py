"""A generation that outgrows its budget is evicted from while it runs; from then on its own steps read what is left.

Catches: a checkpoint that hands over KV not computed yet, a step that reads an evicted slot or a stale row, evictions that attention sees
only in the next turn, a long answer that grows past its budget.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from .harness import DECODE_INTERVAL, Chat, Client, at_once
from .oracle import DenseModel
from .test_logits_after_prune import TOLERANCE

LOOKS = 3


@pytest.mark.parametrize("name", ["served", "plain"])
def test_each_eviction_takes_effect_in_the_running_generation(
    request: pytest.FixtureRequest, dense: DenseModel, new_chat: Callable[[], Chat], name: str
) -> None:
    """The same generation, ended behind its first, second and third eviction, tells what each of them took."""
    server: Client = request.getfixturevalue(name)
    prompt = new_chat().say("system", 10).say("user", 40).ask()
    budget = len(prompt) + 20
    options = {"method": "streamingllm", "budget": budget, "hysteresis": 0}
    hidden_from: dict[int, int] = {}
    for look in range(1, LOOKS + 1):
        server.flush()
        at = len(prompt) + look * DECODE_INTERVAL
        answer = server.generate(prompt, look * DECODE_INTERVAL + 8, options, session_id=name, return_logprob=True)
        dead = server.dead(name)
        assert hidden_from.keys() < dead, "each look evicts, and nothing comes back"
        hidden_from |= dict.fromkeys(dead - hidden_from.keys(), at)
        assert answer.figures["dead_tokens"] == len(dead)
        assert answer.figures["peak_live_tokens"] <= budget + DECODE_INTERVAL + 2
    whole, measured = prompt + answer.output_ids, answer.output_logprobs

    def error(late: int) -> float:
        mask = {position: at + late for position, at in hidden_from.items()}
        return float((dense.forward(whole, mask, first=len(prompt) - 1).of_tokens(whole, len(prompt)) - measured).abs().max())

    assert min(error(0), error(1), error(2)) < TOLERANCE
    assert error(10) > 100 * TOLERANCE, "too small an effect to tell when it began"


def test_beside_others(served: Client, dense: DenseModel, new_chat: Callable[[], Chat]) -> None:
    """Long and short generations of several sessions at once; the next turn of each hits its whole prefix."""
    chats = [new_chat().say("system", 10).say("user", 30) for _ in range(4)]
    prompts = [chat.ask() for chat in chats]
    options = {"method": "assistant", "budget": 90, "hysteresis": 0}
    lengths = [90, 40, 110, 70]
    answers = at_once(
        [
            partial(served.generate, prompt, length, options, session_id=f"beside-{i}")
            for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
    )
    for i, (chat, answer, length) in enumerate(zip(chats, answers, lengths, strict=True)):
        known = len(chat.ids) + length - 1
        assert answer.figures["live_tokens"] <= 90 + DECODE_INTERVAL + 2
        assert (answer.figures["dead_tokens"] > 0) == (known > 90 + DECODE_INTERVAL)
        following = chat.answered(answer.output_ids).say("user", 10).ask()
        cached = served.generate(following, 2, options, session_id=f"beside-{i}").cached_tokens
        # under overlap the last token may have been an input, too
        assert cached - known in (0, 1)
