"""No queries: position-only and random scores."""

from __future__ import annotations

from dataclasses import dataclass

from intentkv.protocols import CaptureRequest
from intentkv.spans import Prompt


@dataclass(frozen=True)
class NoQueries:
    decode: bool = False
    decode_limit: int = 0

    def requests(self, prompt: Prompt) -> list[CaptureRequest]:
        return []
