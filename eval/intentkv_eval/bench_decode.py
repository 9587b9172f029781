"""Decode step time over the logical length, pruned and stock: ``python -m intentkv_eval.bench_decode``.

Conversations of random content grow to each length; the plugin prunes them to the arm's budget on the way. At each length all of a batch
generate at once and the steps they share are timed. A pruned step is compared with a stock one at the same logical length, and with one at
the same live length: the second ratio is what eviction costs when it saves nothing.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import numpy as np
import typer
from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from intentkv.config import ConfigError, RequestOptions
from intentkv_eval import bench_arms
from intentkv_eval.bench_arms import Arm, Command, Connection, Endpoint, Kind, Origin, Servers, connection, parse_arm
from intentkv_eval.bench_prompts import Dialogue, Frames, open_frames
from intentkv_eval.bench_steps import Steps, decode_batch
from intentkv_eval.client import RequestFailed, generate_body

RESULT_FILE = "bench_decode.json"

SYSTEM_TOKENS = 128
LAST_TOKENS = 128
"""Prompt tokens that are new in the measured turn: its prefill is short, and the big part is cached."""
_BUILDERS = 4
"""Conversations that are prefilled at a time: not yet pruned, they need their whole length of the pool."""
_NEAR = 1.05
"""A live length this close to the shortest or longest stock length is compared with that."""

_ARMS = ["stock", "assistant:8192", "assistant:4096"]
_LENGTHS = [4096, 8192, 16384, 32768, 65536]
_BATCHES = [1, 8, 32]


class Options(BaseModel):
    model_config = ConfigDict(frozen=True)

    model: str
    arms: list[str]
    lengths: list[int]
    batches: list[int]
    tokens: int = 128
    seed: int = 0
    timeout_s: float = 600
    start_timeout_s: float = 600
    server_arguments: list[str] = []


class Cell(BaseModel):
    """One arm at one batch size and length."""

    arm: str
    batch: int
    length: int
    """Prompt tokens of each request."""
    skipped: str | None = None
    """Why it was not measured."""
    attended_tokens: float = 0.0
    """Live tokens of a request in the middle of its decode, mean over the batch."""
    cached_tokens: float = 0.0
    """Mean over the batch; all but the newest message when nothing was lost."""
    step_s: float = 0.0
    """Median."""
    mean_step_s: float = 0.0
    intervals: int = 0


class Ratio(BaseModel):
    """A pruned step over a stock one; None where no stock step was measured."""

    arm: str
    batch: int
    length: int
    same_logical: float | None
    same_live: float | None
    """Against stock at as many tokens as are live here, interpolated between the measured lengths."""


class Result(BaseModel):
    """``bench_decode.json``."""

    origin: Origin
    options: Options
    cells: list[Cell] = []
    ratios: list[Ratio] = []
    server_errors: dict[str, list[str] | None] = {}


class Batch:
    """Conversations that grow together."""

    def __init__(self, link: Connection, frames: Frames, size: int, request: RequestOptions, seed: str) -> None:
        self._link = link
        self._request = request
        self._names = [f"{seed}/{lane}" for lane in range(size)]
        self._dialogues = [Dialogue(frames, name) for name in self._names]
        for dialogue in self._dialogues:
            dialogue.add("system", SYSTEM_TOKENS)

    async def reach(self, length: int) -> None:
        """Have the server compute (and prune) every conversation up to a little below ``length`` tokens.

        Raises:
            RequestFailed: a request failed.
        """
        bounded = asyncio.Semaphore(_BUILDERS)

        async def build(dialogue: Dialogue, name: str) -> None:
            dialogue.grow(length - 2 * LAST_TOKENS)
            prompt = dialogue.ask_at(length - LAST_TOKENS)
            async with bounded:
                reply = await self._link.client.generate(generate_body(prompt, 1, self._request, session_id=name))
            dialogue.answer(reply["output_ids"])

        await asyncio.gather(*map(build, self._dialogues, self._names))

    async def decode(self, length: int, tokens: int) -> Steps:
        """Ask with prompts of exactly ``length`` tokens and time the steps of the answers.

        Raises:
            RequestFailed: a request failed.
        """
        prompts = [dialogue.ask_at(length) for dialogue in self._dialogues]
        steps = await decode_batch(self._link.http, prompts, tokens, self._request, self._names)
        for dialogue, request in zip(self._dialogues, steps.requests, strict=True):
            dialogue.answer(request.output_ids)
        return steps


def tokens_needed(arm: Arm, batch: int, length: int, tokens: int) -> int:
    """Pool tokens for a batch of this length, its pruned conversations at their budget."""
    resident = length if arm.request.budget is None else min(length, arm.request.budget + LAST_TOKENS)
    return batch * (resident + tokens) + (min(batch, _BUILDERS) * (length - resident))


def make_cell(arm: Arm, batch: int, length: int, steps: Steps) -> Cell:
    attended = [
        (request.figures["live_tokens"] if request.figures else request.prompt_tokens + len(request.output_ids))
        - len(request.output_ids) / 2
        for request in steps.requests
    ]
    return Cell(
        arm=arm.name,
        batch=batch,
        length=length,
        attended_tokens=statistics.fmean(attended),
        cached_tokens=statistics.fmean(request.cached_tokens for request in steps.requests),
        step_s=steps.median_s,
        mean_step_s=steps.mean_s,
        intervals=steps.intervals,
    )


async def measure(
    endpoint: Endpoint, frames: Frames, arm: Arm, batch: int, options: Options, pool: int, progress: tqdm[None]
) -> list[Cell]:
    """Walk one batch through all lengths, in ascending order.

    Raises:
        RequestFailed: a request failed.
    """
    request = arm.request
    if arm.kind == "plugin":
        request = request.model_copy(update={"hysteresis": 0})  # exactly at the budget, so that live lengths can be compared
    cells = []
    async with connection(endpoint.url, options.timeout_s, batch) as link:
        await bench_arms.flush_when_idle(link.client)
        conversations = Batch(link, frames, batch, request, f"{options.seed}/{batch}")
        for length in sorted(options.lengths):
            if (needed := tokens_needed(arm, batch, length, options.tokens)) > pool:
                cells.append(Cell(arm=arm.name, batch=batch, length=length, skipped=f"needs {needed} tokens, the pool has {pool}"))
            else:
                await conversations.reach(length)
                cells.append(make_cell(arm, batch, length, await conversations.decode(length, options.tokens)))
            progress.update()
    return cells


def ratios(cells: Sequence[Cell]) -> list[Ratio]:
    """Every pruned cell against the stock cells of the same batch size."""
    done = [cell for cell in cells if cell.skipped is None]
    found = []
    for cell in done:
        if cell.arm == "stock":
            continue
        stock = sorted((c for c in done if c.arm == "stock" and c.batch == cell.batch), key=lambda c: c.attended_tokens)
        same = next((c.step_s for c in stock if c.length == cell.length), None)
        live = stock_step(stock, cell.attended_tokens)
        found.append(
            Ratio(
                arm=cell.arm,
                batch=cell.batch,
                length=cell.length,
                same_logical=cell.step_s / same if same else None,
                same_live=cell.step_s / live if live else None,
            )
        )
    return found


def stock_step(stock: Sequence[Cell], tokens: float) -> float | None:
    """Stock step time at ``tokens`` attended tokens, linear between the cells (ascending); None beyond them."""
    if not stock or not stock[0].attended_tokens / _NEAR <= tokens <= stock[-1].attended_tokens * _NEAR:
        return None
    return float(np.interp(tokens, [cell.attended_tokens for cell in stock], [cell.step_s for cell in stock]))


class Bench:
    """One run; its result file is written anew after every batch."""

    def __init__(self, options: Options, servers: Servers) -> None:
        self._options = options
        self._servers = servers
        self._file = bench_arms.new_folder(servers.out, RESULT_FILE)
        self._arms = [parse_arm(text) for text in options.arms]
        room = options.tokens + 4 * LAST_TOKENS
        if close := [length for length, after in pairwise(sorted(options.lengths)) if after - length < room]:
            raise ConfigError(f"The length after {close[0]} is too close; leave at least {room} tokens between two.")
        self._frames = asyncio.run(open_frames(options.model))[2]
        self.result = Result(origin=Origin(device=bench_arms.device_name(), seed=options.seed), options=options)

    def run(self) -> Result:
        """Measure all arms, one server after the other.

        Raises:
            ConfigError: a server cannot be measured.
            ServerError: a server did not start.
        """
        kinds: list[Kind] = list(dict.fromkeys(arm.kind for arm in self._arms))
        with tqdm(total=len(self._arms) * len(self._options.batches) * len(self._options.lengths), unit="cell") as progress:
            for kind in kinds:
                with self._servers.serve(kind) as endpoint:
                    provenance = asyncio.run(bench_arms.server_provenance(endpoint.url, self._options.timeout_s))
                    self.result.origin.servers[kind] = provenance
                    pool = int(provenance.server.get("max_total_num_tokens") or 0)
                    for arm in (arm for arm in self._arms if arm.kind == kind):
                        self._run_arm(endpoint, arm, pool, progress)
                    self.result.server_errors[kind] = bench_arms.error_lines(endpoint.log)
                    self._write()
        return self.result

    def _run_arm(self, endpoint: Endpoint, arm: Arm, pool: int, progress: tqdm[None]) -> None:
        for batch in self._options.batches:
            progress.set_description(f"{arm.name}, batch {batch}")
            try:
                self.result.cells += asyncio.run(measure(endpoint, self._frames, arm, batch, self._options, pool, progress))
            except RequestFailed as error:
                raise ConfigError(f"Arm {arm.name!r} at batch {batch} cannot be measured: {error}; see the server's log.") from error
            self._write()

    def _write(self) -> None:
        self.result.ratios = ratios(self.result.cells)
        self._file.write_text(self.result.model_dump_json(indent=2) + "\n")
        bench_arms.write_picture(self._file, lambda: picture(self.result))


def picture(result: Result) -> str:
    """Step time over logical length, one line for each arm and batch size, as one HTML page that works offline."""
    import plotly.graph_objects as go  # only the picture needs it

    figure = go.Figure()
    for arm, batch in dict.fromkeys((cell.arm, cell.batch) for cell in result.cells):
        points = [(c.length, c.step_s * 1000) for c in result.cells if (c.arm, c.batch) == (arm, batch) and c.skipped is None]
        figure.add_scatter(name=f"{arm}, batch {batch}", x=[x for x, _ in points], y=[y for _, y in points], mode="lines+markers")
    figure.update_layout(template="plotly_white", title=f"Decode step ({result.origin.device})")
    figure.update_xaxes(title="logical tokens of each request")
    figure.update_yaxes(title="milliseconds", rangemode="tozero")
    return bench_arms.page(figure)


def table(result: Result) -> Table:
    table = Table(title=f"Decode step, median, {result.origin.device}")
    for column in ("arm", "batch", "logical", "attended", "step", "/ stock, same logical", "/ stock, same live"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    found = {(ratio.arm, ratio.batch, ratio.length): ratio for ratio in result.ratios}
    for cell in result.cells:
        if cell.skipped is not None:
            table.add_row(cell.arm, str(cell.batch), f"{cell.length:,}", "–", "does not fit")
            continue
        ratio = found.get((cell.arm, cell.batch, cell.length))
        values = (ratio.same_logical, ratio.same_live) if ratio else (None, None)
        table.add_row(
            cell.arm,
            str(cell.batch),
            f"{cell.length:,}",
            f"{cell.attended_tokens:,.0f}",
            f"{cell.step_s * 1000:.2f} ms",
            *("–" if value is None else f"{value:.3f}×" for value in values),
        )
    return table


app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command(cls=Command, context_settings=bench_arms.PASS_ON)
def main(
    context: typer.Context,
    model: bench_arms.ModelOption,
    out: bench_arms.OutOption,
    arm: bench_arms.ArmsOption = _ARMS,
    length: Annotated[list[int], typer.Option(min=1024, help="Prompt tokens; may be given again.")] = _LENGTHS,
    batch: Annotated[list[int], typer.Option(min=1, help="Requests that decode at once; may be given again.")] = _BATCHES,
    tokens: Annotated[int, typer.Option(min=16, help="Generated tokens of each request.")] = 128,
    url_stock: bench_arms.StockUrlOption = None,
    url_plugin: bench_arms.PluginUrlOption = None,
    log_stock: bench_arms.StockLogOption = None,
    log_plugin: bench_arms.PluginLogOption = None,
    seed: bench_arms.SeedOption = 0,
    timeout: bench_arms.TimeoutOption = 600,
    start_timeout: bench_arms.StartTimeoutOption = 600,
) -> int:
    """Time decode steps of pruned and of stock conversations over their length.

    Every other flag goes to the servers. What does not fit the pool is left out and listed. Exit status 1 when a server did not start.
    """
    options = Options(
        model=model,
        arms=arm,
        lengths=length,
        batches=batch,
        tokens=tokens,
        seed=seed,
        timeout_s=timeout,
        start_timeout_s=start_timeout,
        server_arguments=context.args,
    )
    existing = bench_arms.existing_servers(url_stock, log_stock, url_plugin, log_plugin)
    bench = Bench(options, Servers(model, context.args, out, start_timeout, existing))
    try:
        with bench_arms.one_line_server_errors():
            bench.run()
    finally:
        if bench.result.cells:
            Console(width=160).print(table(bench.result))
    return 0


if __name__ == "__main__":
    app()
