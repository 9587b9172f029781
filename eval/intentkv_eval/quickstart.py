"""The same research agent on stock SGLang and on IntentKV, one server after the other: ``python -m intentkv_eval.quickstart``.

The agent is :func:`intentkv_eval.world.research_session`: a question, much reading about other things, and the question again. Shown are
the cost of both arms and whether the text that answers is still resident when the question comes back.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import httpx
import typer
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand

from intentkv.cli import OneLineErrors
from intentkv.config import load_config
from intentkv.conversation import render
from intentkv.trajectories import Trajectory, load_dataset
from intentkv_eval.client import connect
from intentkv_eval.conversation import Tokenize, choose_template, encode
from intentkv_eval.replay import TURNS_FILE, ReplayOptions, replay
from intentkv_eval.report import write_report
from intentkv_eval.runs import load_run
from intentkv_eval.server import ServerError, running_server
from intentkv_eval.turns import Aggregates
from intentkv_eval.world import Needle, Session, research_session

RESULT_FILE = "summary.json"
SESSION_FILE = "session.jsonl"
REPORT_FILE = "report.html"


class Arm(NamedTuple):
    name: str
    arguments: list[str]
    """Flags of ``intentkv serve`` that only this arm has."""


class ArmResult(BaseModel):
    arm: str
    folder: str
    """With the run's own turns.jsonl and summary.json, which say everything else about it, and the server's log."""
    aggregates: Aggregates
    answer_tokens: int | None
    """Tokens of the text that answers the question; None when a turn failed."""
    answer_live_tokens: int | None
    """How many of them are resident after the last turn."""


class QuickstartResult(BaseModel):
    """``summary.json``."""

    session: str
    question: str
    answer_text: str
    arms: list[ArmResult]


def token_span(whole: Sequence[int], before: Sequence[int], after: Sequence[int]) -> tuple[int, int]:
    """Where a piece of a text stands in the text's tokens: the smallest ``[start, end)`` that is sure to hold it.

    Args:
        whole: tokens of ``before + piece + after``.
        before: tokens of the text in front of the piece, tokenised alone.
        after: tokens of the text behind it, tokenised alone.
    """
    return _common(whole, before), len(whole) - _common(reversed(whole), reversed(after))


def _common(left: Iterable[int], right: Iterable[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def live_in(span: tuple[int, int], dead_spans: Iterable[Sequence[int]]) -> int:
    """Positions of ``span`` that are in none of the disjoint ``dead_spans``."""
    start, end = span
    return end - start - sum(max(0, min(end, stop) - max(start, begin)) for begin, stop in dead_spans)


async def needle_span(trajectory: Trajectory, needle: Needle, prompts: Sequence[int], tokenize: Tokenize) -> tuple[int, int]:
    """Positions ``[start, end)`` of the needle in the prompts that were sent.

    Args:
        prompts: tokens of each turn's prompt; the server's own words may be shorter than the recorded ones.
        tokenize: the server's tokenizer.
    """
    template = await choose_template(None, tokenize)
    conversation = await encode(trajectory, template, tokenize)
    before, after = render(trajectory, template)[needle.message].split(needle.text)
    start, end = token_span(conversation.messages[needle.message].ids, *await tokenize([before, after]))
    earlier, later = conversation.messages[: needle.message], conversation.messages[needle.message :]
    turn = sum(message.role == "assistant" for message in earlier)
    added = itertools.takewhile(lambda message: message.role != "assistant", later)
    offset = prompts[turn] - len(conversation.generation_prompt) - sum(len(message.ids) for message in added)
    return offset + start, offset + end


async def _needle_span(options: ReplayOptions, needle: Needle) -> tuple[int, int]:
    trajectory = load_dataset(options.files).trajectories[0]
    prompts = [turn.prompt_tokens for turn in load_run(options.out).turns]
    async with connect(options.url, options.timeout_s) as client:
        return await needle_span(trajectory, needle, prompts, client.tokenize)


def _dead_spans(url: str, session_id: str, timeout_s: float) -> list[list[int]]:
    """Evicted positions of a session; none on a stock server, which has no such route."""
    response = httpx.get(f"{url}/intentkv/status", params={"session": session_id}, timeout=timeout_s)
    if response.status_code == httpx.codes.NOT_FOUND:
        return []
    items = response.raise_for_status().json()["sessions"]["items"]
    return [span for item in items for span in item["dead_spans"]]


def _run_arm(arm: Arm, session: Session, out: Path, shared_arguments: list[str], timeout_s: float) -> ArmResult:
    folder = out / arm.name
    (folder / TURNS_FILE).unlink(missing_ok=True)
    with running_server([*shared_arguments, *arm.arguments], folder / "server.log", timeout_s) as server:
        options = ReplayOptions(url=server.url, files=[out / SESSION_FILE], out=folder, arm=arm.name, timeout_s=timeout_s)
        aggregates = asyncio.run(replay(options)).aggregates
        result = ArmResult(arm=arm.name, folder=folder.name, aggregates=aggregates, answer_tokens=None, answer_live_tokens=None)
        if aggregates.failed_turns:
            return result
        span = asyncio.run(_needle_span(options, session.needle))
        dead = _dead_spans(server.url, f"{arm.name}/0/{session.record['id']}", timeout_s)
    return result.model_copy(update={"answer_tokens": span[1] - span[0], "answer_live_tokens": live_in(span, dead)})


def run(session: Session, arms: Sequence[Arm], out: Path, server_arguments: list[str], timeout_s: float) -> QuickstartResult:
    """Run all arms and write ``session.jsonl``, ``summary.json`` and ``report.html`` to ``out``, over those of an earlier run.

    Raises:
        ServerError: a server did not start.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / SESSION_FILE).write_text(json.dumps(session.record, ensure_ascii=False) + "\n", encoding="utf-8")
    results = [_run_arm(arm, session, out, server_arguments, timeout_s) for arm in arms]
    result = QuickstartResult(session=session.record["id"], question=session.record["task"], answer_text=session.needle.text, arms=results)
    (out / RESULT_FILE).write_text(result.model_dump_json(indent=2) + "\n", encoding="utf-8")
    write_report([out / arm.name for arm in arms], out / REPORT_FILE)
    return result


def _table(result: QuickstartResult) -> Table:
    table = Table(title="Tokens; 'answer live': of the text that answers the question, after the last turn")
    columns = ("arm", "prefix hit", "peak logical", "peak live", "pruned", "KV reads", "answer live")
    for column in columns:
        table.add_column(column, justify="left" if column == "arm" else "right")
    for arm in result.arms:
        figures = arm.aggregates
        table.add_row(
            arm.arm,
            f"{figures.prefix_hit_rate:.1%}",
            f"{figures.peak_logical_max:,}",
            f"{figures.peak_live_max:,}",
            f"{figures.pruned_tokens:,}",
            f"{figures.kv_reads:,}",
            "turn failed" if arm.answer_tokens is None else f"{arm.answer_live_tokens}/{arm.answer_tokens}",
        )
    return table


class _Command(OneLineErrors, TyperCommand):
    pass


app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command(cls=_Command)
def main(
    out: Annotated[Path, typer.Option(help="Folder for summary.json, report.html and the runs; an earlier run is overwritten.")] = Path(
        "out/quickstart"
    ),
    model: Annotated[str | None, typer.Option(help="Model folder or Hugging Face id. Default: SmolLM2-135M, made on this machine.")] = None,
    method: Annotated[str | None, typer.Option(help="Method of the intentkv arm; default: the server's.")] = None,
    budget: Annotated[int, typer.Option(min=1, help="Budget of the intentkv arm, in tokens.")] = 1024,
    seed: Annotated[int, typer.Option(help="Of the session; another seed gives other countries.")] = 0,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that a server's start or one turn may take.")] = 900,
) -> int:
    """Run a research agent on stock SGLang and on IntentKV on this machine and compare them; some minutes on two CPU cores.

    Exit status 1 when a turn failed or a server did not start.
    """
    load_config(None, method=method, budget=budget)  # a bad value is found here and not after the first server
    session = research_session(seed)
    arms = [
        Arm("stock", ["--stock"]),
        Arm("intentkv", ["--budget", str(budget), *(["--method", method] if method else [])]),
    ]
    console = Console()
    console.print(f"A research session of {len(session.record['messages'])} messages, on stock SGLang and then on IntentKV")
    try:
        result = run(session, arms, out, ["--model", model] if model else [], timeout)
    except ServerError as error:
        typer.echo(f"Error: {error}", err=True)
        return 1
    console.print(_table(result))
    console.print(f"Asked first and last: {result.question}{os.linesep}Text that answers: {result.answer_text}", soft_wrap=True)
    console.print(f"Figures: {out / RESULT_FILE}{os.linesep}Report:  {out / REPORT_FILE}", soft_wrap=True)
    return 1 if any(arm.aggregates.failed_turns for arm in result.arms) else 0


if __name__ == "__main__":
    app()
