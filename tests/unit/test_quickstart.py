"""Where the answering text stands in the prompts that were really sent, and how much of it is resident."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from intentkv.templates import TEMPLATES
from intentkv.trajectories import load_dataset
from intentkv_eval.conversation import encode
from intentkv_eval.quickstart import live_in, needle_span, token_span
from intentkv_eval.world import research_session

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("seed", range(3))
def test_needle_is_found_in_what_was_sent(seed: int, tokenizers: dict[str, Any], tmp_path: Path) -> None:
    """A closed-loop replay whose outputs are shorter than the recorded ones: every position behind them moves."""
    tokenizer = tokenizers["chatml"]

    async def tokenize(texts: Sequence[str]) -> list[list[int]]:
        return [tokenizer.encode(text, add_special_tokens=False) for text in texts]

    session = research_session(seed)
    file = tmp_path / "session.jsonl"
    file.write_text(json.dumps(session.record))
    trajectory = load_dataset([file]).trajectories[0]
    conversation = asyncio.run(encode(trajectory, TEMPLATES["chatml"], tokenize))

    rng = random.Random(seed)
    ids: list[int] = []
    prompts: list[int] = []
    for message in conversation.messages:
        if message.role != "assistant":
            ids += message.ids
            continue
        ids += conversation.generation_prompt
        prompts.append(len(ids))
        output = [rng.randrange(5, 200) for _ in range(conversation.completion_tokens(message) - rng.randrange(3))]
        ids += [*output, *conversation.close(output)]

    start, end = asyncio.run(needle_span(trajectory, session.needle, prompts, tokenize))
    found = tokenizer.decode(ids[start:end])
    assert session.needle.text in found
    assert len(found) <= len(session.needle.text) + 2  # at most a line break on each side


@pytest.mark.parametrize(
    ("before", "piece", "after"), [("a\n", "x | 12", "\nb"), ("", "x", ""), ("one", " two", " three"), ("un", "able", "s")]
)
def test_token_span_holds_the_piece(before: str, piece: str, after: str, make_tokenizer: Callable[..., Any]) -> None:
    """Also where a token straddles the piece's border, which the tokens of the parts alone do not show."""
    tokenizer = make_tokenizer([])
    whole, left, right = (tokenizer.encode(text, add_special_tokens=False) for text in (before + piece + after, before, after))
    start, end = token_span(whole, left, right)
    assert piece in tokenizer.decode(whole[start:end])
    assert tokenizer.decode(whole[:start]) == before[: len(tokenizer.decode(whole[:start]))]


def test_token_span_gives_a_straddling_token_to_the_piece() -> None:
    # "ab|cd|ef": one token covers the end of "before" and the start of the piece, another its end and the start of "after"
    assert token_span(whole=[1, 23, 4, 56, 7], before=[1, 2], after=[6, 7]) == (1, 4)


def test_live_in_counts_positions_outside_dead_spans() -> None:
    """Against counting one by one, for every span of a small range."""
    dead = [[0, 2], [4, 5], [7, 9]]
    evicted = {position for begin, end in dead for position in range(begin, end)}
    for start, end in itertools.combinations(range(11), 2):
        assert live_in((start, end), dead) == sum(position not in evicted for position in range(start, end))
