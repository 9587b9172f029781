"""What one eviction costs over the length of the request: ``python -m intentkv_eval.bench_prune``.

A conversation grows unpruned to each length; then a turn with a budget evicts once. The cost is the plugin's own measure, from its
counters, and the turn's time is the client's. That measure is the scheduler's time, which work queued on the device may outlast, so the
turn is also compared with the one before it, which had the same sizes and no eviction.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from itertools import product
from typing import Annotated

import typer
from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from intentkv.config import ConfigError, RequestOptions
from intentkv_eval import bench_arms
from intentkv_eval.bench_arms import Arm, Command, Connection, Endpoint, Origin, Servers, connection, parse_arm
from intentkv_eval.bench_counters import PruneCounters, read_counters
from intentkv_eval.bench_decode import SYSTEM_TOKENS
from intentkv_eval.bench_prompts import Dialogue, Frames, open_frames
from intentkv_eval.client import RequestFailed, generate_body

RESULT_FILE = "bench_prune.json"

_NEVER = 10_000_000
"""A budget that no request reaches."""

_ARMS = ["assistant:4096", "intentkv:4096", "snapkv:4096"]
_LENGTHS = [8192, 16384, 32768, 65536]


class Options(BaseModel):
    model_config = ConfigDict(frozen=True)

    model: str
    arms: list[str]
    lengths: list[int]
    repeats: int
    added: int
    """Prompt tokens that are new in each turn."""
    tokens: int
    """Generated in each turn."""
    seed: int = 0
    timeout_s: float = 600
    start_timeout_s: float = 600
    server_arguments: list[str] = []


class Event(BaseModel):
    """One eviction."""

    arm: str
    length: int
    """Prompt tokens, all of them live before."""
    evicted_tokens: int
    event_s: float
    """Scoring, selection and commit on the scheduler, as the plugin measures it."""
    turn_s: float
    plain_turn_s: float
    """The turn before: same sizes, no eviction."""


class Cost(BaseModel):
    """Events of one arm and length."""

    arm: str
    length: int
    events: int
    evicted_tokens: float
    p50_s: float
    max_s: float
    share_of_turn: float
    """Median of event / turn."""
    added_s: float
    """Median of turn - plain turn: what a client sees of the event, noise of two turns included."""


class Result(BaseModel):
    """``bench_prune.json``."""

    origin: Origin
    options: Options
    events: list[Event] = []
    costs: list[Cost] = []
    server_errors: list[str] | None = None


def costs(events: Sequence[Event]) -> list[Cost]:
    """Figures of every arm and length."""
    groups: dict[tuple[str, int], list[Event]] = {}
    for event in events:
        groups.setdefault((event.arm, event.length), []).append(event)
    return [
        Cost(
            arm=arm,
            length=length,
            events=len(found),
            evicted_tokens=statistics.fmean(event.evicted_tokens for event in found),
            p50_s=statistics.median(event.event_s for event in found),
            max_s=max(event.event_s for event in found),
            share_of_turn=statistics.median(event.event_s / event.turn_s for event in found),
            added_s=statistics.median(event.turn_s - event.plain_turn_s for event in found),
        )
        for (arm, length), found in groups.items()
    ]


async def _counters(link: Connection) -> PruneCounters:
    counters = await read_counters(link.http)
    if counters is None:
        raise ConfigError("The server has no plugin, so it has no evictions to measure; start one without --stock.")
    return counters


async def measure_event(link: Connection, frames: Frames, arm: Arm, length: int, options: Options, seed: str) -> Event:
    """Grow a conversation, time a turn that evicts nothing, then one that evicts once.

    Raises:
        ConfigError: not exactly one eviction happened.
        RequestFailed: a request failed.
    """
    dialogue = Dialogue(frames, seed)
    dialogue.add("system", SYSTEM_TOKENS)
    never = arm.request.model_copy(update={"budget": _NEVER})
    step = options.added + options.tokens

    async def turn(prompt_tokens: int, tokens: int, request: RequestOptions) -> float:
        body = generate_body(dialogue.ask_at(prompt_tokens), tokens, request, session_id=seed)
        generation = await link.client.stream(body)
        dialogue.answer(generation.output_ids)
        return generation.latency_s

    dialogue.grow(length - 2 * step - options.added)
    # its answer is as long as any, so that methods that look at the assistant's queries have them
    await turn(length - 2 * step, options.tokens, never)
    plain_s = await turn(length - step, options.tokens, never)
    before = await _counters(link)
    turn_s = await turn(length, options.tokens, arm.request)
    cost = (await _counters(link)).since(before)
    if cost.events != 1:
        raise ConfigError(
            f"Arm {arm.name!r} evicted {cost.events} times at {length} tokens, not once ({cost.declined or 'nothing declined'}); "
            "choose a budget well below the length."
        )
    return Event(arm=arm.name, length=length, evicted_tokens=cost.tokens, event_s=cost.seconds, turn_s=turn_s, plain_turn_s=plain_s)


async def measure(endpoint: Endpoint, frames: Frames, arms: Sequence[Arm], options: Options, events: list[Event]) -> None:
    """Append all events to ``events``, arms interleaved; the first event of each arm and length warms up and is not counted.

    Raises:
        ConfigError: an arm does not evict, or the server has no plugin.
        RequestFailed: a request failed.
    """
    cases = list(product(range(options.repeats + 1), options.lengths, arms))
    async with connection(endpoint.url, options.timeout_s, 1) as link:
        for repeat, length, arm in tqdm(cases, unit="event"):
            await bench_arms.flush_when_idle(link.client)
            event = await measure_event(link, frames, arm, length, options, f"{options.seed}/{length}/{repeat}")
            if repeat:
                events.append(event)


class Bench:
    """One run."""

    def __init__(self, options: Options, servers: Servers) -> None:
        self._options = options
        self._servers = servers
        self._file = bench_arms.new_folder(servers.out, RESULT_FILE)
        self._arms = [parse_arm(text) for text in options.arms]
        if lacking := [arm.name for arm in self._arms if arm.request.budget is None]:
            raise ConfigError(f"Arm {lacking[0]!r} has no budget and evicts nothing; write METHOD:BUDGET.")
        least = SYSTEM_TOKENS + 2 * (options.added + options.tokens) + options.added
        if min(options.lengths) < 2 * least:
            raise ConfigError(f"A length of {min(options.lengths)} tokens has no history behind its turns; give at least {2 * least}.")
        self._frames = asyncio.run(open_frames(options.model))[2]
        self.result = Result(origin=Origin(device=bench_arms.device_name(), seed=options.seed), options=options)

    def run(self) -> Result:
        """Measure and write the result.

        Raises:
            ConfigError: the server cannot be measured, or an arm does not evict.
            ServerError: the server did not start.
        """
        result = self.result
        with self._servers.serve("plugin") as endpoint:
            result.origin.servers["plugin"] = asyncio.run(bench_arms.server_provenance(endpoint.url, self._options.timeout_s))
            try:
                asyncio.run(measure(endpoint, self._frames, self._arms, self._options, result.events))
            except RequestFailed as error:
                raise ConfigError(f"The server cannot be measured: {error}; see its log.") from error
            finally:  # what was measured is kept
                result.server_errors = bench_arms.error_lines(endpoint.log)
                result.costs = costs(result.events)
                self._file.write_text(result.model_dump_json(indent=2) + "\n")
                bench_arms.write_picture(self._file, lambda: picture(result))
        return result


def picture(result: Result) -> str:
    """Milliseconds of an event over the request's length, as one HTML page that works offline."""
    import plotly.graph_objects as go  # only the picture needs it

    figure = go.Figure()
    for arm in dict.fromkeys(cost.arm for cost in result.costs):
        points = [(cost.length, cost.p50_s * 1000) for cost in result.costs if cost.arm == arm]
        figure.add_scatter(name=arm, x=[x for x, _ in points], y=[y for _, y in points], mode="lines+markers")
    figure.update_layout(template="plotly_white", title=f"One eviction, median ({result.origin.device})")
    figure.update_xaxes(title="live tokens before")
    figure.update_yaxes(title="milliseconds", rangemode="tozero")
    return bench_arms.page(figure)


def table(result: Result) -> Table:
    table = Table(title=f"One eviction, {result.origin.device}")
    for column in ("arm", "tokens", "evicted", "events", "p50", "max", "share of the turn", "turn longer by"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for cost in result.costs:
        table.add_row(
            cost.arm,
            f"{cost.length:,}",
            f"{cost.evicted_tokens:,.0f}",
            str(cost.events),
            f"{cost.p50_s * 1000:.2f} ms",
            f"{cost.max_s * 1000:.2f} ms",
            f"{cost.share_of_turn:.2%}",
            f"{cost.added_s * 1000:.1f} ms",
        )
    return table


app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command(cls=Command, context_settings=bench_arms.PASS_ON)
def main(
    context: typer.Context,
    model: bench_arms.ModelOption,
    out: bench_arms.OutOption,
    arm: bench_arms.ArmsOption = _ARMS,
    length: Annotated[list[int], typer.Option(min=1, help="Prompt tokens; may be given again.")] = _LENGTHS,
    repeats: Annotated[int, typer.Option(min=1, help="Counted events of each arm and length.")] = 5,
    added: Annotated[int, typer.Option(min=32, help="New prompt tokens of each turn.")] = 400,
    tokens: Annotated[int, typer.Option(min=2, help="Generated tokens of each turn.")] = 192,
    url_plugin: bench_arms.PluginUrlOption = None,
    log_plugin: bench_arms.PluginLogOption = None,
    seed: bench_arms.SeedOption = 0,
    timeout: bench_arms.TimeoutOption = 600,
    start_timeout: bench_arms.StartTimeoutOption = 600,
) -> int:
    """Measure one eviction over the request's length, and its share of the turn.

    Every other flag goes to the server. Exit status 1 when it did not start.
    """
    options = Options(
        model=model,
        arms=arm,
        lengths=length,
        repeats=repeats,
        added=added,
        tokens=tokens,
        seed=seed,
        timeout_s=timeout,
        start_timeout_s=start_timeout,
        server_arguments=context.args,
    )
    bench = Bench(
        options, Servers(model, context.args, out, start_timeout, bench_arms.existing_servers(None, None, url_plugin, log_plugin))
    )
    with bench_arms.one_line_server_errors():
        bench.run()
    Console(width=160).print(table(bench.result))
    return 0


if __name__ == "__main__":
    app()
