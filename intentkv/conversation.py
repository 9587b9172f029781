"""Recorded messages as text and as token ids, one message at a time.

A message's ids do not depend on its neighbours: every format in :mod:`intentkv.templates` opens and closes a message with single tokens.
So a recorded message can be put behind whatever the server itself generated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from intentkv.spans import Span
from intentkv.templates import Template
from intentkv.trajectories import Message, Trajectory


def render(trajectory: Trajectory, template: Template) -> list[str]:
    """One text a message, template markers included. Tools are listed in the system message, which is made when there is none."""
    messages = list(trajectory.messages)
    if trajectory.tools:
        given = messages.pop(0).content if messages[0].role == "system" else ""
        messages.insert(0, Message(role="system", content=_with_tools(given, trajectory.tools)))
    texts = [template.render(message.role, _body(message)) for message in messages]
    texts[0] = template.bos + texts[0]
    return texts


def _with_tools(system: str, tools: Sequence[dict[str, Any]]) -> str:
    listed = "\n".join(_json(tool) for tool in tools)
    call = '<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>'
    return "\n\n".join(filter(None, [system, f"# Tools\n\n<tools>\n{listed}\n</tools>\n\nTo use a tool, write:\n{call}"]))


def _body(message: Message) -> str:
    calls = [f"<tool_call>\n{_json({'name': call.name, 'arguments': call.arguments})}\n</tool_call>" for call in message.tool_calls]
    return "\n".join(filter(None, [message.content, *calls]))


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class EncodedMessage:
    role: str
    ids: list[int]


@dataclass(frozen=True)
class Conversation:
    """A trajectory in token ids, and the format's markers in token ids."""

    messages: list[EncodedMessage]
    generation_prompt: list[int]
    message_end: list[int]
    """What follows an assistant's words: the end marker and the separator."""

    @property
    def spans(self) -> list[Span]:
        """Position of each message when all are put in a row."""
        spans, start = [], 0
        for message in self.messages:
            spans.append(Span(message.role, start, start + len(message.ids)))  # type: ignore[arg-type]
            start += len(message.ids)
        return spans

    @property
    def ids(self) -> list[int]:
        return [token for message in self.messages for token in message.ids]

    def completion_tokens(self, message: EncodedMessage) -> int:
        """Tokens a model generated for a recorded assistant message, its markers not counted; at least 1."""
        return max(1, len(message.ids) - len(self.generation_prompt) - len(self.message_end))

    def close(self, output: Sequence[int]) -> list[int]:
        """What to put behind ``output`` so that it ends as a message: the end marker as far as the server did not write it itself."""
        end = self.message_end
        written = next((n for n in range(len(end), 0, -1) if list(output[-n:]) == end[:n]), 0)
        return end[written:]


def texts_of(trajectory: Trajectory, template: Template) -> list[str]:
    """What must be tokenised to build the :class:`Conversation`: the messages, then the generation prompt and the message end."""
    return [*render(trajectory, template), template.generation_prompt(), template.end + template.separator]


def assemble(trajectory: Trajectory, encoded: Sequence[list[int]]) -> Conversation:
    """``trajectory`` from the token ids of :func:`texts_of`."""
    *messages, generation_prompt, message_end = encoded
    roles = [message.role for message in trajectory.messages]
    if len(messages) > len(roles):
        roles.insert(0, "system")
    return Conversation(
        [EncodedMessage(role, ids) for role, ids in zip(roles, messages, strict=True)],
        generation_prompt,
        message_end,
    )
