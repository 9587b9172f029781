"""Recorded messages as text and ids."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

import pytest

from intentkv.config import ConfigError
from intentkv.conversation import Conversation, render
from intentkv.templates import TEMPLATES
from intentkv.trajectories import Message, ToolCall, Trajectory
from intentkv_eval.conversation import choose_template, encode

pytestmark = pytest.mark.unit

CHATML = {"<|im_start|>": 1, "<|im_end|>": 2}


def tokenizer(markers: dict[str, int]):  # type: ignore[no-untyped-def]
    """One id a character, ``markers`` as single ids."""
    pattern = re.compile("|".join([*map(re.escape, markers), "."]), re.DOTALL)

    async def tokenize(texts: Sequence[str]) -> list[list[int]]:
        return [[markers.get(piece) or ord(piece) + 1000 for piece in pattern.findall(text)] for text in texts]

    return tokenize


def trajectory(*messages: Message, tools: tuple[dict[str, object], ...] = ()) -> Trajectory:
    return Trajectory(id="t", source="s", group="g", messages=messages, tools=tools)


CALL = Message(role="assistant", content="Let me look.", tool_calls=(ToolCall(name="find", arguments={"q": "é"}),))


def test_tool_calls_follow_the_content() -> None:
    """Catches tool calls that are lost, reordered or escaped: they are what later turns refer to."""
    twice = Message(role="assistant", tool_calls=CALL.tool_calls * 2)
    call = '<tool_call>\n{"name": "find", "arguments": {"q": "é"}}\n</tool_call>'
    assert render(trajectory(CALL, twice), TEMPLATES["chatml"]) == [
        f"<|im_start|>assistant\nLet me look.\n{call}<|im_end|>\n",
        f"<|im_start|>assistant\n{call}\n{call}<|im_end|>\n",
    ]


@pytest.mark.parametrize("system", ["", "Be brief."])
def test_tools_are_in_the_system_message(system: str) -> None:
    """Catches tools that are dropped when there is no system message, or a second system message."""
    given = (Message(role="system", content=system),) if system else ()
    texts = render(trajectory(*given, Message(role="user", content="U"), tools=({"name": "find"}, {"name": "buy"})), TEMPLATES["chatml"])
    assert len(texts) == 2
    assert texts[0].startswith(f"<|im_start|>system\n{system}")
    assert '<tools>\n{"name": "find"}\n{"name": "buy"}\n</tools>' in texts[0]
    assert texts[1] == "<|im_start|>user\nU<|im_end|>\n"


def encoded() -> Conversation:
    messages = (Message(role="user", content="Hi"), CALL, Message(role="tool", content="found"))
    return asyncio.run(encode(trajectory(*messages, tools=({"name": "find"},)), TEMPLATES["chatml"], tokenizer(CHATML)))


def test_spans_cover_the_ids_message_by_message() -> None:
    """Catches spans that are shifted by the made system message, and markers that are split into characters."""
    conversation = encoded()
    assert [span.role for span in conversation.spans] == ["system", "user", "assistant", "tool"]
    ids = conversation.ids
    assert conversation.spans[-1].end == len(ids)
    for span in conversation.spans:
        assert ids[span.start] == CHATML["<|im_start|>"]
        assert ids[span.end - 2] == CHATML["<|im_end|>"]
        assert ids[span.start : span.end].count(CHATML["<|im_start|>"]) == 1


def test_recorded_length_is_that_of_the_words() -> None:
    """Catches a completion length that counts the template's own tokens, which would make every turn longer than recorded."""
    conversation = encoded()
    words = 'Let me look.\n<tool_call>\n{"name": "find", "arguments": {"q": "é"}}\n</tool_call>'
    assert conversation.completion_tokens(conversation.messages[2]) == len(words)


@pytest.mark.parametrize(
    ("output", "rest"),
    [([7, 8], [2, 1010]), ([7, 2], [1010]), ([7, 2, 1010], []), ([2], [1010]), ([7, 1010], [2, 1010])],
    ids=["words", "end marker", "end marker and separator", "only the marker", "a newline is no marker"],
)
def test_close_adds_what_the_output_did_not_write(output: list[int], rest: list[int]) -> None:
    """Catches a doubled or missing end marker: the next turn's prompt would not be a conversation."""
    assert encoded().close(output) == rest


@pytest.mark.parametrize(
    ("markers", "name"),
    [
        (CHATML, "chatml"),
        ({**CHATML, "<tool_call>": 3}, "qwen"),
        ({"<|start_header_id|>": 1, "<|eot_id|>": 2}, "llama-3"),
    ],
)
def test_template_is_recognised_by_the_vocabulary(markers: dict[str, int], name: str) -> None:
    """Catches a template whose markers the model would read as text."""
    assert asyncio.run(choose_template(None, tokenizer(markers))).name == name


def test_unusable_template_is_one_sentence() -> None:
    """Catches markers that became characters, or the one "unknown" id of a tokenizer, without a word."""

    async def unknown(texts: Sequence[str]) -> list[list[int]]:
        return [[0] for _ in texts]

    for name, tokenize in (("nope", tokenizer(CHATML)), ("llama-3", tokenizer(CHATML)), (None, tokenizer({})), (None, unknown)):
        with pytest.raises(ConfigError, match="emplate"):
            asyncio.run(choose_template(name, tokenize))
