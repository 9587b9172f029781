"""With nothing to evict the plugin changes nothing: float32 outputs are token-identical to the stock server's, and to transformers'.

Catches a touched attention path, a lane mix-up in a batch, wrong positions or lengths, a radix tree that matches differently.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from .harness import Answer, Chat, Client, at_once
from .oracle import DenseModel, check_greedy

NEW_TOKENS = 12
WAYS: dict[str, dict[str, Any]] = {"full": {"method": "full"}, "never reached": {"budget": 100_000, "hysteresis": 0}}


@pytest.fixture
def prompts(new_chat: Callable[[], Chat]) -> list[list[int]]:
    """Twenty prompts of 1 to 400 tokens: unrelated ones, ones that share a prefix, a repetition, plain text and conversations."""
    chat = new_chat()
    stem = chat.words(90)
    plain = [chat.words(size) for size in (1, 2, 7, 33, 150, 400)]
    branches = [stem + chat.words(size) for size in (1, 5, 30, 120)]
    talks = []
    for turns in range(1, 8):
        talk = new_chat().say("system", 20)
        for _ in range(turns):
            talk.say("user", 15).say("assistant", 20).say("tool", 10)
        talks.append(talk.ask())
    return [*plain, *branches, *talks, stem, plain[3], stem[:45]]


def one_by_one(server: Client, prompts: list[list[int]], options: dict[str, Any] | None) -> list[Answer]:
    server.flush()
    return [server.generate(ids, NEW_TOKENS, options) for ids in prompts]


def concurrent(server: Client, prompts: list[list[int]], options: dict[str, Any] | None) -> list[Answer]:
    server.flush()
    return at_once([partial(server.generate, ids, NEW_TOKENS, options) for ids in prompts])


def batched(server: Client, prompts: list[list[int]], options: dict[str, Any] | None) -> list[Answer]:
    server.flush()
    return server.generate_batch(prompts, NEW_TOKENS, options)


def test_outputs_equal_stock(served: Client, stock: Client, prompts: list[list[int]]) -> None:
    assert len(prompts) >= 20
    reference = one_by_one(stock, prompts, None)
    for options in WAYS.values():
        answers = one_by_one(served, prompts, options)
        assert [a.output_ids for a in answers] == [a.output_ids for a in reference]
        assert [a.cached_tokens for a in answers] == [a.cached_tokens for a in reference]
        assert not any(a.figures["dead_tokens"] for a in answers)


@pytest.mark.parametrize("send", [concurrent, batched])
@pytest.mark.parametrize("way", WAYS)
def test_outputs_equal_stock_at_once(
    served: Client, stock: Client, prompts: list[list[int]], send: Callable[..., list[Answer]], way: str
) -> None:
    """Up to eight lanes of all kinds at a time. Which requests meet in a batch, and so what they find cached, differs by chance."""
    reference = send(stock, prompts, None)
    answers = send(served, prompts, WAYS[way])
    assert [a.output_ids for a in answers] == [a.output_ids for a in reference]


def test_outputs_equal_transformers(served: Client, dense: DenseModel, prompts: list[list[int]], tiny_model: Path) -> None:
    """``generate`` of an untouched transformers model; the tests' own oracle agrees with it."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for ids in (prompts[0], prompts[5], prompts[9], prompts[12]):
        prompt = torch.tensor([ids])
        whole = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
        )
        answer = served.generate(ids, NEW_TOKENS, WAYS["full"])
        assert answer.output_ids == whole[0, len(ids) :].tolist()
        check_greedy(dense, ids, answer.output_ids)
