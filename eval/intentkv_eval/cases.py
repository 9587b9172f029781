"""Where a recorded trajectory is cut to measure fidelity: history in front, recorded continuation behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict
from tqdm import tqdm

from intentkv.config import ConfigError
from intentkv.conversation import Conversation
from intentkv.spans import Span
from intentkv.trajectories import Trajectory
from intentkv_eval.client import ServerClient
from intentkv_eval.conversation import choose_template, encode


class Settings(BaseModel):
    """What makes rows of one folder comparable; a folder is continued only under equal settings."""

    model_config = ConfigDict(frozen=True)

    model: str
    dataset_sha256: str
    per_source: int
    tools: bool
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


class Case(NamedTuple):
    """One trajectory, cut: ``ids[:cut]`` is the history, ``ids[cut:]`` is read teacher-forced."""

    trajectory: Trajectory
    ids: list[int]
    cut: int
    scored: list[int]
    """Offsets behind the cut, from 1, of recorded assistant tokens, their template markers included."""


def find_cut(trajectory: Trajectory, conversation: Conversation, settings: Settings) -> Case | None:
    """The last cut behind a tool or user message that leaves enough assistant text, or None."""
    spans = [span for span in conversation.spans if span.end <= settings.window]
    if not spans or spans[-1].end < settings.least_window:
        return None
    system_end = spans[0].end if spans[0].role == "system" else 0
    assistant = 0
    for number in range(len(spans) - 1, 1, -1):
        if spans[number].role == "assistant":
            assistant += len(spans[number])
        newest = spans[number - 1]
        if (
            newest.role in ("tool", "user")
            and assistant >= settings.least_future
            and newest.end > settings.least_cut
            and newest.start - system_end >= settings.least_history
        ):
            end = min(newest.end + settings.future, spans[-1].end)
            return Case(trajectory, conversation.ids[:end], newest.end, _scored(spans[number:], newest.end, end))
    return None


def _scored(spans: Sequence[Span], cut: int, end: int) -> list[int]:
    # the token right behind the cut is predicted by the history's last position, which is cached and gives no logits
    return [p - cut for span in spans if span.role == "assistant" for p in range(max(span.start, cut + 1), min(span.end, end))]


async def find_cases(client: ServerClient, trajectories: Sequence[Trajectory], settings: Settings, template: str | None) -> list[Case]:
    """At most ``settings.per_source`` usable trajectories a source, in the order given.

    Raises:
        ConfigError: none is long enough, or no chat template fits.
    """
    chosen = await choose_template(template, client.tokenize)
    found: Counter[str] = Counter()
    cases = []
    for trajectory in tqdm(trajectories, desc="choosing", unit="trajectory"):
        if found[trajectory.source] >= settings.per_source:
            continue
        kept = trajectory if settings.tools else trajectory.model_copy(update={"tools": ()})
        case = find_cut(kept, await encode(kept, chosen, client.tokenize), settings)
        if case is not None:
            found[trajectory.source] += 1
            cases.append(case)
    if not cases:
        raise ConfigError(
            f"No trajectory has {settings.least_window} tokens and a cut with {settings.least_future} assistant tokens behind it."
        )
    return cases
