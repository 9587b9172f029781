"""Replay recorded agents against a server, closed loop at token level.

The next turn's prompt is the previous prompt, the server's own output, the end-of-message marker unless the output wrote it, the ids of the
recorded tool and user messages and the generation prompt. So the prefix of every turn is what the server itself computed, and hits are
real. A turn generates as many tokens as were recorded (``ignore_eos``), so all arms do the same work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from pydantic import BaseModel, ConfigDict, Field
from tqdm import tqdm

from intentkv.config import ConfigError, RequestOptions, parse_request_options
from intentkv.conversation import Conversation
from intentkv.trajectories import Dataset, Trajectory, load_dataset
from intentkv_eval.bench_counters import PruneCounters, PruneFigures, parse_counters
from intentkv_eval.client import RequestFailed, ServerClient, connect, generate_body
from intentkv_eval.conversation import choose_template, encode
from intentkv_eval.overhead import CallCounts, count_calls
from intentkv_eval.provenance import Provenance, collect
from intentkv_eval.samples import sampling
from intentkv_eval.turns import SKIPPED, Aggregates, TurnRecord, aggregate, arm_name, finished

TURNS_FILE = "turns.jsonl"
SUMMARY_FILE = "summary.json"


class ReplayOptions(BaseModel):
    """What :func:`run` is asked to do; the fields are the flags of ``intentkv replay``."""

    model_config = ConfigDict(frozen=True)

    url: str
    files: list[Path]
    out: Path
    arm: str | None = None
    limit: int | None = None
    max_context: int = Field(default=8000, ge=1)
    max_tokens: int = Field(default=512, ge=1)
    concurrency: int = Field(default=1, ge=1)
    session_ids: bool = True
    flush: bool = True
    request: RequestOptions = RequestOptions()
    template: str | None = None
    timeout_s: float = 600
    sample_s: float = Field(default=1.0, gt=0)
    """Seconds between two samples of the server's pool."""


def request_options(**options: object) -> RequestOptions:
    """Options sent with every request; ``None`` means not given.

    Raises:
        ConfigError: an invalid value.
    """
    return parse_request_options({name: value for name, value in options.items() if value is not None})


class DatasetInfo(BaseModel):
    files: list[str]
    sha256: str
    trajectories: int
    broken_lines: list[str]
    shortened: int
    """Trajectories cut at the context limit."""
    without_turns: list[str]
    """Ids of trajectories whose first turn is over the limit already, or that have no assistant message."""


class Summary(BaseModel):
    """``summary.json``."""

    arm: str
    provenance: Provenance
    options: ReplayOptions
    seeds: dict[str, int | None]
    dataset: DatasetInfo
    aggregates: Aggregates
    prune: PruneFigures | None = None
    """What evictions cost during the run; None on a stock server."""


_NO_CALLS = CallCounts(0, 0, 0)


@dataclass(frozen=True)
class Turn:
    """One planned turn: what the client adds to the conversation and how much the server shall write."""

    added: list[int]
    """Ids of the recorded tool, user and system messages before it, without the generation prompt."""
    completion_tokens: int
    prompt_tokens: int
    """Of the planned prompt; the real one is shorter where an output wrote its own end marker."""
    calls: CallCounts = _NO_CALLS
    """Recorded tool calls of the turn."""


@dataclass(frozen=True)
class Plan:
    """The turns of one trajectory that fit the context limit."""

    trajectory: Trajectory
    conversation: Conversation
    turns: list[Turn]
    shortened: bool

    @property
    def final_tokens(self) -> int:
        """Logical tokens once the last turn is done."""
        return self.turns[-1].prompt_tokens + self.turns[-1].completion_tokens if self.turns else 0


def plan_turns(trajectory: Trajectory, conversation: Conversation, max_context: int, max_tokens: int) -> Plan:
    """Cut a trajectory into turns; the first turn that would grow past ``max_context`` tokens and all later ones are left out."""
    turns: list[Turn] = []
    added: list[int] = []
    length = 0
    # a template may put a system message in front, so the two lists are aligned by their assistant messages
    counts = iter(count_calls(message for message in trajectory.messages if message.role == "assistant"))
    for message in conversation.messages:
        if message.role != "assistant":
            added += message.ids
            continue
        prompt = length + len(added) + len(conversation.generation_prompt)
        completion = min(max_tokens, conversation.completion_tokens(message))
        if prompt + completion > max_context:
            return Plan(trajectory, conversation, turns, shortened=True)
        turns.append(Turn(added, completion, prompt, next(counts)))
        added = []
        length = prompt + completion + len(conversation.message_end)
    return Plan(trajectory, conversation, turns, shortened=False)


async def make_plans(client: ServerClient, dataset: Dataset, template: str | None, max_context: int, max_tokens: int) -> list[Plan]:
    """Plans of all trajectories, tokenised by the server.

    Raises:
        ConfigError: no chat template fits the server's tokenizer.
        RequestFailed: the server does not tokenise.
    """
    chosen = await choose_template(template, client.tokenize)
    plans = []
    for trajectory in dataset.trajectories:
        conversation = await encode(trajectory, chosen, client.tokenize)
        plans.append(plan_turns(trajectory, conversation, max_context, max_tokens))
    return plans


async def replay_trajectory(
    client: ServerClient, plan: Plan, arm: str, request: RequestOptions, session_id: str | None, done: Callable[[TurnRecord], None]
) -> None:
    """Play the turns of one trajectory in order; ``done`` gets every turn's record. No retries: after a failed turn the rest is skipped."""
    fields = {} if session_id is None else {"session_id": session_id}
    conversation = plan.conversation
    ids: list[int] = []
    failed = False
    for number, turn in enumerate(plan.turns):
        record = TurnRecord(
            trajectory=plan.trajectory.id,
            source=plan.trajectory.source,
            turn=number,
            arm=arm,
            status=SKIPPED,
            prompt_tokens=turn.prompt_tokens,
            tool_calls=turn.calls.calls,
            duplicate_calls=turn.calls.duplicates,
            near_duplicate_calls=turn.calls.near_duplicates,
        )
        if failed:
            done(record)
            continue
        ids = [*ids, *turn.added, *conversation.generation_prompt]
        try:
            generation = await client.stream(generate_body(ids, turn.completion_tokens, request, **fields))
        except RequestFailed as error:
            failed = True
            done(record.model_copy(update={"status": f"error: {error}", "prompt_tokens": len(ids)}))
            continue
        done(finished(record, generation))
        ids = [*ids, *generation.output_ids, *conversation.close(generation.output_ids)]


async def replay_plans(
    client: ServerClient, plans: Sequence[Plan], arm: str, options: ReplayOptions, turns_file: TextIO
) -> list[TurnRecord]:
    """Play all plans, at most ``options.concurrency`` at a time; every record is written to ``turns_file`` as soon as it is there."""
    records: list[TurnRecord] = []
    bounded = asyncio.Semaphore(options.concurrency)
    with tqdm(total=sum(len(plan.turns) for plan in plans), desc=arm, unit="turn") as progress:

        def done(record: TurnRecord) -> None:
            records.append(record)
            turns_file.write(record.model_dump_json() + "\n")
            turns_file.flush()
            progress.update()

        async def play(number: int, plan: Plan) -> None:
            async with bounded:
                session_id = f"{arm}/{number}/{plan.trajectory.id}" if options.session_ids else None
                await replay_trajectory(client, plan, arm, options.request, session_id, done)

        await asyncio.gather(*(play(number, plan) for number, plan in enumerate(plans)))
    return records


async def replay(options: ReplayOptions) -> Summary:
    """Replay ``options.files`` against ``options.url``; write ``turns.jsonl``, ``pool.jsonl`` and ``summary.json`` to ``options.out``.

    Raises:
        ConfigError: unreadable input, an output folder that holds a run already, or no server.
    """
    dataset = load_dataset(options.files, options.limit)
    for line in dataset.broken:
        tqdm.write(f"Broken line left out: {line}")
    if (options.out / TURNS_FILE).exists():
        raise ConfigError(f"Folder {str(options.out)!r} holds a run already; give another --out.")
    try:
        async with connect(options.url, options.timeout_s, options.concurrency) as client:
            return await _replay_dataset(client, dataset, options)
    except RequestFailed as error:
        raise ConfigError(f"The server at {options.url} cannot be replayed to: {error}.") from error


async def _replay_dataset(client: ServerClient, dataset: Dataset, options: ReplayOptions) -> Summary:
    provenance = await collect(client)
    plans = await make_plans(client, dataset, options.template, options.max_context, options.max_tokens)
    if options.flush:
        await client.flush_cache()
    arm = options.arm or _arm_name(provenance, options.request)
    options.out.mkdir(parents=True, exist_ok=True)
    before = await _prune_counters(client)
    async with sampling(client, options.out, options.sample_s):
        with (options.out / TURNS_FILE).open("w") as turns_file:
            start = time.perf_counter()
            records = await replay_plans(client, plans, arm, options, turns_file)
            wall_s = time.perf_counter() - start
    after = await _prune_counters(client)
    summary = Summary(
        arm=arm,
        provenance=provenance,
        options=options,
        seeds={"server": provenance.server.get("random_seed")},
        dataset=DatasetInfo(
            files=[str(file) for file in options.files],
            sha256=dataset.sha256,
            trajectories=len(dataset.trajectories),
            broken_lines=dataset.broken,
            shortened=sum(plan.shortened for plan in plans),
            without_turns=[plan.trajectory.id for plan in plans if not plan.turns],
        ),
        aggregates=aggregate(records, wall_s),
        prune=None if before is None or after is None else PruneFigures.of(after.since(before)),
    )
    (options.out / SUMMARY_FILE).write_text(summary.model_dump_json(indent=2) + "\n")
    return summary


async def _prune_counters(client: ServerClient) -> PruneCounters | None:
    """The server's counters; None from a stock one, or when it is gone, since what was measured is worth more than its counters."""
    try:
        status = await client.status()
        return None if status is None else parse_counters(status["counters"], await client.metrics())
    except RequestFailed:
        return None


def _arm_name(provenance: Provenance, request: RequestOptions) -> str:
    method = request.method or provenance.method
    if method is None:
        return "stock"
    return arm_name(method, request.budget or provenance.budget, request.budget_ratio)


def run(options: ReplayOptions) -> int:
    """``intentkv replay``: replay, print the main figures; 1 when a turn failed, else 0."""
    summary = asyncio.run(replay(options))
    figures = summary.aggregates
    print(
        f"{summary.arm}: {figures.turns} turns of {figures.trajectories} trajectories, {figures.failed_turns} failed, "
        f"prefix-hit rate {figures.prefix_hit_rate:.1%}, peak live {figures.peak_live_max} of {figures.peak_logical_max} logical tokens; "
        f"results in {options.out}"
    )
    return 1 if figures.failed_turns else 0
