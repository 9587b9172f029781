"""Where a recorded trajectory is cut to measure fidelity: history in front, recorded continuation behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from tqdm import tqdm

from intentkv import cuts
from intentkv.config import ConfigError
from intentkv.conversation import Conversation
from intentkv.cuts import CutRules
from intentkv.trajectories import Trajectory
from intentkv_eval.client import ServerClient
from intentkv_eval.conversation import choose_template, encode


class Settings(CutRules):
    """What makes rows of one folder comparable; a folder is continued only under equal settings."""

    model: str
    dataset_sha256: str
    per_source: int
    tools: bool
    turn_by_turn: bool = False
    """Evict at every recorded turn up to the cut; otherwise once, at the cut."""


class Case(NamedTuple):
    """One trajectory, cut: ``ids[:cut]`` is the history, ``ids[cut:]`` is read teacher-forced."""

    trajectory: Trajectory
    ids: list[int]
    cut: int
    scored: list[int]
    """Offsets behind the cut, from 1, of recorded assistant tokens, their template markers included."""
    turns: tuple[int, ...] = ()
    """Where an assistant message begins in front of the cut: ends of prompts that are evicted from on the way, ascending."""


def find_cut(trajectory: Trajectory, conversation: Conversation, settings: Settings) -> Case | None:
    """The last cut behind a tool or user message that leaves enough assistant text, or None."""
    spans = conversation.spans
    cut = cuts.find_cut(spans, settings)
    if cut is None:
        return None
    turns: list[int] = []
    if settings.turn_by_turn:
        turns = [span.start for before, span in pairwise(spans) if span.role == "assistant" and before.role in ("tool", "user")]
    return Case(trajectory, conversation.ids[: cut.end], cut.at, cut.scored, tuple(start for start in turns if start < cut.at))


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
