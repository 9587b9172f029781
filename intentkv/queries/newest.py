"""Single queries of the newest actionable span: what the model looks for in the history while it reads what just came in."""

from __future__ import annotations

from dataclasses import dataclass

from intentkv.protocols import CaptureRequest
from intentkv.spans import Prompt


@dataclass(frozen=True)
class NewestMessage:
    """At most ``limit`` queries of the latest user, tool or function message, evenly spaced."""

    limit: int
    decode: bool = False
    decode_limit: int = 0

    def requests(self, prompt: Prompt) -> list[CaptureRequest]:
        return [CaptureRequest(prompt.actionable, "raw", self.limit)] if prompt.actionable is not None else []
