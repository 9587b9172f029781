"""The last tokens of the prompt (SnapKV's observation window)."""

from __future__ import annotations

from dataclasses import dataclass

from intentkv.protocols import CaptureRequest
from intentkv.spans import Prompt, Span


def observation_window(prompt: Prompt, size: int) -> CaptureRequest:
    """The last ``size`` tokens of the prompt, all of them."""
    return CaptureRequest(Span("unknown", max(0, prompt.length - size), prompt.length), "raw", size)


@dataclass(frozen=True)
class ObservationWindow:
    size: int
    decode: bool = False
    decode_limit: int = 0

    def requests(self, prompt: Prompt) -> list[CaptureRequest]:
        return [observation_window(prompt, self.size)]
