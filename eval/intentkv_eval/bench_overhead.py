"""What the plugin costs while it prunes nothing: ``python -m intentkv_eval.bench_overhead``.

A stock server and one with the plugin run on the same device and take turns, in alternating order, so that a drift of the machine meets
both: each pair times the same decode batch and the same cold prefill on either. Reported is the median over the pairs of plugin / stock.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Annotated, NamedTuple

import typer
from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from intentkv.config import ConfigError
from intentkv_eval import bench_arms
from intentkv_eval.bench_arms import Arm, Command, Connection, Endpoint, Origin, Servers, connection, parse_arm
from intentkv_eval.bench_decode import LAST_TOKENS, SYSTEM_TOKENS, Batch
from intentkv_eval.bench_prompts import Dialogue, Frames, open_frames
from intentkv_eval.bench_steps import timed_generate
from intentkv_eval.client import RequestFailed, generate_body

RESULT_FILE = "bench_overhead.json"

_RESAMPLES = 10_000
_TURN_ROOM = 256
"""Tokens that a conversation grows by beyond its answer, from one pair to the next."""

_ARMS = ["full", "assistant:10000000"]
_LENGTHS = [4096, 32768]


class Options(BaseModel):
    model_config = ConfigDict(frozen=True)

    model: str
    arms: list[str]
    lengths: list[int]
    batch: int
    pairs: int
    tokens: int = 128
    seed: int = 0
    timeout_s: float = 600
    start_timeout_s: float = 600
    server_arguments: list[str] = []


class Sample(BaseModel):
    """One server's half of a pair."""

    step_s: float
    """Median decode step of the batch."""
    prefill_s: float
    """To the first token of a prompt of which nothing is cached, alone on the server."""


class Pair(BaseModel):
    stock: Sample
    plugin: Sample


class Interval(BaseModel):
    """Median with its 95 % percentile-bootstrap interval."""

    median: float
    low: float
    high: float


class Comparison(BaseModel):
    """One plugin arm against stock at one length."""

    arm: str
    length: int
    pairs: list[Pair]
    step: Interval
    """Plugin / stock."""
    prefill: Interval
    pruned_tokens: int
    """0, or the comparison is void."""


class Result(BaseModel):
    """``bench_overhead.json``."""

    origin: Origin
    options: Options
    comparisons: list[Comparison] = []
    server_errors: dict[str, list[str] | None] = {}


def median_interval(values: Sequence[float], seed: int) -> Interval:
    """Median of ``values`` and its bootstrap interval, resampled ``_RESAMPLES`` times."""
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return Interval(median=statistics.median(values), low=medians[int(0.025 * _RESAMPLES)], high=medians[int(0.975 * _RESAMPLES) - 1])


class Side(NamedTuple):
    """One of the two servers in one comparison."""

    link: Connection
    arm: Arm
    batch: Batch

    async def sample(self, frames: Frames, length: int, turn_length: int, seed: str, tokens: int) -> tuple[Sample, int]:
        """One decode turn of the batch at ``turn_length`` tokens, then a cold prefill of ``length``; also the tokens that were pruned.

        Raises:
            RequestFailed: a request failed.
        """
        steps = await self.batch.decode(turn_length, tokens)
        cold = Dialogue(frames, f"cold/{seed}")
        cold.add("user", SYSTEM_TOKENS)  # no system message: it would be shared, and cached
        cold.grow(length - LAST_TOKENS)
        prefill = await timed_generate(self.link.http, generate_body(cold.ask_at(length), 1, self.arm.request))
        pruned = sum((request.figures or {}).get("pruned_tokens", 0) for request in [*steps.requests, prefill])
        return Sample(step_s=steps.median_s, prefill_s=prefill.ttft_s), pruned


async def compare(stock: Endpoint, plugin: Endpoint, frames: Frames, arm: Arm, length: int, options: Options) -> Comparison:
    """Alternate between the two servers; the first pair warms both up and is not counted.

    Raises:
        RequestFailed: a request failed.
    """
    pairs: list[Pair] = []
    pruned = 0
    async with AsyncExitStack() as stack:
        sides: dict[str, Side] = {}
        for name, endpoint, side_arm in (("stock", stock, parse_arm("stock")), ("plugin", plugin, arm)):
            link = await stack.enter_async_context(connection(endpoint.url, options.timeout_s, options.batch))
            await bench_arms.flush_when_idle(link.client)
            sides[name] = Side(link, side_arm, Batch(link, frames, options.batch, side_arm.request, f"{options.seed}/{length}"))
            await sides[name].batch.reach(length)
        for number in tqdm(range(options.pairs + 1), desc=f"{arm.name}, {length} tokens", unit="pair"):
            turn_length = length + number * (options.tokens + _TURN_ROOM)
            samples = {}
            for name in list(sides) if number % 2 else reversed(sides):
                seed = f"{options.seed}/{length}/{number}"
                samples[name], found = await sides[name].sample(frames, length, turn_length, seed, options.tokens)
                pruned += found
            if number:
                pairs.append(Pair(**samples))

    def ratio(value: Callable[[Sample], float]) -> Interval:
        return median_interval([value(pair.plugin) / value(pair.stock) for pair in pairs], options.seed)

    return Comparison(
        arm=arm.name,
        length=length,
        pairs=pairs,
        step=ratio(lambda sample: sample.step_s),
        prefill=ratio(lambda sample: sample.prefill_s),
        pruned_tokens=pruned,
    )


class Bench:
    """One run; its result file is written anew after every comparison."""

    def __init__(self, options: Options, servers: Servers) -> None:
        self._options = options
        self._servers = servers
        self._file = bench_arms.new_folder(servers.out, RESULT_FILE)
        self._arms = [parse_arm(text) for text in options.arms]
        if any(arm.kind == "stock" for arm in self._arms):
            raise ConfigError("Stock is what every arm is compared with; give --arm only methods.")
        self._frames = asyncio.run(open_frames(options.model))[2]
        self.result = Result(origin=Origin(device=bench_arms.device_name(), seed=options.seed), options=options)

    def run(self) -> Result:
        """Measure all arms, each on a server whose own method it is, beside the same stock server.

        Raises:
            ConfigError: a server cannot be measured.
            ServerError: a server did not start.
        """
        with self._servers.serve("stock") as stock:
            self._describe("stock", stock)
            for arm in self._arms:
                method = arm.request.method or ""
                with self._servers.serve("plugin", f"-{method}", method) as plugin:
                    self._describe(f"plugin, {arm.name}", plugin)
                    for length in self._options.lengths:
                        self._compare(stock, plugin, arm, length)
        return self.result

    def _describe(self, name: str, endpoint: Endpoint) -> None:
        self.result.origin.servers[name] = asyncio.run(bench_arms.server_provenance(endpoint.url, self._options.timeout_s))

    def _compare(self, stock: Endpoint, plugin: Endpoint, arm: Arm, length: int) -> None:
        try:
            self.result.comparisons.append(asyncio.run(compare(stock, plugin, self._frames, arm, length, self._options)))
        except RequestFailed as error:
            raise ConfigError(f"Arm {arm.name!r} at {length} tokens cannot be measured: {error}; see the servers' logs.") from error
        self.result.server_errors["stock"] = bench_arms.error_lines(stock.log)
        self.result.server_errors[f"plugin, {arm.name}"] = bench_arms.error_lines(plugin.log)
        self._file.write_text(self.result.model_dump_json(indent=2) + "\n")


def table(result: Result) -> Table:
    table = Table(title=f"Plugin / stock, nothing pruned, batch {result.options.batch}, {result.origin.device}")
    for column in ("arm", "tokens", "decode step", "95 %", "prefill", "95 %", "stock step", "stock prefill"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for found in result.comparisons:
        table.add_row(
            found.arm,
            f"{found.length:,}",
            f"{found.step.median:.4f}×",
            f"{found.step.low:.4f} … {found.step.high:.4f}",
            f"{found.prefill.median:.4f}×",
            f"{found.prefill.low:.4f} … {found.prefill.high:.4f}",
            f"{statistics.median(pair.stock.step_s for pair in found.pairs) * 1000:.2f} ms",
            f"{statistics.median(pair.stock.prefill_s for pair in found.pairs) * 1000:.0f} ms",
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
    batch: Annotated[int, typer.Option(min=1, help="Requests that decode at once.")] = 8,
    pairs: Annotated[int, typer.Option(min=2, help="Counted pairs of each arm and length.")] = 11,
    tokens: Annotated[int, typer.Option(min=16, help="Generated tokens of each request.")] = 128,
    url_stock: bench_arms.StockUrlOption = None,
    url_plugin: bench_arms.PluginUrlOption = None,
    log_stock: bench_arms.StockLogOption = None,
    log_plugin: bench_arms.PluginLogOption = None,
    seed: bench_arms.SeedOption = 0,
    timeout: bench_arms.TimeoutOption = 600,
    start_timeout: bench_arms.StartTimeoutOption = 600,
) -> int:
    """Compare decode steps and prefill of a stock server and one with the plugin that has nothing to prune.

    Every other flag goes to the servers; two of them share the device, so give for example --mem-fraction-static 0.4.
    Exit status 1 when something was pruned after all or a server did not start.
    """
    options = Options(
        model=model,
        arms=arm,
        lengths=length,
        batch=batch,
        pairs=pairs,
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
        if bench.result.comparisons:
            Console(width=160).print(table(bench.result))
    return 1 if any(found.pruned_tokens for found in bench.result.comparisons) else 0


if __name__ == "__main__":
    app()
