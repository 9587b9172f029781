"""What the report reads: what ``intentkv replay``, ``record``, ``watch`` and the benchmarks wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from intentkv.config import ConfigError
from intentkv.recording import shards
from intentkv.trajectories import is_request_log, sha256_of
from intentkv_eval import bench_capacity, bench_decode, bench_prune
from intentkv_eval.bench_counters import PruneFigures
from intentkv_eval.provenance import Provenance
from intentkv_eval.replay import SUMMARY_FILE, TURNS_FILE, Summary
from intentkv_eval.samples import SAMPLES_FILE, WATCH_FILE, Sample, WatchInfo
from intentkv_eval.served import read_served
from intentkv_eval.turns import TurnRecord

Model = TypeVar("Model", bound=BaseModel)


class Run(NamedTuple):
    """One arm: its turns, its pool over time, and what is known of the run as a whole."""

    label: str
    turns: list[TurnRecord]
    samples: list[Sample]
    stock: bool
    """The server ran without the plugin."""
    prune: PruneFigures | None
    wall_s: float | None
    provenance: Provenance | None
    data_sha256: str | None


class Logs(NamedTuple):
    """Everything a report is made from."""

    runs: list[Run]
    decode: list[bench_decode.Result]
    prune: list[bench_prune.Result]
    broken: list[str]
    """``file:line: reason`` of lines of request logs that could not be read."""


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"Cannot read {error.filename!r}: {error.strerror}; give folders that a finished 'intentkv replay', 'intentkv watch', "
            "'intentkv record' or a benchmark wrote."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{str(file)!r} is not a text file; give folders that 'intentkv replay' wrote.") from error


def _read(model: type[Model], file: Path) -> Model:
    return _parse(model, file, _text(file))


def _read_lines(model: type[Model], file: Path) -> list[Model]:
    return [_parse(model, file, line) for line in _text(file).splitlines()]


def _parse(model: type[Model], file: Path, text: str) -> Model:
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        message = f"{str(file.parent)!r} does not hold a run of this version: {file.name}: {error.errors()[0]['msg']}."
        raise ConfigError(message) from error


def load_run(folder: Path) -> Run:
    """Read what ``intentkv replay`` wrote.

    Raises:
        ConfigError: a file is missing or not from this version.
    """
    summary = _read(Summary, folder / SUMMARY_FILE)
    return Run(
        label=summary.arm,
        turns=_read_lines(TurnRecord, folder / TURNS_FILE),
        samples=_samples(folder),
        stock=summary.provenance.method is None,
        prune=summary.prune,
        wall_s=summary.aggregates.wall_s,
        provenance=summary.provenance,
        data_sha256=summary.dataset.sha256,
    )


def _samples(folder: Path) -> list[Sample]:
    file = folder / SAMPLES_FILE
    return _read_lines(Sample, file) if file.exists() else []


def _load_watch(folder: Path) -> Run:
    info = _read(WatchInfo, folder / WATCH_FILE)
    samples = _samples(folder)
    return Run(
        label=info.arm,
        turns=[],
        samples=samples,
        stock=False,
        prune=_prune_of(samples),
        wall_s=samples[-1].time_s - samples[0].time_s if samples else None,
        provenance=info.provenance,
        data_sha256=None,
    )


def _prune_of(samples: Sequence[Sample]) -> PruneFigures | None:
    """Evictions between the first and the last sample; their percentiles are not in the samples."""
    if not samples:
        return None
    first, last = samples[0].counters, samples[-1].counters
    events, seconds = last.prune_events - first.prune_events, last.prune_seconds - first.prune_seconds
    return PruneFigures(
        events=events,
        tokens=last.pruned_tokens - first.pruned_tokens,
        mean_s=seconds / events if events else None,
        p50_s=None,
        p99_s=None,
        declined={reason: count - first.declined.get(reason, 0) for reason, count in last.declined.items()},
    )


def _load_capacity(folder: Path) -> list[Run]:
    """One run for each arm, pool and round of a throughput benchmark."""
    result = _read(bench_capacity.Result, folder / bench_capacity.RESULT_FILE)
    turns = _read_lines(bench_capacity.Turn, folder / bench_capacity.TURNS_FILE)
    runs = []
    for cell in result.cells:
        name = f"{cell.arm}, pool {cell.pool_share:.0%}" + (f", round {cell.round + 1}" if result.options.rounds > 1 else "")
        kind = "stock" if cell.arm == "stock" else "plugin"
        origins = result.origin.servers
        runs.append(
            Run(
                label=name,
                turns=[t for t in turns if (t.arm, t.pool_share, t.round) == (cell.arm, cell.pool_share, cell.round)],
                samples=[],
                stock=cell.arm == "stock",
                prune=cell.prune,
                wall_s=cell.window_s,
                provenance=origins.get(kind) or origins.get(f"{kind}, pool {cell.pool_share:g}"),
                data_sha256=result.origin.data_sha256,
            )
        )
    return runs


def _request_logs(path: Path) -> list[Path]:
    """The request logs of a folder, or the log itself; empty for anything else."""
    if path.is_dir():
        return shards(path)
    return [path] if path.is_file() and is_request_log(path) else []


def _load_served(files: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """One run for each method and limit that served, and the lines that could not be read.

    Raises:
        ConfigError: no request could be read.
    """
    served = read_served(files)
    if not served.turns:
        reason = served.broken[0] if served.broken else "no requests were logged"
        raise ConfigError(f"{str(files[0].parent)!r} holds no request that could be read: {reason}.")
    sha256 = sha256_of(files)  # reads them whole
    runs = [
        Run(
            label=arm,
            turns=[turn for turn in served.turns if turn.arm == arm],
            samples=[],
            stock=False,
            prune=None,
            wall_s=None,
            provenance=None,
            data_sha256=sha256,
        )
        for arm in dict.fromkeys(turn.arm for turn in served.turns)
    ]
    return runs, served.broken


def load(folders: Sequence[Path]) -> Logs:
    """Read any number of folders; what each holds is told by its files. Runs of one name are told apart by their folder's.

    Request logs may also be given as files; those of one folder are one sequence.

    Raises:
        ConfigError: a folder holds nothing that is known, or a file of another version.
    """
    found: list[tuple[Run, Path]] = []
    decode, prune = [], []
    served: dict[Path, list[Path]] = {}
    for folder in folders:
        if (folder / bench_capacity.RESULT_FILE).exists():
            found += [(run, folder) for run in _load_capacity(folder)]
        elif (folder / bench_decode.RESULT_FILE).exists():
            decode.append(_read(bench_decode.Result, folder / bench_decode.RESULT_FILE))
        elif (folder / bench_prune.RESULT_FILE).exists():
            prune.append(_read(bench_prune.Result, folder / bench_prune.RESULT_FILE))
        elif (folder / WATCH_FILE).exists():
            found.append((_load_watch(folder), folder))
        elif logs := _request_logs(folder):
            served.setdefault(logs[0].parent, []).extend(logs)
        else:
            found.append((load_run(folder), folder))
    broken: list[str] = []
    for folder, files in served.items():
        runs, unread = _load_served(sorted(set(files)))
        found += [(run, folder) for run in runs]
        broken += unread
    return Logs(_told_apart(found), decode, prune, broken)


def _told_apart(found: Sequence[tuple[Run, Path]]) -> list[Run]:
    labels = [run.label for run, _ in found]
    runs = [run._replace(label=f"{run.label} ({folder.name})") if labels.count(run.label) > 1 else run for run, folder in found]
    seen: dict[str, int] = {}
    for i, run in enumerate(runs):  # two folders of one name, too
        seen[run.label] = seen.get(run.label, 0) + 1
        if seen[run.label] > 1:
            runs[i] = run._replace(label=f"{run.label} #{seen[run.label]}")
    return runs


def baseline(runs: Sequence[Run], name: str | None = None) -> Run | None:
    """The run that others are compared with: the one called ``name``, else the first of a stock server, else the first; all have turns.

    Raises:
        ConfigError: no run with turns is called ``name``.
    """
    candidates = [run for run in runs if run.turns]
    if name is not None:
        named = [run for run in candidates if run.label == name]
        if not named:
            raise ConfigError(f"No run is called {name!r}; --baseline takes one of {json.dumps([r.label for r in candidates])}.")
        return named[0]
    return next((run for run in candidates if run.stock), candidates[0] if candidates else None)
