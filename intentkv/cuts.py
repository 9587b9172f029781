"""Where a recorded conversation is cut to measure what eviction costs: history in front, recorded continuation behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from intentkv.spans import Span


class CutRules(BaseModel):
    """Which cuts are usable. Tokens."""

    model_config = ConfigDict(frozen=True)

    window: int = 5200
    """Only messages that fit these first tokens of a trajectory are used."""
    least_window: int = 3500
    """Trajectories whose window is shorter are left out."""
    least_cut: int = 2500
    least_history: int = 500
    """Tokens between the system prefix and the newest message before the cut: what a method chooses from."""
    least_future: int = 150
    """Recorded assistant tokens behind the cut."""
    future: int = 320
    """Tokens read behind the cut, at most."""


class Cut(NamedTuple):
    """``ids[:at]`` is the history, ``ids[at:end]`` is read teacher-forced."""

    at: int
    end: int
    scored: list[int]
    """Offsets behind the cut, from 1, of recorded assistant tokens, their template markers included."""


def find_cut(messages: Sequence[Span], rules: CutRules) -> Cut | None:
    """The last cut behind a tool or user message that leaves enough assistant text, or None."""
    spans = [span for span in messages if span.end <= rules.window]
    if not spans or spans[-1].end < rules.least_window:
        return None
    system_end = spans[0].end if spans[0].role == "system" else 0
    assistant = 0
    for number in range(len(spans) - 1, 1, -1):
        if spans[number].role == "assistant":
            assistant += len(spans[number])
        newest = spans[number - 1]
        if (
            newest.role in ("tool", "user")
            and assistant >= rules.least_future
            and newest.end > rules.least_cut
            and newest.start - system_end >= rules.least_history
        ):
            end = min(newest.end + rules.future, spans[-1].end)
            return Cut(newest.end, end, _scored(spans[number:], newest.end, end))
    return None


def _scored(spans: Sequence[Span], cut: int, end: int) -> list[int]:
    # the token right behind the cut is predicted by the history's last position, which is cached and gives no logits
    return [p - cut for span in spans if span.role == "assistant" for p in range(max(span.start, cut + 1), min(span.end, end))]
