"""Conversation structure read off token ids: which positions are the system prefix, a user, tool or assistant message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "tool", "assistant", "unknown"]


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
