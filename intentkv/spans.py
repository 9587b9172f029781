"""Conversation structure read off token ids: which positions are the system prefix, a user, tool or assistant message."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from intentkv.templates import TEMPLATES, Role, Template

__all__ = ["Prompt", "PromptParser", "Role", "Span", "Tokenizer"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Span:
    """Logical positions ``[start, end)`` of one message, its template markers included."""

    role: Role
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Prompt:
    """A parsed prompt of ``length`` tokens.

    ``messages`` are disjoint and ascending. A trailing generation prompt (an opened, empty assistant message) is not
    a message; it is ``generation_start .. length`` and always kept.
    """

    length: int
    messages: tuple[Span, ...]
    generation_start: int
    recognised: bool
    """False when no known chat template was found and the fallback split was used."""

    @property
    def system_end(self) -> int:
        """End of the system prefix [0, pi); 0 without one."""
        first = self.messages[0] if self.messages else None
        return first.end if first is not None and first.role == "system" else 0

    @property
    def actionable(self) -> Span | None:
        """The newest actionable query span: the latest user, tool or function message (IntentKV, section 3)."""
        for span in reversed(self.messages):
            if span.role in ("user", "tool", "unknown"):
                return span
        return None

    def of_role(self, *roles: Role) -> list[Span]:
        return [span for span in self.messages if span.role in roles]


class Tokenizer(Protocol):
    """What is needed of a tokenizer; a Hugging Face tokenizer, and so SGLang's, has it."""

    def encode(self, text: str, /, *, add_special_tokens: bool) -> Any:
        """Token ids (a list of int) of ``text``, where markers in the text become their single token."""
        ...

    def decode(self, token_ids: list[int], /) -> Any:
        """Text (str) of ``token_ids``, markers included.

        Raises:
            OverflowError: an id that no vocabulary can hold.
        """
        ...


class PromptParser:
    """Splits the token ids of a prompt into messages.

    The chat template is the first of :data:`intentkv.templates.TEMPLATES` whose markers are single tokens of the vocabulary. Without
    one, or without a tokenizer, the newest uncached part of a prompt stands in for its newest user message.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Recognise the template of ``tokenizer`` (None: the server runs without one); logs one warning when there is none."""
        self.template: Template | None = None
        self._reader: _MessageReader | None = None
        if tokenizer is None:
            return
        self.template = next((t for t in TEMPLATES.values() if _has_markers(tokenizer, t)), None)
        if self.template is None:
            logger.warning(
                "The tokenizer has the markers of no known chat template (%s), so message roles are unknown and the newest uncached "
                "part of each prompt is taken for its newest user message; add the template to intentkv/templates.py.",
                ", ".join(TEMPLATES),
            )
        else:
            self._reader = _MessageReader(tokenizer, self.template)

    def parse(self, token_ids: Sequence[int], cached_length: int) -> Prompt:
        """The messages of a prompt. Never raises, however broken the conversation is.

        Args:
            token_ids: the whole prompt; an ``array`` or numpy array of int64 is not copied.
            cached_length: its first tokens that were in the cache already; only used when no message can be recognised.
        """
        prompt = self._reader.read(token_ids) if self._reader is not None else None
        if prompt is not None:
            return prompt
        length = len(token_ids)
        start = min(max(cached_length, 0), length)
        messages = (Span("unknown", start, length),) if start < length else ()
        return Prompt(length, messages, generation_start=length, recognised=False)


def _token_id(tokenizer: Tokenizer, marker: str) -> int | None:
    """Id of ``marker`` where it is a single token of the vocabulary (and not its unknown token)."""
    ids = list(tokenizer.encode(marker, add_special_tokens=False))
    return ids[0] if len(ids) == 1 and tokenizer.decode(ids) == marker else None


def _has_markers(tokenizer: Tokenizer, template: Template) -> bool:
    markers = (template.start, template.end, *template.requires)
    return all(_token_id(tokenizer, marker) is not None for marker in markers)


class _MessageReader:
    """The markers, headers and generation prompts of one template as token ids."""

    def __init__(self, tokenizer: Tokenizer, template: Template) -> None:
        def encode(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False))

        @lru_cache(maxsize=1024)
        def decode(token: int) -> str:
            try:
                return str(tokenizer.decode([token]))
            except OverflowError:  # not a token: SGLang writes hashes over the ids of images
                return ""

        self._decode = decode
        self._start = encode(template.start)[0]
        self._gap = 1 + len(encode(template.separator))
        ends = (_token_id(tokenizer, end) for end in (template.end, *template.other_ends))
        self._markers = [self._start, *(end for end in ends if end is not None)]
        headers = [(encode(template.start + header)[1:], role) for header, role in template.headers().items()]
        # longest first: the header of a tool result in a user message starts with that of a user message
        self._headers = sorted(headers, key=lambda item: -len(item[0]))
        self._generation_prompts = [encode(text) for text in template.generation_prompts()]

    def read(self, token_ids: Sequence[int]) -> Prompt | None:
        """The messages, or None when no message starts in ``token_ids``.

        A message runs from its start marker to the next one's, so it includes the separator; the first one starts at 0.
        """
        starts, roles = self._message_starts(token_ids)
        if not starts:
            return None
        end = length = len(token_ids)
        if self._is_generation_prompt(token_ids, starts[-1]):
            end = starts.pop()
            roles.pop()
            if not starts and end > 0:
                starts, roles = [0], ["unknown"]
        bounds = [*starts, end]
        bounds[0] = 0
        messages = tuple(Span(role, first, last) for role, (first, last) in zip(roles, pairwise(bounds), strict=True))
        return Prompt(length, messages, generation_start=end, recognised=True)

    def _message_starts(self, token_ids: Sequence[int]) -> tuple[list[int], list[Role]]:
        marks = np.flatnonzero(np.isin(np.asarray(token_ids, dtype=np.int64), self._markers))
        starts: list[int] = []
        roles: list[Role] = []
        end_at = -1 - self._gap
        for at in marks.tolist():
            if token_ids[at] != self._start:
                end_at = at
                continue
            role = self._role(token_ids, at + 1)
            # A start marker that names a role always counts: the message before may lack its end marker. One that names none counts
            # right behind an end marker; elsewhere it is content that happens to hold one.
            if role == "unknown" and starts and at - end_at > self._gap:
                continue
            starts.append(at)
            roles.append(role)
        return starts, roles

    def _role(self, token_ids: Sequence[int], at: int) -> Role:
        """Role in the header that starts at ``at``, right behind a start marker."""
        for header, role in self._headers:
            found = tuple(token_ids[at : at + len(header)])
            if len(found) == len(header) and found[:-1] == header[:-1] and self._begins(found[-1], header[-1]):
                return role
        return "unknown"

    def _begins(self, token: int, last: int) -> bool:
        """Whether ``token`` is ``last`` or it merged with the first characters of the content: a newline with one gives ``\\n\\n``."""
        return token == last or self._decode(token).startswith(self._decode(last))

    def _is_generation_prompt(self, token_ids: Sequence[int], at: int) -> bool:
        """Whether ``token_ids[at:]`` is a generation prompt or a first part of one."""
        size = len(token_ids) - at
        return any(size <= len(prompt) and tuple(token_ids[at:]) == prompt[:size] for prompt in self._generation_prompts)
