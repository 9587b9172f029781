"""When an eviction takes effect: from the second decode step of the same turn at the latest, with and without overlap scheduling.

Catches an eviction that attention does not see before the next turn (nothing saved, KV of the rest of the turn computed from the whole
cache), and one that a step already launched sees half of.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from .harness import Chat, Client
from .oracle import DenseModel
from .test_logits_after_prune import TOLERANCE


@pytest.mark.parametrize("name", ["served", "plain"])
def test_same_turn_reads_the_pruned_cache(
    request: pytest.FixtureRequest, dense: DenseModel, new_chat: Callable[[], Chat], name: str
) -> None:
    server: Client = request.getfixturevalue(name)
    chat = new_chat().say("user", 100).say("assistant", 30)
    server.generate(chat.ids, 1, {"method": "full"}, session_id=name)
    prompt = chat.say("tool", 40).ask()
    options = {"method": "streamingllm", "budget": 80, "hysteresis": 0}
    answer = server.generate(prompt, 16, options, session_id=name, return_logprob=True)
    dead = server.dead(name)
    assert len(dead) == answer.figures["pruned_tokens"] > 60

    whole, n = prompt + answer.output_ids, len(prompt)
    measured = answer.output_logprobs

    def error(first_step_that_sees_it: int) -> float:
        mask = dict.fromkeys(dead, n - 1 + first_step_that_sees_it)
        return float((dense.forward(whole, mask, first=n - 1).of_tokens(whole, n) - measured).abs().max())

    assert min(error(1), error(2)) < TOLERANCE
    assert min(error(3), error(len(measured))) > 100 * TOLERANCE, "too small an effect to tell when it began"


@pytest.mark.parametrize("name", ["served", "plain"])
def test_next_turn_continues_from_it(request: pytest.FixtureRequest, dense: DenseModel, new_chat: Callable[[], Chat], name: str) -> None:
    """KV that the rest of the turn wrote was computed from the pruned cache, so the next turn's logits say when it began, too."""
    server: Client = request.getfixturevalue(name)
    chat = new_chat().say("user", 100)
    options = {"method": "streamingllm", "budget": 80, "hysteresis": 0}
    chat.answered(server.generate(chat.ask(), 8, {"method": "full"}, session_id=name).output_ids)
    prompt = chat.say("tool", 40).ask()
    chat.answered(server.generate(prompt, 16, options, session_id=name).output_ids)
    dead, known = server.dead(name), len(prompt) + 15
    following = chat.say("tool", 5).ask()
    answer = server.generate(following, 1, {"method": "full"}, session_id=name, return_logprob=True, logprob_start_len=known)
    measured = torch.tensor([value for value, *_ in answer.meta["input_token_logprobs"][1:]])

    def error(first_step_that_sees_it: int) -> float:
        mask = dict.fromkeys(dead, len(prompt) - 1 + first_step_that_sees_it)
        return float((dense.forward(following, mask, first=known).of_tokens(following, known + 1) - measured).abs().max())

    assert min(error(1), error(2)) < TOLERANCE
    assert error(16) > 100 * TOLERANCE
