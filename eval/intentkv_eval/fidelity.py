"""What eviction costs in prediction, measured through the server on recorded agents: ``python -m intentkv_eval.fidelity``.

Each trajectory is cut once, behind a tool or user message. For each method and ratio the server prefills the history, evicts (once, or at
every recorded turn on the way), and then reads the recorded continuation teacher-forced on what is left. Against the same with nothing
evicted this gives the change of the negative log-likelihood of the recorded assistant tokens and how often the most likely token stays the
same.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from typer.core import TyperCommand

from intentkv.cli import OneLineErrors
from intentkv.config import ConfigError, RequestOptions, parse_request_options
from intentkv.intervals import Interval, bootstrap
from intentkv.methods import method_info, method_names
from intentkv.trajectories import Dataset, load_dataset
from intentkv_eval.cases import Case, Settings, find_cases
from intentkv_eval.client import RequestFailed, ServerClient, connect, generate_body, plugin_figures
from intentkv_eval.provenance import Provenance, collect
from intentkv_eval.server import ServerError, running_server
from intentkv_eval.turns import OK

ROWS_FILE = "rows.jsonl"
SETTINGS_FILE = "settings.json"
SUMMARY_FILE = "summary.json"
FULL = "full"
_RATIOS = (0.1, 0.25)


class Reading(NamedTuple):
    """Teacher-forced predictions at ``Case.scored``."""

    nll: float
    """Mean negative log-likelihood, nats a token."""
    top: list[int]
    """Most likely token at each offset."""


def align(meta: dict[str, Any], case: Case) -> Reading:
    """Predictions of the recorded assistant tokens from a reply's input log-probabilities.

    With ``logprob_start_len = cut``, entry k of ``input_token_logprobs`` and ``input_top_logprobs`` is about the token at ``cut + k`` given
    all tokens before it; entry 0 is null.

    Raises:
        RequestFailed: the entries are not about the tokens that were sent.
    """
    entries, tops = meta["input_token_logprobs"], meta["input_top_logprobs"]
    future = case.ids[case.cut :]
    if len(entries) != len(future) or len(tops) != len(future):
        raise RequestFailed(f"{len(entries)} and {len(tops)} log-probabilities for {len(future)} tokens")
    for k in case.scored:
        if entries[k][1] != future[k]:
            raise RequestFailed(f"log-probability {k} behind the cut is of token {entries[k][1]}, sent was {future[k]}")
    return Reading(-statistics.fmean(entries[k][0] for k in case.scored), [tops[k][0][1] for k in case.scored])


class Row(BaseModel):
    """One line of ``rows.jsonl``."""

    trajectory: str
    source: str
    method: str
    ratio: float | None
    """Share of the history kept; None for ``full``."""
    status: str
    cut: int
    scored: int
    """Recorded assistant tokens that were predicted."""
    cached: int = 0
    live: int = 0
    dead: int = 0
    """Of the ``cut`` history tokens, as the continuation attended them."""
    nll: float | None = None
    dnll: float | None = None
    top1: float | None = None
    """Share of scored tokens whose most likely token is that of the full cache."""


class Arm(NamedTuple):
    method: str
    ratio: float | None

    def options(self) -> RequestOptions:
        raw: dict[str, object] = {"method": self.method}
        if self.ratio is not None:
            raw |= {"budget_ratio": self.ratio, "hysteresis": 0}
        return parse_request_options(raw)


def arms(methods: Iterable[str], ratios: Sequence[float]) -> list[Arm]:
    """The full cache first, it is the reference; then the methods, interleaved within each ratio.

    Raises:
        ConfigError: an unknown method or a ratio outside (0, 1].
    """
    chosen = [Arm(FULL, None), *(Arm(method, ratio) for ratio in ratios for method in methods if method != FULL)]
    for arm in chosen:
        arm.options()
    return chosen


async def measure(client: ServerClient, case: Case, arm: Arm, namespace: str) -> tuple[Row, Reading | None]:
    """Prefill and evict under ``arm``, then read the continuation; a failure is a row with the reason as its status.

    Args:
        namespace: prefix of the ``extra_key`` that keeps arms and runs out of each other's prefixes.
    """
    row = Row(
        trajectory=case.trajectory.id,
        source=case.trajectory.source,
        method=arm.method,
        ratio=arm.ratio,
        status=OK,
        cut=case.cut,
        scored=len(case.scored),
    )
    key = f"{namespace}/{case.trajectory.id}/{arm.method}/{arm.ratio}"
    try:
        before = 0
        for end in (*case.turns, case.cut):
            meta = (await client.generate(generate_body(case.ids[:end], 1, arm.options(), extra_key=key)))["meta_info"]
            if meta["cached_tokens"] == before + 1:
                raise RequestFailed("a token that the server generated is in the prefix; start it with --disable-overlap-schedule")
            if meta["cached_tokens"] != before:
                raise RequestFailed(f"{meta['cached_tokens']} of {before} tokens of the turns before were cached")
            before = end
        read = generate_body(
            case.ids, 1, Arm(FULL, None).options(), extra_key=key, return_logprob=True, logprob_start_len=case.cut, top_logprobs_num=1
        )
        meta = (await client.generate(read))["meta_info"]
        cached = meta["cached_tokens"]
        live = (plugin_figures(meta) or {}).get("live_cached_tokens", cached)
        row = row.model_copy(update={"cached": cached, "live": live, "dead": cached - live})
        if cached != case.cut:
            raise RequestFailed(f"{cached} of {case.cut} history tokens were cached")
        if (arm.ratio is not None and arm.ratio < 1) != (row.dead > 0):
            raise RequestFailed(f"{row.dead} tokens were evicted")
        reading = align(meta, case)
    except (RequestFailed, KeyError, TypeError, IndexError) as error:
        return row.model_copy(update={"status": f"error: {error}"}), None
    return row.model_copy(update={"nll": reading.nll}), reading


async def run_case(client: ServerClient, case: Case, wanted: Sequence[Arm], done: set[Arm], namespace: str) -> list[Row]:
    """Rows of the arms that are not ``done``. The full cache is read again for a continued trajectory: the others are relative to it."""
    rows: list[Row] = []
    reference: Reading | None = None
    for arm in wanted:
        if arm in done and arm.method != FULL:
            continue
        row, reading = await measure(client, case, arm, namespace)
        if arm.method == FULL:
            reference = reading
        if reading is not None and reference is None:
            row = row.model_copy(update={"status": "error: the full cache could not be read"})
        elif reading is not None and reference is not None:
            same = sum(a == b for a, b in zip(reading.top, reference.top, strict=True))
            row = row.model_copy(update={"dnll": reading.nll - reference.nll, "top1": same / len(reference.top)})
        if arm not in done:
            rows.append(row)
    return rows


class ArmSummary(BaseModel):
    method: str
    ratio: float | None
    n: int
    failed: int
    dnll: Interval | None
    top1: Interval | None
    live: float
    dead: float


class Summary(BaseModel):
    """``summary.json``."""

    provenance: Provenance
    settings: Settings
    seed: int
    """Of the bootstrap."""
    broken_lines: list[str]
    arms: list[ArmSummary]


def summarise(rows: Sequence[Row], wanted: Sequence[Arm], seed: int) -> list[ArmSummary]:
    """One summary an arm; failed rows are counted and have no part in the means."""
    summaries = []
    for arm in wanted:
        mine = [row for row in rows if (row.method, row.ratio) == arm]
        ok = [row for row in mine if row.status == OK]
        summaries.append(
            ArmSummary(
                method=arm.method,
                ratio=arm.ratio,
                n=len(ok),
                failed=len(mine) - len(ok),
                dnll=bootstrap([row.dnll for row in ok if row.dnll is not None], seed),
                top1=bootstrap([row.top1 for row in ok if row.top1 is not None], seed),
                live=statistics.fmean(row.live for row in ok) if ok else 0.0,
                dead=statistics.fmean(row.dead for row in ok) if ok else 0.0,
            )
        )
    return summaries


def _table(summaries: Sequence[ArmSummary]) -> Table:
    table = Table(box=None)
    for column in ("method", "kept", "n", "ΔNLL [95 %]", "top-1 [95 %]", "live"):
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for arm in sorted(summaries, key=lambda s: (-(s.ratio or 1), s.dnll.mean if s.dnll else float("inf"))):
        kept = "all" if arm.ratio is None else f"{arm.ratio:.0%}"
        table.add_row(
            arm.method, kept, f"{arm.n} of {arm.n + arm.failed}", _shown(arm.dnll, "+.3f"), _shown(arm.top1, ".3f"), f"{arm.live:.0f}"
        )
    return table


def _shown(interval: Interval | None, form: str) -> str:
    return "–" if interval is None else f"{interval.mean:{form}} [{interval.low:{form}}, {interval.high:{form}}]"


def _continue(out: Path, settings: Settings) -> list[Row]:
    """Finished rows of an earlier, interrupted run into ``out``; failed ones are dropped, to be tried again.

    Raises:
        ConfigError: ``out`` holds rows of other settings or another version.
    """
    rows_file, settings_file = out / ROWS_FILE, out / SETTINGS_FILE
    out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    if rows_file.exists():
        try:
            earlier = Settings.model_validate_json(settings_file.read_text())
            rows = [Row.model_validate_json(line) for line in rows_file.read_text().splitlines()]
        except (OSError, ValidationError) as error:
            raise ConfigError(
                f"Folder {str(out)!r} cannot be continued, its files are damaged or of another version; give another --out."
            ) from error
        if earlier != settings:
            raise ConfigError(f"Folder {str(out)!r} holds rows of another model, data set or selection; give another --out.")
    rows = [row for row in rows if row.status == OK]
    settings_file.write_text(settings.model_dump_json(indent=2) + "\n")
    rows_file.write_text("".join(row.model_dump_json() + "\n" for row in rows))
    return rows


class Choice(NamedTuple):
    """Which trajectories are measured, and how they are written."""

    per_source: int
    tools: bool
    template: str | None
    turn_by_turn: bool = False


async def run(url: str, dataset: Dataset, out: Path, wanted: Sequence[Arm], choice: Choice, seed: int, timeout_s: float) -> Summary:
    """Measure what is missing in ``out`` and summarise all of it.

    Raises:
        ConfigError: unusable ``out``, no usable trajectory, or no server.
    """
    async with connect(url, timeout_s) as client:
        try:
            provenance = await collect(client)
            model = str(provenance.server.get("model_path", "unknown"))
            settings = Settings(
                model=model,
                dataset_sha256=dataset.sha256,
                per_source=choice.per_source,
                tools=choice.tools,
                turn_by_turn=choice.turn_by_turn,
            )
            rows = _continue(out, settings)
            cases = await find_cases(client, dataset.trajectories, settings, choice.template)
        except RequestFailed as error:
            raise ConfigError(f"The server at {url} cannot be measured: {error}.") from error
        done = {(row.trajectory, row.method, row.ratio) for row in rows}
        namespace = uuid.uuid4().hex
        with (out / ROWS_FILE).open("a") as file:
            for case in tqdm(cases, desc="measuring", unit="trajectory"):
                mine = {Arm(method, ratio) for trajectory, method, ratio in done if trajectory == case.trajectory.id}
                if mine.issuperset(wanted):
                    continue
                for row in await run_case(client, case, wanted, mine, namespace):
                    rows.append(row)
                    file.write(row.model_dump_json() + "\n")
                    file.flush()
    summary = Summary(provenance=provenance, settings=settings, seed=seed, broken_lines=dataset.broken, arms=summarise(rows, wanted, seed))
    (out / SUMMARY_FILE).write_text(summary.model_dump_json(indent=2) + "\n")
    return summary


class _Command(OneLineErrors, TyperCommand):
    pass


app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command(cls=_Command, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def main(
    context: typer.Context,
    files: Annotated[list[Path], typer.Option("--input", help="Recorded agents, JSONL; may be given again.")],
    out: Annotated[Path, typer.Option(help="Folder for rows.jsonl and summary.json; an interrupted run is continued.")],
    url: Annotated[str | None, typer.Option(help="A running server with the plugin; default: start one.")] = None,
    model: Annotated[str | None, typer.Option(help="Model folder or Hugging Face id of the server to start.")] = None,
    methods: Annotated[list[str] | None, typer.Option("--method", help="Method to measure; may be given again. Default: all.")] = None,
    ratios: Annotated[
        list[float] | None, typer.Option("--ratio", help="Share of the history to keep; may be given again. Default: 0.1 and 0.25.")
    ] = None,
    per_source: Annotated[int, typer.Option(min=1, help="Trajectories a source.")] = 2,
    tools: Annotated[bool, typer.Option("--tools/--no-tools", help="List the tools in the system message, which is always kept.")] = False,
    turn_by_turn: Annotated[
        bool,
        typer.Option("--turn-by-turn/--at-once", help="Evict at every recorded turn, as in a session, or once, at the cut."),
    ] = False,
    template: Annotated[str | None, typer.Option(help="Chat template; default: recognised by the model's tokenizer.")] = None,
    seed: Annotated[int, typer.Option(help="Of the bootstrap.")] = 0,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds a request may take.")] = 600,
) -> int:
    """Measure what each method costs in prediction at each kept share of the history, against the full cache.

    Every other flag goes to the server it starts. Exit status 1 when a measurement failed or the server did not start.
    """
    wanted = arms(methods or [m for m in method_names() if not method_info(m).needs_head], ratios or _RATIOS)
    dataset = load_dataset(files)
    choice = Choice(per_source, tools, template, turn_by_turn)
    if url is not None and context.args:
        raise ConfigError(f"{' '.join(context.args)} would go to a server to start; leave it out, or leave out --url.")
    with contextlib.ExitStack() as stack:
        if url is None:
            # With overlap the one token that a request generates is fed back, and its query would count as an assistant turn.
            forced = ["--disable-overlap-schedule"] if turn_by_turn else []
            arguments = [*(["--model", model] if model else []), *forced, *context.args]
            try:
                url = stack.enter_context(running_server(arguments, out / "server.log")).url
            except ServerError as error:
                typer.echo(f"Error: {error}", err=True)
                return 1
        summary = asyncio.run(run(url, dataset, out, wanted, choice, seed, timeout))
    Console().print(_table(summary.arms))
    return 1 if any(arm.failed for arm in summary.arms) else 0


if __name__ == "__main__":
    app()
