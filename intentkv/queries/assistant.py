"""The assistant's own queries, captured in whichever pass computes them."""

from __future__ import annotations

from dataclasses import dataclass

from intentkv.protocols import CaptureRequest
from intentkv.queries.window import observation_window
from intentkv.spans import Prompt

_NEWEST_TURNS = 8
"""Older turns weigh e^(-8 lambda) < 2 % at lambda = 0.5."""


@dataclass(frozen=True)
class AssistantTurns:
    """Single queries of the assistant's turns: of generated tokens in decode, of turns a client sends in extend.

    The observation window rides along: it scores what no assistant query has seen yet.
    """

    decode_limit: int
    window: int
    decode: bool = True

    def requests(self, prompt: Prompt) -> list[CaptureRequest]:
        turns = [CaptureRequest(span, "raw", self.decode_limit) for span in prompt.of_role("assistant")[-_NEWEST_TURNS:]]
        return [*turns, observation_window(prompt, self.window)]
