"""Stock SGLang and IntentKV with the same, too small KV pool: ``python -m intentkv_eval.capacity``.

Several agents run at once and their pool is a share of what they need in the end. A stock server evicts whole prefixes and computes them
again; IntentKV keeps every session within its budget. Same flags for both, a fresh server for each run, arms alternating.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand

from intentkv.cli import OneLineErrors
from intentkv.config import ConfigError, load_config
from intentkv_eval.client import RequestFailed, connect
from intentkv_eval.replay import Plan, ReplayOptions, Summary, make_plans, replay
from intentkv_eval.server import ServerError, running_server
from intentkv_eval.trajectories import Dataset, load_dataset
from intentkv_eval.turns import Aggregates

RESULT_FILE = "capacity.json"
STOCK = "stock"


class Arm(NamedTuple):
    name: str
    arguments: list[str]
    """Flags of ``intentkv serve`` that only this arm has."""


class ArmResult(BaseModel):
    arm: str
    round: int
    folder: str
    """With the run's own turns.jsonl and summary.json, which say everything else about it."""
    aggregates: Aggregates


class CapacityResult(BaseModel):
    """``capacity.json``."""

    sessions: int
    working_set_tokens: int
    """Sum of the sessions' logical tokens at their end."""
    pool_tokens: int
    arms: list[ArmResult]


def pool_size(plans: Sequence[Plan], share: float) -> tuple[int, int]:
    """Working set of the sessions and the pool that is ``share`` of it, in tokens.

    Raises:
        ConfigError: a session has no turn, or would not fit the pool even alone.
    """
    empty = [plan.trajectory.id for plan in plans if not plan.turns]
    if empty:
        raise ConfigError(f"Trajectory {empty[0]!r} has no turn within --max-context; raise it or leave that trajectory out.")
    sizes = [plan.final_tokens for plan in plans]
    pool = int(share * sum(sizes))
    if max(sizes) >= pool:
        raise ConfigError(f"The longest session needs {max(sizes)} tokens, the pool would have {pool}; raise --share or --sessions.")
    return sum(sizes), pool


def measure_arms(arms: Sequence[Arm], rounds: int, play: Callable[[Arm, int], Summary]) -> list[tuple[int, Summary]]:
    """Run every arm ``rounds`` times, alternating, so that a drift of the machine meets all of them."""
    return [(number, play(arm, number)) for number in range(rounds) for arm in arms]


async def _plan(url: str, dataset: Dataset, options: ReplayOptions) -> list[Plan]:
    async with connect(url, options.timeout_s) as client:
        try:
            return await make_plans(client, dataset, options.template, options.max_context, options.max_tokens)
        except RequestFailed as error:
            raise ConfigError(f"The server does not tokenise: {error}.") from error


def run(
    options: ReplayOptions, server_arguments: list[str], arms: Sequence[Arm], share: float, rounds: int, start_timeout_s: float
) -> CapacityResult:
    """Size the pool, run all arms and write ``capacity.json``.

    Args:
        options: of the replays; ``limit`` and ``concurrency`` are the sessions, ``url``, ``out`` and ``arm`` are set here.
        server_arguments: flags of ``intentkv serve`` that all arms share.

    Raises:
        ConfigError: unusable input, or results are there already.
        ServerError: a server did not start.
    """
    out = options.out
    if (out / RESULT_FILE).exists():
        raise ConfigError(f"Folder {str(out)!r} holds results already; give another --out.")
    dataset = load_dataset(options.files, options.limit)
    out.mkdir(parents=True, exist_ok=True)
    # how many tokens the sessions have depends on the model's tokenizer, and the pool's size is a start-up flag
    with running_server([*server_arguments, "--stock"], out / "sizing.log", start_timeout_s) as server:
        plans = asyncio.run(_plan(server.url, dataset, options))
    working_set, pool = pool_size(plans, share)
    results: list[ArmResult] = []
    for number in range(rounds):
        for arm in arms:  # alternating, so that a drift of the machine meets all of them
            folder = out / f"{arm.name}-{number}"
            arguments = [*server_arguments, *arm.arguments, "--max-total-tokens", str(pool)]
            with running_server(arguments, folder / "server.log", start_timeout_s) as server:
                summary = asyncio.run(replay(options.model_copy(update={"url": server.url, "out": folder, "arm": arm.name})))
            results.append(ArmResult(arm=arm.name, round=number, folder=folder.name, aggregates=summary.aggregates))
    result = CapacityResult(sessions=len(plans), working_set_tokens=working_set, pool_tokens=pool, arms=results)
    (out / RESULT_FILE).write_text(result.model_dump_json(indent=2) + "\n")
    return result
