"""Throughput when the KV pool is too small: stock SGLang and IntentKV's methods, closed loop: ``python -m intentkv_eval.bench_capacity``.

A number of agents run at once, each with the message sizes of a recorded session and random content; a finished session is followed by a
new one. The pool is a share of the working set, the final logical tokens of the sessions that run at a time. The first session of each
lane starts somewhere on its way, spread evenly, so that the load is steady from the start; the window opens when every lane has finished a
turn. What finishes inside the window counts; a turn in flight at its end does not.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from intentkv.config import ConfigError
from intentkv.trajectories import load_dataset
from intentkv_eval import bench_arms
from intentkv_eval.bench_arms import Arm, Command, Endpoint, Kind, Origin, Servers, connection, parse_arm
from intentkv_eval.bench_counters import PruneCounters, PruneFigures, read_counters
from intentkv_eval.bench_prompts import Dialogue, Frames, Session, joined_sessions, open_frames, recorded_sessions
from intentkv_eval.client import RequestFailed, ServerClient, generate_body
from intentkv_eval.turns import SKIPPED, Percentiles, TurnRecord, aggregate, finished

RESULT_FILE = "bench_capacity.json"
TURNS_FILE = "turns.jsonl"

_GIVE_UP = 3
"""A lane stops after this many failed sessions in a row: a dead server must not be counted thousands of times."""
_STREAM_INTERVAL = 8
"""Tokens a chunk: the client must not be what is measured. The first and the last token are on time all the same."""

_ARMS = ["stock", "assistant:8192"]
_POOLS = [0.3]


class Options(BaseModel):
    """What is run; in the result file as it was given."""

    model_config = ConfigDict(frozen=True)

    input: list[Path]
    model: str
    arms: list[str]
    sessions: int = 24
    concurrent: int = 16
    pools: list[float] = []
    seconds: float = 60
    warmup_s: float = 120
    rounds: int = 1
    long: tuple[int, int] | None = None
    """Join recordings to this many tokens; None: as recorded."""
    max_turns: int = 30
    max_context: int = 100_000
    max_tokens: int = 512
    seed: int = 0
    together: bool = False
    timeout_s: float = 600
    start_timeout_s: float = 600
    server_arguments: list[str] = []


class Turn(TurnRecord):
    """One turn, with what the window needs to know about it."""

    new_tokens: int = 0
    """Prompt tokens whose KV no earlier turn of the session can have computed."""
    finished_s: float = 0.0
    """On the client's clock."""
    last: bool = False
    """The session's task is done with it."""
    pool_share: float = 0.0
    round: int = 0


class Cell(BaseModel):
    """One arm, one pool, one round. Failed turns stay in every denominator."""

    arm: str
    pool_share: float
    pool_tokens: int
    round: int
    window_s: float
    warm: bool
    """Every lane had finished a turn when the window opened."""
    lanes_lost: int
    """Lanes that stopped for good because their requests kept failing."""
    turns: int
    failed_turns: int
    errors: list[str]
    """What failed turns said, each once, those before the window included."""
    tasks: int
    turns_per_s: float
    tasks_per_s: float
    generated_tokens_per_s: float
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    recomputed_tokens: int
    """Of the finished turns: prompt tokens neither cached nor new, so computed before and computed again."""
    prefix_hit_rate: float
    ample_hit_rate: float
    """What the same turns would have hit in a pool that never evicts: everything but their new tokens."""
    live_hit_rate: float
    peak_live_tokens: int
    peak_logical_tokens: int
    """Of one request."""
    mean_logical_tokens: float
    """Of a request at its end; times the lanes: what the server is asked to hold on average."""
    prune: PruneFigures | None
    server_errors: list[str] | None


class Ratio(BaseModel):
    """An arm against stock with the same pool: medians over the rounds of the ratio within one round. None: stock has a zero."""

    arm: str
    pool_share: float
    turns: float | None
    tasks: float | None
    generated_tokens: float | None
    ttft_p50: float | None
    tpot_p50: float | None


class Result(BaseModel):
    """``bench_capacity.json``."""

    origin: Origin
    options: Options
    length_of_sessions: str
    working_set_tokens: int
    session_tokens: list[int]
    """Final logical tokens of each session."""
    cells: list[Cell] = []
    ratios: list[Ratio] = []


def recomputed(turns: Sequence[Turn]) -> int:
    """Tokens the server computed again: not cached, although an earlier turn of the session had computed them."""
    # below zero by one: under overlap the last token of an answer was an input, too
    return sum(max(0, turn.prompt_tokens - turn.cached_tokens - turn.new_tokens) for turn in turns if turn.ok)


def within(turns: Sequence[Turn], opened: float, closed: float) -> list[Turn]:
    """Turns that finished in the window (opened, closed]."""
    return [turn for turn in turns if opened < turn.finished_s <= closed]


def working_set(sessions: Sequence[Session], concurrent: int) -> int:
    """Final logical tokens of as many sessions as run at a time, on average over the sessions."""
    return round(statistics.fmean(session.final_tokens for session in sessions) * concurrent)


def pool_tokens(sessions: Sequence[Session], concurrent: int, share: float) -> int:
    """Pool that is ``share`` of the working set.

    Raises:
        ConfigError: one session alone would not fit.
    """
    pool = int(share * working_set(sessions, concurrent))
    longest = max(session.final_tokens for session in sessions)
    if longest >= pool:
        raise ConfigError(f"The longest session has {longest} tokens, a pool of {share} has {pool}; raise --pool or --concurrent.")
    return pool


class Traffic:
    """The lanes: each plays one session after the other. All arms get the same prompts as far as the servers answer alike."""

    def __init__(
        self, client: ServerClient, frames: Frames, sessions: Sequence[Session], arm: Arm, options: Options, done: Callable[[Turn], None]
    ) -> None:
        self._client = client
        self._frames = frames
        self._sessions = sessions
        self._arm = arm
        self._options = options
        self._done = done
        self._cold = set(range(options.concurrent))
        self._run = f"{time.time_ns():x}"
        self.warm = asyncio.Event()

    async def lane(self, number: int) -> None:
        """Play sessions until cancelled, or until the server keeps refusing."""
        failed = 0
        for visit in itertools.count():
            session = self._sessions[(number + visit * self._options.concurrent) % len(self._sessions)]
            # spread over their length, so that sessions do not grow and end in step
            first = len(session.turns) * number // self._options.concurrent if visit == 0 else 0
            failed = 0 if await self._play(session, first, number, visit) else failed + 1
            if failed == _GIVE_UP:
                return

    async def _play(self, session: Session, first: int, lane: int, visit: int) -> bool:
        dialogue = Dialogue(self._frames, f"{self._options.seed}/{lane}/{visit}")
        name = f"{lane}/{visit}/{session.name}"
        known: int | None = None  # tokens whose KV the server has computed in this session
        for number, size in enumerate(session.turns):
            for message in size.added:
                dialogue.add(message.role, message.tokens)
            prompt = dialogue.ask()
            if number < first:
                dialogue.pretend(size.completion_tokens)
                continue
            body = generate_body(prompt, size.completion_tokens, self._arm.request, session_id=f"{self._run}/{name}")
            body["sampling_params"]["stream_interval"] = _STREAM_INTERVAL
            turn = TurnRecord(trajectory=name, source="bench", turn=number, arm=self._arm.name, status=SKIPPED, prompt_tokens=len(prompt))
            try:
                generation = await self._client.stream(body)
            except RequestFailed as error:
                self._record(lane, turn.model_copy(update={"status": f"error: {error}"}))
                return False
            # nothing of a session's first prompt was there before, but perhaps a system prompt that others share
            new = len(prompt) - (generation.cached_tokens if known is None else known)
            self._record(lane, finished(turn, generation), new_tokens=new, last=number == len(session.turns) - 1)
            known = len(prompt) + len(generation.output_ids) - 1  # the last token need not have been an input
            dialogue.answer(generation.output_ids)
        return True

    def _record(self, lane: int, turn: TurnRecord, **fields: Any) -> None:
        self._done(Turn(**turn.model_dump(), finished_s=time.perf_counter(), **fields))
        self._cold.discard(lane)
        if not self._cold:
            self.warm.set()


class Pool(NamedTuple):
    share: float
    """Of the working set."""
    tokens: int


class Window(NamedTuple):
    opened: float
    closed: float
    warm: bool
    lanes_lost: int
    prune: PruneCounters | None


async def observe(link: bench_arms.Connection, traffic: Traffic, options: Options) -> Window:
    """Start the lanes, wait until they are warm, let the window pass, and give up what is in flight at its end.

    Raises:
        RequestFailed: the server's counters cannot be read.
    """
    lanes = [asyncio.create_task(traffic.lane(number)) for number in range(options.concurrent)]
    try:
        warming = asyncio.create_task(traffic.warm.wait())
        await asyncio.wait([warming], timeout=options.warmup_s)
        warming.cancel()
        before = await read_counters(link.http)
        opened = time.perf_counter()
        await asyncio.wait(lanes, timeout=options.seconds)
        closed = time.perf_counter()
        after = await read_counters(link.http)
    finally:
        lost = [lane for lane in lanes if lane.done()]
        for lane in lanes:
            lane.cancel()
        await asyncio.gather(*lanes, return_exceptions=True)
    for lane in lost:
        lane.result()  # an error of ours is not a lost lane
    prune = after.since(before) if before is not None and after is not None else None
    return Window(opened, closed, traffic.warm.is_set(), len(lost), prune)


async def run_cell(
    endpoint: Endpoint, frames: Frames, sessions: Sequence[Session], arm: Arm, options: Options, pool: Pool, round_number: int
) -> tuple[Cell, list[Turn]]:
    """Measure one arm on a server that is up, its cache emptied first.

    Raises:
        RequestFailed: the server does not answer, or does not become idle.
    """
    turns: list[Turn] = []
    start = bench_arms.log_size(endpoint.log)
    async with connection(endpoint.url, options.timeout_s, options.concurrent) as link:
        await bench_arms.flush_when_idle(link.client)
        with tqdm(desc=f"{arm.name}, pool {pool.share:g}", unit="turn") as progress:

            def done(turn: Turn) -> None:
                turns.append(turn.model_copy(update={"pool_share": pool.share, "round": round_number}))
                progress.update()

            window = await observe(link, Traffic(link.client, frames, sessions, arm, options, done), options)
    return make_cell(arm.name, pool, round_number, window, turns, bench_arms.error_lines(endpoint.log, start)), turns


def make_cell(arm: str, pool: Pool, round_number: int, window: Window, turns: Sequence[Turn], server_errors: list[str] | None) -> Cell:
    """Figures of one window from all turns of the run."""
    errors = sorted({turn.status for turn in turns if not turn.ok})
    turns = within(turns, window.opened, window.closed)
    seconds = window.closed - window.opened
    figures = aggregate(turns, seconds)
    ok = [turn for turn in turns if turn.ok]
    tasks = sum(turn.last for turn in ok)
    new_tokens = sum(turn.new_tokens for turn in ok)
    prune = window.prune
    return Cell(
        arm=arm,
        pool_share=pool.share,
        pool_tokens=pool.tokens,
        round=round_number,
        window_s=seconds,
        warm=window.warm,
        lanes_lost=window.lanes_lost,
        turns=len(ok),
        failed_turns=len(turns) - len(ok),
        errors=errors,
        tasks=tasks,
        turns_per_s=len(ok) / seconds,
        tasks_per_s=tasks / seconds,
        generated_tokens_per_s=figures.generated_tokens_per_s,
        ttft_s=figures.ttft_s,
        tpot_s=figures.tpot_s,
        prompt_tokens=figures.prompt_tokens,
        cached_tokens=figures.cached_tokens,
        new_tokens=new_tokens,
        recomputed_tokens=recomputed(turns),
        prefix_hit_rate=figures.prefix_hit_rate,
        ample_hit_rate=1 - new_tokens / figures.prompt_tokens if figures.prompt_tokens else 0.0,
        live_hit_rate=figures.live_hit_rate,
        peak_live_tokens=figures.peak_live_max,
        peak_logical_tokens=figures.peak_logical_max,
        mean_logical_tokens=statistics.fmean(turn.logical for turn in ok) if ok else 0.0,
        prune=None if prune is None else PruneFigures.of(prune),
        server_errors=server_errors,
    )


def ratios(cells: Sequence[Cell]) -> list[Ratio]:
    """Every arm against the stock arm of the same pool and round; arms without one are left out."""
    stock = {(cell.pool_share, cell.round): cell for cell in cells if cell.arm == "stock"}
    pairs: dict[tuple[float, str], list[tuple[Cell, Cell]]] = {}
    for cell in cells:
        base = stock.get((cell.pool_share, cell.round))
        if base is not None and cell.arm != "stock":
            pairs.setdefault((cell.pool_share, cell.arm), []).append((cell, base))
    return [
        Ratio(
            arm=arm,
            pool_share=share,
            turns=_median_ratio(found, lambda cell: cell.turns_per_s),
            tasks=_median_ratio(found, lambda cell: cell.tasks_per_s),
            generated_tokens=_median_ratio(found, lambda cell: cell.generated_tokens_per_s),
            ttft_p50=_median_ratio(found, lambda cell: cell.ttft_s.p50 if cell.ttft_s else 0.0),
            tpot_p50=_median_ratio(found, lambda cell: cell.tpot_s.p50 if cell.tpot_s else 0.0),
        )
        for (share, arm), found in pairs.items()
    ]


def _median_ratio(pairs: Sequence[tuple[Cell, Cell]], value: Callable[[Cell], float]) -> float | None:
    found = [value(cell) / value(base) for cell, base in pairs if value(base)]
    return statistics.median(found) if found else None


def picture(result: Result) -> str:
    """Turn throughput against stock over the pool's share, as one HTML page that works offline."""
    import plotly.graph_objects as go  # only the picture needs it

    figure = go.Figure()
    for arm in dict.fromkeys(ratio.arm for ratio in result.ratios):
        points = sorted((r.pool_share, r.turns) for r in result.ratios if r.arm == arm and r.turns is not None)
        figure.add_scatter(name=arm, x=[share for share, _ in points], y=[turns for _, turns in points], mode="lines+markers")
    figure.add_hline(y=1, line_dash="dot", annotation_text="stock SGLang")
    figure.update_layout(
        template="plotly_white",
        title=f"Turn throughput at equal KV memory, {result.options.concurrent} sessions at a time ({result.origin.device})",
        legend={"orientation": "h", "y": -0.2},
    )
    figure.update_xaxes(title="KV pool / working set", type="log", autorange="reversed")
    figure.update_yaxes(title="turns per second / stock", rangemode="tozero")
    return bench_arms.page(figure)


class Bench:
    """One run: servers, cells, and the files they end in, written anew after each cell."""

    def __init__(self, options: Options, servers: Servers) -> None:
        self._options = options
        self._servers = servers
        self._file = bench_arms.new_folder(servers.out, RESULT_FILE)
        self._arms = [parse_arm(text) for text in options.arms]
        dataset = load_dataset(options.input)
        frames, sessions = asyncio.run(_sessions(options, dataset.trajectories))
        self._frames, self._sessions = frames, sessions
        self.result = Result(
            origin=Origin(device=bench_arms.device_name(), seed=options.seed, data_sha256=dataset.sha256),
            options=options,
            length_of_sessions=_length_text(options),
            working_set_tokens=working_set(sessions, options.concurrent),
            session_tokens=[session.final_tokens for session in sessions],
        )

    def run(self) -> Result:
        """Measure all cells: pool by pool, arms interleaved over the rounds as far as their servers run at the same time.

        Raises:
            ConfigError: a pool is too small for a session or too large for the machine, or a server does not answer.
            ServerError: a server did not start.
        """
        kinds: list[Kind] = list(dict.fromkeys(arm.kind for arm in self._arms))
        if any(self._servers.existing):
            self._run_stage(kinds, None)
            return self.result
        options = self._options
        pools = [Pool(share, pool_tokens(self._sessions, options.concurrent, share)) for share in options.pools]
        for pool in pools:
            for stage in [kinds] if options.together else [[kind] for kind in kinds]:
                self._run_stage(stage, pool)
        return self.result

    def _run_stage(self, kinds: Sequence[Kind], pool: Pool | None) -> None:
        """Run the arms of ``kinds``, whose servers are up at the same time; ``pool`` is None when they were before."""
        with ExitStack() as stack:
            servers = {kind: stack.enter_context(self._server(kind, pool)) for kind in kinds}
            sizes = {self._describe(kind, server, pool) for kind, server in servers.items()}
            if len(sizes) > 1:
                raise ConfigError(f"The servers' pools differ ({sorted(sizes)} tokens); start both with the same --max-total-tokens.")
            measured = pool or Pool(round(min(sizes) / self.result.working_set_tokens, 3), min(sizes))
            for round_number in range(self._options.rounds):
                for arm in self._arms:
                    if arm.kind in servers:
                        self._cell(servers[arm.kind], arm, round_number, measured)

    def _server(self, kind: Kind, pool: Pool | None) -> AbstractContextManager[Endpoint]:
        if pool is None:
            return self._servers.serve(kind)
        return self._servers.serve(kind, f"-{pool.share:g}", flags=["--max-total-tokens", str(pool.tokens)])

    def _describe(self, kind: Kind, endpoint: Endpoint, pool: Pool | None) -> int:
        """Note what the server is; its pool in tokens."""
        provenance = asyncio.run(bench_arms.server_provenance(endpoint.url, self._options.timeout_s))
        self.result.origin.servers[kind if pool is None else f"{kind}, pool {pool.share:g}"] = provenance
        tokens = int(provenance.server.get("max_total_num_tokens") or 0)
        if pool is not None and tokens < pool.tokens:
            raise ConfigError(f"The server has room for {tokens} tokens, not {pool.tokens}; lower --pool or --concurrent.")
        return tokens

    def _cell(self, endpoint: Endpoint, arm: Arm, round_number: int, pool: Pool) -> None:
        try:
            cell, turns = asyncio.run(run_cell(endpoint, self._frames, self._sessions, arm, self._options, pool, round_number))
        except RequestFailed as error:
            raise ConfigError(f"The {arm.kind} server cannot be measured: {error}; see its log.") from error
        with self._file.with_name(TURNS_FILE).open("a") as file:
            file.writelines(turn.model_dump_json() + "\n" for turn in turns)
        self.result.cells.append(cell)
        self.result.ratios = ratios(self.result.cells)
        self._file.write_text(self.result.model_dump_json(indent=2) + "\n")
        bench_arms.write_picture(self._file, lambda: picture(self.result))


async def _sessions(options: Options, trajectories: Sequence[Any]) -> tuple[Frames, list[Session]]:
    template, tokenize, frames = await open_frames(options.model)
    chosen = trajectories[: options.sessions]
    if len(chosen) < options.sessions:
        raise ConfigError(f"The input has {len(chosen)} sessions, not {options.sessions}; lower --sessions or give more input.")
    sessions = await recorded_sessions(chosen, template, tokenize, options.max_turns, options.max_tokens, options.max_context)
    if options.long is not None:
        sessions = joined_sessions(sessions, frames.markers, *options.long, options.seed)
    return frames, sessions


def _length_text(options: Options) -> str:
    text = f"sizes of the first {options.max_turns} turns of recorded sessions, random content"
    return text if options.long is None else f"{text}; recorded sessions joined to {options.long[0]} to {options.long[1]} tokens"


def tables(result: Result) -> Iterator[Table]:
    """Figures of every cell, then the ratios."""
    table = Table(
        title=f"{result.options.concurrent} of {len(result.session_tokens)} sessions at a time, working set "
        f"{result.working_set_tokens:,} tokens, {result.origin.device}\n{result.length_of_sessions}"
    )
    columns = (
        "pool",
        "arm",
        "round",
        "turns/s",
        "tasks/s",
        "tok/s",
        "hit",
        "of",
        "recomputed",
        "peak live",
        "TTFT p50/p95",
        "TPOT p50/p95",
    )
    for column in (*columns, "prunes", "prune p50/p99", "failed"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for cell in result.cells:
        prune = cell.prune
        table.add_row(
            f"{cell.pool_share:g}",
            cell.arm,
            str(cell.round + 1),
            f"{cell.turns_per_s:.2f}",
            f"{cell.tasks_per_s:.3f}",
            f"{cell.generated_tokens_per_s:.0f}",
            f"{cell.prefix_hit_rate:.1%}",
            f"{cell.ample_hit_rate:.1%}",
            f"{cell.recomputed_tokens:,}",
            f"{cell.peak_live_tokens:,}",
            _two([cell.ttft_s.p50, cell.ttft_s.p95] if cell.ttft_s else [], 1, "s"),
            _two([cell.tpot_s.p50, cell.tpot_s.p95] if cell.tpot_s else [], 1000, "ms"),
            "–" if prune is None else str(prune.events),
            _two([prune.p50_s, prune.p99_s] if prune else [], 1000, "ms"),
            str(cell.failed_turns),
        )
    yield table
    table = Table(title="Against stock with the same pool")
    for column in ("pool", "arm", "turns/s", "tasks/s", "tok/s", "TTFT p50", "TPOT p50"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for ratio in result.ratios:
        values = (ratio.turns, ratio.tasks, ratio.generated_tokens, ratio.ttft_p50, ratio.tpot_p50)
        table.add_row(f"{ratio.pool_share:g}", ratio.arm, *("–" if value is None else f"{value:.2f}×" for value in values))
    yield table


def _two(values: Sequence[float | None], scale: float, unit: str) -> str:
    known = [f"{value * scale:.3g}" for value in values if value is not None]
    return f"{' / '.join(known)} {unit}" if known else "–"


app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command(cls=Command, context_settings=bench_arms.PASS_ON)
def main(
    context: typer.Context,
    files: Annotated[list[Path], typer.Option("--input", help="Recorded agents, JSONL; may be given again.")],
    model: bench_arms.ModelOption,
    out: bench_arms.OutOption,
    arm: bench_arms.ArmsOption = _ARMS,
    pool: Annotated[list[float], typer.Option(help="Pool as a share of the working set; may be given again.")] = _POOLS,
    sessions: Annotated[int, typer.Option(min=1, help="Different sessions: the first ones of the input.")] = 24,
    concurrent: Annotated[int, typer.Option(min=1, help="Sessions that run at a time.")] = 16,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of the measured window of each arm.")] = 60,
    warmup: Annotated[float, typer.Option(min=0, help="At most this many seconds until every session has finished a turn.")] = 120,
    rounds: Annotated[int, typer.Option(min=1, help="Windows of each arm; arms of one server take turns.")] = 1,
    long: Annotated[bool, typer.Option("--long", help="Join recorded sessions to --long-tokens.")] = False,
    long_tokens: Annotated[tuple[int, int], typer.Option(help="Shortest and longest joined session.")] = (40_000, 90_000),
    max_turns: Annotated[int, typer.Option(min=1, help="First turns of each recording that are used.")] = 30,
    max_context: Annotated[int, typer.Option(min=1, help="Leave out a recording's turns past this many tokens.")] = 100_000,
    max_tokens: Annotated[int, typer.Option(min=1, help="At most this many generated tokens a turn.")] = 512,
    together: Annotated[bool, typer.Option("--together", help="Run both servers at once, so that stock takes turns, too.")] = False,
    url_stock: bench_arms.StockUrlOption = None,
    url_plugin: bench_arms.PluginUrlOption = None,
    log_stock: bench_arms.StockLogOption = None,
    log_plugin: bench_arms.PluginLogOption = None,
    seed: bench_arms.SeedOption = 0,
    timeout: bench_arms.TimeoutOption = 600,
    start_timeout: bench_arms.StartTimeoutOption = 600,
) -> int:
    """Measure throughput, latency and recomputed tokens of several arms with the same, too small KV pool.

    Every other flag goes to the servers. With --url-stock or --url-plugin the pool is what those servers have.
    Exit status 1 when a turn failed or a server did not start.
    """
    options = Options(
        input=files,
        model=model,
        arms=arm,
        sessions=sessions,
        concurrent=concurrent,
        pools=pool,
        seconds=seconds,
        warmup_s=warmup,
        rounds=rounds,
        long=long_tokens if long else None,
        max_turns=max_turns,
        max_context=max_context,
        max_tokens=max_tokens,
        seed=seed,
        together=together,
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
            Console(width=200).print(*tables(bench.result))
    return 1 if any(cell.failed_turns or cell.lanes_lost for cell in bench.result.cells) else 0


if __name__ == "__main__":
    app()
