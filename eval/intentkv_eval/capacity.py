"""Stock SGLang and IntentKV with the same, too small KV pool: ``python -m intentkv_eval.capacity``.

Several agents run at once and their pool is a share of what they need in the end. A stock server evicts whole prefixes and computes them
again; IntentKV keeps every session within its budget. Same flags for both, a fresh server for each run, arms alternating.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand

from intentkv.cli import OneLineErrors
from intentkv.config import ConfigError, load_config
from intentkv.trajectories import Dataset, load_dataset
from intentkv_eval.client import RequestFailed, connect
from intentkv_eval.replay import Plan, ReplayOptions, make_plans, replay
from intentkv_eval.server import ServerError, running_server
from intentkv_eval.turns import Aggregates

RESULT_FILE = "capacity.json"


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


def _table(result: CapacityResult) -> Table:
    table = Table(title=f"{result.sessions} sessions, {result.working_set_tokens:,} tokens in the end, pool of {result.pool_tokens:,}")
    for column in ("arm", "round", "failed turns", "prefix hit", "recomputed tokens", "peak live", "wall"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for run in result.arms:
        figures = run.aggregates
        table.add_row(
            run.arm,
            str(run.round + 1),
            str(figures.failed_turns + figures.skipped_turns),
            f"{figures.prefix_hit_rate:.1%}",
            f"{figures.recomputed_tokens:,}",
            f"{figures.peak_live_max:,}",
            f"{figures.wall_s:.1f} s",
        )
    return table


class _Command(OneLineErrors, TyperCommand):
    pass


app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command(cls=_Command, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def main(
    context: typer.Context,
    files: Annotated[list[Path], typer.Option("--input", help="Recorded agents, JSONL; may be given again.")],
    out: Annotated[Path, typer.Option(help="Folder for capacity.json and the runs.")],
    model: Annotated[str | None, typer.Option(help="Model folder or Hugging Face id.")] = None,
    method: Annotated[str | None, typer.Option(help="Method of the intentkv arm.")] = None,
    budget: Annotated[int | None, typer.Option(help="Budget of the intentkv arm, in tokens a request.")] = None,
    sessions: Annotated[int, typer.Option(min=1, help="Agents that run at once: the first trajectories of the input.")] = 4,
    share: Annotated[float, typer.Option(min=0.01, max=1, help="Pool as a share of the sessions' final tokens.")] = 0.6,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each arm, alternating.")] = 1,
    max_context: Annotated[int, typer.Option(min=1, help="Cut a trajectory before it grows past this many tokens.")] = 8000,
    max_tokens: Annotated[int, typer.Option(min=1, help="At most this many generated tokens a turn.")] = 512,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds a turn may take.")] = 600,
    start_timeout: Annotated[float, typer.Option(min=1, help="Seconds a server may take to start.")] = 600,
) -> int:
    """Run the same agents on stock SGLang and on IntentKV with an equal KV pool that is too small for them.

    Every other flag goes to both servers. Exit status 1 when a turn failed or a server did not start.
    """
    load_config(None, method=method, budget=budget)  # a bad value is found here and not after the first server
    flags = {"--method": method, "--budget": budget}
    arms = [
        Arm("stock", ["--stock"]),
        Arm("intentkv", [part for flag, value in flags.items() if value is not None for part in (flag, str(value))]),
    ]
    options = ReplayOptions(
        url="",
        files=files,
        out=out,
        limit=sessions,
        concurrency=sessions,
        max_context=max_context,
        max_tokens=max_tokens,
        timeout_s=timeout,
    )
    arguments = [*(["--model", model] if model else []), *context.args]
    try:
        result = run(options, arguments, arms, share, rounds, start_timeout)
    except ServerError as error:
        typer.echo(f"Error: {error}", err=True)
        return 1
    Console().print(_table(result))
    return 1 if any(arm.aggregates.failed_turns for arm in result.arms) else 0


if __name__ == "__main__":
    app()
