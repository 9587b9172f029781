"""Labelled examples: one eviction each, its candidates' features and what the future says about them.

Stored as a ``datasets`` dataset in shards (one folder each). Building goes on where an earlier run stopped, and holds one conversation
and one shard in memory, whatever the size of the logs.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import load, save
from tqdm import tqdm

from intentkv.aggregators.learned import HeadFeatures, head_queries
from intentkv.aggregators.query_memory import QueryMemoryRule
from intentkv.config import ConfigError
from intentkv.head import FeatureSet, HeadInputs, ModelShape, RuleName
from intentkv.selection import ForcedKeep
from intentkv.spans import Prompt
from intentkv.trajectories import Broken, Trajectory, read_trajectories, sha256_of
from intentkv_training.labels import LABELS, Label, argument_texts, future_attention, future_queries, matched_tokens
from intentkv_training.model import FrozenModel, Reading
from intentkv_training.session import Tokens, Turn, pieces, tokenise, turns

Split = Literal["train", "validation", "test"]

SETTINGS_FILE = "settings.json"
STATE_FILE = "state.json"


class ExampleSettings(BaseModel):
    """What examples of one folder have in common; a folder is continued only under equal settings."""

    # Those of an earlier version, which had others, are refused: their examples have other features.
    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    shape: ModelShape
    data_sha256: str
    max_tokens: int = Field(default=6000, ge=1)
    """Length of a piece; it ends behind its last whole message that fits."""
    pieces: int = Field(default=8, ge=1)
    """Pieces of a longer conversation, at most (:func:`intentkv_training.session.pieces`)."""
    per_piece: int = Field(default=8, ge=1)
    """Turns of one piece that become examples, evenly spaced."""
    min_history: int = Field(default=256, ge=1)
    """Candidates below which nothing is to be learned."""
    horizon_turns: int = Field(default=2, ge=1)
    """Assistant turns whose queries are the future."""
    horizon_queries: int = Field(default=256, ge=1)
    """Their queries, at most, evenly sampled."""
    calls: int = Field(default=5, ge=1)
    """Tool calls that the published label looks ahead."""
    validation: float = Field(default=0.1, ge=0, lt=1)
    test: float = Field(default=0.25, ge=0, lt=1)
    """Shares of the groups that are held out."""
    seed: int = 0
    """Of the split."""
    tools: bool = False
    """List the tools in the system message, where a log has messages and no token ids."""
    decay: float = 0.5
    turn_queries: int = 64
    window: int = 32
    layer_stride: int = 1
    floor: float = 1e-6
    """As the server's configuration and the head's."""


def split_of(group: str, settings: ExampleSettings) -> Split:
    """The split of a group, from its name alone: trials of one task never meet in two splits."""
    digest = hashlib.sha256(f"{settings.seed}/{group}".encode()).digest()
    place = int.from_bytes(digest[:8], "big") / 2**64
    if place < settings.test:
        return "test"
    return "validation" if place < settings.test + settings.validation else "train"


@dataclass(frozen=True)
class Example:
    """One eviction. Tensors on the CPU."""

    inputs: dict[RuleName, HeadInputs]
    """With all features, by rule."""
    labels: dict[Label, torch.Tensor]
    """[n] float32 each."""
    template: torch.Tensor
    """[n] bool: tokens of the chat template, not of any message's content."""

    def to_bytes(self) -> bytes:
        """As safetensors; keys and features in half precision, what both rules share once."""
        some = self.inputs["assistant"]
        tensors = {
            "keys": some.keys.half(),
            "memory": some.memory,
            "query_keys": some.query_keys.half(),
            "extra": some.extra.half(),
            "template": self.template,
            "labels": torch.stack([self.labels[name] for name in LABELS]),
        }
        tensors |= {f"rule_{name}": inputs.rule for name, inputs in self.inputs.items()}
        return save({name: value.contiguous().cpu() for name, value in tensors.items()})

    @classmethod
    def from_bytes(cls, data: bytes, floor: float) -> Example:
        """What :meth:`to_bytes` gave; ``floor`` is that of the settings it was made with."""
        tensors = load(data)
        rule = tensors["rule_assistant"]
        some = HeadInputs(tensors["keys"].float(), tensors["memory"], tensors["query_keys"].float(), rule, tensors["extra"].float())
        inputs: dict[RuleName, HeadInputs] = {
            "assistant": some.beside(rule, floor),  # not its half-precision column
            "intentkv": some.beside(tensors["rule_intentkv"], floor),
        }
        return cls(inputs, dict(zip(LABELS, tensors["labels"], strict=True)), tensors["template"])


def candidates(prompt: Prompt) -> torch.Tensor:
    """Positions that a method chooses from: [n] int64."""
    return torch.nonzero(~ForcedKeep().mask(prompt)).flatten()


def session_turns(tokens: Tokens, reading: Reading, model: FrozenModel, settings: ExampleSettings) -> Iterator[Turn]:
    """The conversation's turns with everything captured that any feature needs."""
    source = head_queries("assistant", "layered", settings.turn_queries, settings.window)
    return turns(tokens, reading, model.parser, source, [HeadFeatures(settings.decay, settings.floor, layered=True)])


def head_inputs(turn: Turn, history: torch.Tensor, rule: RuleName, feature_set: FeatureSet, settings: ExampleSettings) -> HeadInputs:
    """What a server would give a head at this turn for the candidates ``history`` ([n] int64)."""
    features = HeadFeatures(settings.decay, settings.floor, layered=True)
    return features.inputs(rule, feature_set, turn.state, history.to(turn.keys.device), turn.captured, turn.keys, turn.prompt)


def make_example(
    turn: Turn, tokens: Tokens, reading: Reading, trajectory: Trajectory, model: FrozenModel, settings: ExampleSettings
) -> Example:
    """Features and labels of one turn.

    Args:
        tokens: what ``reading`` has read, to its end: labels look behind the turn.
        trajectory: the whole conversation's messages, for the published label.
    """
    history = candidates(turn.prompt)
    some = head_inputs(turn, history, "assistant", "layered", settings).to("cpu")
    published = QueryMemoryRule(settings.decay).score(turn.state, history.to(turn.keys.device), (), turn.keys, turn.prompt).cpu()
    inputs: dict[RuleName, HeadInputs] = {"assistant": some, "intentkv": some.beside(published, settings.floor)}
    answers = [span for span in tokens.messages if span.role == "assistant" and span.start >= turn.answer.start]
    positions = future_queries(answers[: settings.horizon_turns], settings.horizon_queries)
    future = future_attention(reading, turn.prompt.length, positions)
    at = history.to(reading.device)
    labels: dict[Label, torch.Tensor] = {
        "published": _published(history, turn, tokens, trajectory, model, settings.calls),
        "mass": future.mass[at].cpu(),
        "energy": future.energy[at].cpu(),
        "value_energy": future.value_energy[at].cpu(),
    }
    return Example(inputs, labels, _template_tokens(tokens)[history])


def _published(history: torch.Tensor, turn: Turn, tokens: Tokens, trajectory: Trajectory, model: FrozenModel, calls: int) -> torch.Tensor:
    """1 where a token's text is part of an argument of the next tool calls."""
    said = [i for i, message in enumerate(trajectory.messages) if message.role == "assistant"]
    before = tokens.skipped + sum(span.role == "assistant" and span.start < turn.answer.start for span in tokens.messages)
    if before >= len(said):
        return torch.zeros(history.shape[0])
    wanted = argument_texts(trajectory.messages[said[before] :], calls)
    return matched_tokens(model.pieces(tokens.ids[: turn.prompt.length]), wanted)[history].float()


def _template_tokens(tokens: Tokens) -> torch.Tensor:
    """[n] bool, True at message headers and ends."""
    mask = torch.zeros(len(tokens.ids), dtype=torch.bool)
    for span in tokens.messages:
        mask[span.start : span.start + len(tokens.generation_prompt)] = True
        mask[span.end - len(tokens.message_end) : span.end] = True
    return mask


# ---- On disk ----


class _State(BaseModel):
    """How far an earlier run came."""

    trajectories: int = 0
    shards: int = 0
    complete: bool = False
    counts: dict[str, int] = Field(default_factory=dict)


class ExampleStore:
    """A folder of shards, its settings and its progress."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin(self, settings: ExampleSettings) -> _State:
        """Make the folder, or continue it.

        Raises:
            ConfigError: it holds examples of other settings or of another version.
        """
        file = self._folder / SETTINGS_FILE
        if not file.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            file.write_text(settings.model_dump_json(indent=2) + "\n", encoding="utf-8")
        elif self.settings() != settings:
            raise ConfigError(f"{str(self._folder)!r} holds examples made with other settings; give another folder or delete it.")
        state = self._folder / STATE_FILE
        return _State.model_validate_json(state.read_bytes()) if state.exists() else _State()

    def settings(self) -> ExampleSettings:
        """Raises:
        ConfigError: the folder holds no examples, or those of another version.
        """
        file = self._folder / SETTINGS_FILE
        try:
            return ExampleSettings.model_validate_json(file.read_bytes())
        except (OSError, ValidationError) as error:
            raise ConfigError(
                f"{str(self._folder)!r} holds no examples of this version; make them with 'intentkv train examples' in a new folder."
            ) from error

    def append(self, rows: Sequence[dict[str, Any]], state: _State) -> _State:
        """Write a shard, then the progress that includes it: an interrupted run leaves nothing half done."""
        import datasets

        shards = state.shards
        if rows:
            datasets.disable_progress_bars()
            target = self._folder / f"shard-{shards:05d}"
            partial = target.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(target, ignore_errors=True)
            datasets.Dataset.from_list(list(rows)).save_to_disk(str(partial))
            partial.rename(target)
            shards += 1
        state = state.model_copy(update={"shards": shards})
        temporary = self._folder / f"{STATE_FILE}.partial"
        temporary.write_text(state.model_dump_json(indent=2) + "\n", encoding="utf-8")
        temporary.replace(self._folder / STATE_FILE)
        return state

    def load(self, split: Split) -> Any:
        """The split as a memory-mapped ``datasets.Dataset`` with columns id, group, source, split, turn, n, tensors.

        Raises:
            ConfigError: there is none.
        """
        import datasets

        datasets.disable_progress_bars()
        shards = [datasets.load_from_disk(str(p)) for p in sorted(self._folder.glob("shard-?????"))]
        if not shards:
            raise ConfigError(f"{str(self._folder)!r} holds no examples; make them with 'intentkv train examples'.")
        whole = datasets.concatenate_datasets(shards)
        return whole.select([i for i, name in enumerate(whole["split"]) if name == split])


def build_examples(
    files: Sequence[Path], out: Path, model: FrozenModel, settings: ExampleSettings, shard_bytes: int = 64 << 20, limit: int | None = None
) -> Counter[str]:
    """Turn logs into examples, continuing an interrupted run.

    Args:
        shard_bytes: a shard is closed behind the trajectory that fills it. Until then its rows are in memory: at most this, and the rows of
            one trajectory (``pieces * per_piece`` of some MB each).
        limit: at most this many trajectories; a later call with more of them goes on.

    Returns:
        What was made and what was left out, by reason.

    Raises:
        ConfigError: a file cannot be read, or ``out`` holds examples of other settings.
    """
    store = ExampleStore(out)
    state = store.begin(settings)
    counts = Counter(state.counts)
    if state.complete:
        return counts
    rows: list[dict[str, Any]] = []
    size = 0
    progress = tqdm(desc="examples", unit="trajectory", initial=0)
    number, limited = 0, False
    for item in read_trajectories(files):
        if isinstance(item, Broken):
            if number >= state.trajectories:
                counts["broken lines"] += 1
                tqdm.write(str(item))
            continue
        number += 1
        progress.update()
        if number > state.trajectories:
            for row in _rows(item, model, settings, counts):
                rows.append(row)
                size += len(row["tensors"])
        if size >= shard_bytes:
            state = store.append(rows, state.model_copy(update={"trajectories": number, "counts": dict(counts)}))
            rows, size = [], 0
        limited = number == limit
        if limited:
            break
    progress.close()
    made = max(number, state.trajectories)
    store.append(rows, state.model_copy(update={"trajectories": made, "counts": dict(counts), "complete": not limited}))
    return counts


def _rows(trajectory: Trajectory, model: FrozenModel, settings: ExampleSettings, counts: Counter[str]) -> Iterator[dict[str, Any]]:
    counts["trajectories"] += 1
    whole = tokenise(trajectory, model, settings.tools)
    if not any(span.role == "assistant" for span in whole.messages):
        counts["trajectories without an assistant turn"] += 1
        return
    for tokens in pieces(whole, min(settings.max_tokens, model.context), settings.pieces):
        counts["pieces"] += 1
        chosen = _chosen_turns(tokens, model, settings)
        if chosen:
            yield from _piece_rows(trajectory, tokens, chosen, model, settings, counts)
        else:
            counts["pieces too short"] += 1


def _piece_rows(
    trajectory: Trajectory, tokens: Tokens, chosen: set[int], model: FrozenModel, settings: ExampleSettings, counts: Counter[str]
) -> Iterator[dict[str, Any]]:
    reading = model.read(tokens.ids, settings.layer_stride)
    for turn in session_turns(tokens, reading, model, settings):
        if turn.number not in chosen:
            continue
        example = make_example(turn, tokens, reading, trajectory, model, settings)
        counts["examples"] += 1
        counts["candidates"] += example.template.shape[0]
        counts["template tokens among them"] += int(example.template.sum())
        if not example.labels["published"].any():
            counts["examples without evidence for the published label"] += 1
        yield {
            "id": trajectory.id,
            "group": trajectory.group,
            "source": trajectory.source,
            "split": split_of(trajectory.group, settings),
            "turn": tokens.skipped + turn.number,
            "n": example.template.shape[0],
            "tensors": example.to_bytes(),
        }


def _chosen_turns(tokens: Tokens, model: FrozenModel, settings: ExampleSettings) -> set[int]:
    """Numbers of the turns with enough history, evenly thinned."""
    usable = []
    answers = [span for span in tokens.messages if span.role == "assistant"]
    for number, answer in enumerate(answers):
        prompt = model.parser.parse(tokens.ids[: answer.start + len(tokens.generation_prompt)], 0)
        if answer.start and candidates(prompt).shape[0] >= settings.min_history:
            usable.append(number)
    stride = -(-len(usable) // settings.per_piece) if usable else 1
    return set(usable[::-1][::stride])


def example_settings(model: FrozenModel, files: Sequence[Path], **options: Any) -> ExampleSettings:
    """Settings for ``model`` and the given logs.

    Raises:
        ConfigError: a file cannot be read or an option is invalid.
    """
    try:
        return ExampleSettings(model=Path(model.name).name, shape=model.shape, data_sha256=sha256_of(files), **options)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"Option {'.'.join(map(str, first['loc']))!r}: {first['msg']} (got {json.dumps(first['input'])}).") from error
