"""A recorded conversation served turn by turn, as the server would: the same parser, query sources and aggregators, on a dense pass.

Nothing is evicted on the way: a head learns from what a full cache shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from intentkv.config import ConfigError
from intentkv.conversation import assemble, texts_of
from intentkv.protocols import Captured, CaptureRequest, KeyReader, QuerySource
from intentkv.sessions import SessionState
from intentkv.spans import Prompt, PromptParser, Span
from intentkv.templates import TEMPLATES
from intentkv.trajectories import Trajectory
from intentkv_training.model import FrozenModel, Reading


class Absorber(Protocol):
    """The part of an aggregator that keeps memory."""

    def absorb(self, state: SessionState, captured: Captured, keys: KeyReader, prompt: Prompt) -> None:
        """See :class:`intentkv.protocols.Aggregator`."""


@dataclass(frozen=True)
class Tokens:
    """A conversation, or a piece of it, in token ids."""

    ids: list[int]
    messages: tuple[Span, ...]
    generation_prompt: list[int]
    message_end: list[int]
    """End marker and separator."""
    skipped: int = 0
    """Assistant turns of the conversation that were left out in front of the first one here."""

    def until(self, end: int) -> Tokens:
        """Cut behind the last whole message that ends at ``end`` or before."""
        messages = tuple(span for span in self.messages if span.end <= end)
        return replace(self, ids=self.ids[: messages[-1].end] if messages else [], messages=messages)


def pieces(whole: Tokens, max_tokens: int, most: int) -> Iterator[Tokens]:
    """A conversation in pieces of at most ``max_tokens`` tokens, ``most`` of them at most, from its start on.

    The first is its beginning. Each further one goes on where the last one ended, behind what comes before the first assistant turn (the
    system prompt and the task): the history of an agent whose middle part is not there. It begins with an assistant turn; a turn that no
    piece has room for is left out, and so is what follows it up to the next turn. A conversation whose opening alone takes more than half
    of a piece has one piece only.
    """
    piece = whole.until(max_tokens)
    yield piece
    answers = [number for number, span in enumerate(whole.messages) if span.role == "assistant"]
    opening = whole.messages[answers[0]].start if answers else max_tokens
    if 2 * opening > max_tokens:
        return
    made, behind = 1, len(piece.messages)
    for skipped, place in enumerate(answers):
        if place < behind:
            continue
        if made == most:
            return
        gap = whole.messages[place].start - opening
        fit = [replace(span, start=span.start - gap, end=span.end - gap) for span in whole.messages[place:] if span.end - gap <= max_tokens]
        if fit:
            ids = whole.ids[:opening] + whole.ids[opening + gap : fit[-1].end + gap]
            yield replace(whole, ids=ids, messages=(*whole.messages[: answers[0]], *fit), skipped=skipped)
            made, behind = made + 1, place + len(fit)


def tokenise(trajectory: Trajectory, model: FrozenModel, tools: bool = False) -> Tokens:
    """The token ids of ``trajectory`` as logged, or rendered with the chat template that the tokenizer has the markers of.

    Whole messages only: what follows the last one is left out.

    Args:
        tools: list the tools in the system message of a rendered conversation.

    Raises:
        ConfigError: the tokenizer has the markers of no known template.
    """
    template = model.parser.template
    if template is None:
        raise ConfigError(f"The tokenizer has the markers of no known chat template ({', '.join(TEMPLATES)}); train with another model.")

    def encode(text: str) -> list[int]:
        return list(model.tokenizer.encode(text, add_special_tokens=False))

    if trajectory.token_ids:
        ids = list(trajectory.token_ids)
        generation_prompt, message_end = encode(template.generation_prompt()), encode(template.end + template.separator)
    else:
        shown = trajectory if tools else trajectory.model_copy(update={"tools": ()})
        conversation = assemble(shown, [encode(text) for text in texts_of(shown, template)])
        ids, generation_prompt, message_end = conversation.ids, conversation.generation_prompt, conversation.message_end
    return Tokens(ids, model.parser.parse(ids, 0).messages, generation_prompt, message_end).until(len(ids))


@dataclass(frozen=True)
class Turn:
    """The moment after the prefill of one prompt, when a server scores and evicts."""

    number: int
    prompt: Prompt
    captured: list[Captured]
    state: SessionState
    """The session's memory at this moment; it changes when the next turn is asked for."""
    keys: Reading
    """Live up to the end of the prompt."""
    answer: Span
    """The recorded assistant message that follows."""


def _decoded(start: int, end: int, limit: int) -> list[int]:
    """As the server samples a turn of unknown length while it is generated: the stride doubles until ``limit`` positions are enough."""
    stride = 1
    while -(-(end - start) // stride) > limit:
        stride *= 2
    return list(range(start, end, stride))


def _capture(reading: Reading, wanted: CaptureRequest, cached: int) -> Captured | None:
    span = wanted.span
    if span.end <= cached or (span.role == "assistant" and span.start < cached):
        return None
    start = max(span.start, cached)
    if wanted.form == "mean":
        empty = torch.empty(0, dtype=torch.int64, device=reading.device)
        return Captured(span, "mean", empty, reading.mean_query(start, span.end))
    return _raw(reading, span, wanted.sampled(start))


def _raw(reading: Reading, span: Span, positions: Sequence[int]) -> Captured:
    return Captured(span, "raw", torch.tensor(positions, dtype=torch.int64, device=reading.device), reading.raw_queries(positions))


def turns(tokens: Tokens, reading: Reading, parser: PromptParser, source: QuerySource, aggregators: Sequence[Absorber]) -> Iterator[Turn]:
    """The recorded conversation's turns in order. Every aggregator folds what each turn shows into one session state."""
    state = SessionState("training")
    cached = 0
    answers = [span for span in tokens.messages if span.role == "assistant"]
    for number, answer in enumerate(answers):
        length = answer.start + len(tokens.generation_prompt)
        # The model ends its turn with the end marker. With overlap scheduling, SGLang's default, that token is fed back too.
        end = answer.end - len(tokens.message_end) + 1
        if answer.start == 0 or length > end:
            continue
        prompt = parser.parse(tokens.ids[:length], cached)
        keys = replace(reading, end=length)
        captured = [c for wanted in source.requests(prompt) if (c := _capture(reading, wanted, cached)) is not None]
        captured.sort(key=lambda c: (c.span.end, c.span.start))
        for part in captured:
            for aggregator in aggregators:
                aggregator.absorb(state, part, keys, prompt)
        yield Turn(number, prompt, captured, state, keys, answer)
        if source.decode:
            said = Span("assistant", prompt.generation_start, end)
            positions = _decoded(length, end, source.decode_limit)
            if positions:
                after = replace(reading, end=end)
                for aggregator in aggregators:
                    aggregator.absorb(state, _raw(reading, said, positions), after, prompt)
        cached = end
