"""Prompts of the benchmarks: recorded lengths, random content, the chat format's own markers.

What a request costs depends on how long its messages are, not on what they say. So messages have the sizes of recorded ones and are framed
with the real marker tokens, by which the plugin tells roles apart; their content is drawn from ordinary tokens, seeded, so that every arm
gets the same prompts and no two conversations share more than their system prompt.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import NamedTuple

from intentkv.config import ConfigError
from intentkv.conversation import Conversation
from intentkv.templates import Template
from intentkv.trajectories import Trajectory
from intentkv_eval.conversation import Tokenize, choose_template, encode

_GAP = "\x00"


def local_tokenizer(model: str) -> Tokenize:
    """The tokenizer of ``model`` (folder or Hugging Face id) in this process: sizes are needed before the server starts.

    Raises:
        ConfigError: there is none.
    """
    from transformers import AutoTokenizer  # takes seconds to import

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ConfigError(f"Model {model!r} has no tokenizer that can be loaded; give --model a folder that holds one.") from error

    async def tokenize(texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    return tokenize


@dataclass(frozen=True)
class Frames:
    """One chat format in token ids."""

    opening: list[int]
    """In front of a conversation."""
    around: dict[str, tuple[list[int], list[int]]]
    """What opens and what closes a message, by role."""
    markers: Conversation
    """Generation prompt and end of message; holds no messages."""
    words: list[int]
    """Ordinary ids that content is drawn from."""

    def message(self, role: str, tokens: int, draw: random.Random) -> list[int]:
        """A message of ``tokens`` tokens, its frame included; an empty one where the frame alone is as long."""
        head, tail = self.around[role]
        return [*head, *self.content(tokens - self.least(role), draw), *tail]

    def least(self, role: str) -> int:
        """Tokens of an empty message."""
        head, tail = self.around[role]
        return len(head) + len(tail)

    def content(self, tokens: int, draw: random.Random) -> list[int]:
        return draw.choices(self.words, k=max(0, tokens))


async def make_frames(template: Template, tokenize: Tokenize) -> Frames:
    """The frames of ``template`` as ``tokenize`` writes them."""
    roles = ("system", "user", "assistant", "tool")
    halves = [half for role in roles for half in template.render(role, _GAP).split(_GAP)]
    pairs = " ".join(first + second for first in string.ascii_lowercase for second in string.ascii_lowercase)
    opening, generation_prompt, message_end, words, *framed = await tokenize(
        [template.bos, template.generation_prompt(), template.end + template.separator, pairs, *halves]
    )
    around = {role: (framed[2 * i], framed[2 * i + 1]) for i, role in enumerate(roles)}
    return Frames(opening, around, Conversation([], generation_prompt, message_end), sorted(set(words)))


class Dialogue:
    """One conversation in token ids, as a client holds it."""

    def __init__(self, frames: Frames, seed: str) -> None:
        self._frames = frames
        self._draw = random.Random(seed)
        self.ids = list(frames.opening)

    def add(self, role: str, tokens: int) -> None:
        """Append a message of ``tokens`` tokens. System messages are equal in all dialogues, as far as they are equally long."""
        draw = random.Random("system") if role == "system" else self._draw
        self.ids += self._frames.message(role, tokens, draw)

    def grow(self, tokens: int, message: int = 1024, answer: int = 64) -> None:
        """Append tool results and made-up answers of these sizes as long as the conversation stays below ``tokens`` tokens."""
        markers = self._frames.markers
        turn = message + len(markers.generation_prompt) + answer + len(markers.message_end)
        while len(self.ids) + turn < tokens:
            self.add("tool", message)
            self.ask()
            self.pretend(answer)

    def ask(self) -> list[int]:
        """Open the assistant's message; the prompt so far."""
        self.ids += self._frames.markers.generation_prompt
        return list(self.ids)

    def ask_at(self, tokens: int) -> list[int]:
        """Append a tool message that makes the next prompt ``tokens`` long, and ask.

        Raises:
            ValueError: no message is short enough.
        """
        room = tokens - len(self.ids) - len(self._frames.markers.generation_prompt)
        if room < self._frames.least("tool"):
            raise ValueError(f"a prompt of {tokens} tokens has no room for another message behind {len(self.ids)} tokens")
        self.add("tool", room)
        return self.ask()

    def answer(self, output: Sequence[int]) -> None:
        """Take over what the server wrote and close the message."""
        self.ids += [*output, *self._frames.markers.close(output)]

    def pretend(self, tokens: int) -> None:
        """An answer that no server wrote."""
        self.answer(self._frames.content(tokens, self._draw))


class MessageSize(NamedTuple):
    role: str
    tokens: int
    """Frame included."""


class TurnSize(NamedTuple):
    added: tuple[MessageSize, ...]
    """What the client appends before this turn."""
    completion_tokens: int


@dataclass(frozen=True)
class Session:
    """The sizes of one recorded agent, or of several joined."""

    name: str
    turns: tuple[TurnSize, ...]
    final_tokens: int
    """Logical tokens once the last turn is done."""


async def recorded_sessions(
    trajectories: Iterable[Trajectory], template: Template, tokenize: Tokenize, max_turns: int, max_tokens: int, max_context: int
) -> list[Session]:
    """The first turns of each recording: at most ``max_turns``, and only those that fit ``max_context`` tokens.

    Args:
        max_tokens: at most this many generated tokens a turn.

    Raises:
        ConfigError: a recording has no such turn.
    """
    sessions = []
    for trajectory in trajectories:
        conversation = await encode(trajectory, template, tokenize)
        sessions.append(_session(trajectory.id, list(_turns(conversation, max_tokens))[:max_turns], conversation, max_context))
    return sessions


def _turns(conversation: Conversation, max_tokens: int) -> Iterator[TurnSize]:
    added: list[MessageSize] = []
    for message in conversation.messages:
        if message.role != "assistant":
            added.append(MessageSize(message.role, len(message.ids)))
            continue
        yield TurnSize(tuple(added), min(max_tokens, conversation.completion_tokens(message)))
        added = []


def _grown(length: int, turn: TurnSize, markers: Conversation) -> int:
    """Logical tokens at the end of ``turn``, its answer not closed yet."""
    return length + sum(message.tokens for message in turn.added) + len(markers.generation_prompt) + turn.completion_tokens


def _session(name: str, turns: Sequence[TurnSize], markers: Conversation, max_context: int) -> Session:
    kept: list[TurnSize] = []
    length = final = 0
    for turn in turns:
        if (grown := _grown(length, turn, markers)) > max_context:
            break
        kept.append(turn)
        final, length = grown, grown + len(markers.message_end)
    if not kept:
        raise ConfigError(f"Trajectory {name!r} has no turn within {max_context} tokens; leave it out or allow more.")
    return Session(name, tuple(kept), final)


def joined_sessions(sessions: Sequence[Session], markers: Conversation, low: int, high: int, seed: int) -> list[Session]:
    """Long sessions: each recording followed by the ones after it, up to a length drawn from [low, high]; one system message each.

    Raises:
        ConfigError: the recordings cannot fill ``low`` tokens without passing ``high``.
    """
    draw = random.Random(f"join/{seed}")
    joined = [_joined([*sessions[n:], *sessions[:n]], markers, draw.randint(low, high), high) for n in range(len(sessions))]
    if short := [session.name for session in joined if session.final_tokens < low]:
        raise ConfigError(f"Session {short[0]!r} cannot be joined to {low} to {high} tokens; give a wider range.")
    return joined


def _joined(sessions: Sequence[Session], markers: Conversation, target: int, high: int) -> Session:
    turns: list[TurnSize] = []
    length = final = 0
    for number, part in enumerate(cycle(sessions)):
        before = final
        for turn in part.turns:
            # a conversation has one system message
            added = tuple(message for message in turn.added if message.role != "system" or number == 0)
            grown = _grown(length, TurnSize(added, turn.completion_tokens), markers)
            if final < target and grown <= high:
                turns.append(TurnSize(added, turn.completion_tokens))
                final, length = grown, grown + len(markers.message_end)
        if final >= target or final == before:
            return Session(f"{sessions[0].name}+{number}", tuple(turns), final)
    raise ValueError("no sessions to join")


async def open_frames(model: str) -> tuple[Template, Tokenize, Frames]:
    """Template, tokenizer and frames of ``model``.

    Raises:
        ConfigError: no tokenizer, or no known chat template fits it.
    """
    tokenize = local_tokenizer(model)
    template = await choose_template(None, tokenize)
    return template, tokenize, await make_frames(template, tokenize)
