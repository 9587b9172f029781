"""Folders as the commands write them, small enough to compute by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from intentkv.recording import RequestRecord
from intentkv_eval import bench_capacity, bench_decode, bench_prune
from intentkv_eval.bench_arms import Origin
from intentkv_eval.bench_counters import PruneFigures
from intentkv_eval.provenance import Provenance
from intentkv_eval.replay import DatasetInfo, ReplayOptions, Summary
from intentkv_eval.turns import TurnRecord, aggregate

HOSTILE = "</script><script>alert(1)</script><b>&"


def turn(trajectory: str, number: int, prompt: int, cached: int, live: int, status: str = "ok", source: str = "made") -> TurnRecord:
    done = status == "ok"
    return TurnRecord(
        trajectory=trajectory,
        source=source,
        turn=number,
        arm="a",
        status=status,
        prompt_tokens=prompt,
        cached_tokens=cached,
        live_cached=cached,
        live=live,
        logical=prompt + 10 if done else 0,
        peak_live=live + 10 if done else 0,
        generated=10 if done else 0,
        ttft_s=0.5 if done else None,
        latency_s=1.4 if done else None,
        kv_reads=200,
        tool_calls=2,
        duplicate_calls=1,
        near_duplicate_calls=1,
    )


TURNS = [
    turn("x", 0, 100, 0, 110),
    turn("y", 0, 300, 50, 310),
    turn("x", 1, 200, 150, 90),
    turn("y", 1, 400, 0, 0, status="error: lost"),
]
"""Two trajectories of two turns; the last one failed."""


def _sample(time_s: float, events: int, seconds: float, dead: int, **pool: int) -> str:
    counters = {"prune_events": events, "pruned_tokens": 10 * events, "prune_seconds": seconds}
    counters |= {"prompt_tokens": 0, "cached_tokens": 0, "live_cached_tokens": 0, "freed_slots": 0, "declined": {}}
    return json.dumps({"time_s": time_s, "pool": {"total": 1000, "dead": dead, **pool}, "counters": counters})


SAMPLES = [
    _sample(0.0, 6, 1.0, 0, available=1000, evictable=0, protected=0, private=0),
    _sample(1.5, 10, 1.08, 70, available=400, evictable=350, protected=200, private=50),
]


def provenance(method: str | None) -> Provenance:
    return Provenance(
        command=["intentkv"],
        started="2026-01-01T00:00:00+00:00",
        git_commit="c0ffee",
        python="3",
        platform="p",
        versions={"sglang": "9"},
        server={},
        method=method,
        budget=None if method is None else 64,
    )


def write_run(folder: Path, arm: str, turns: Sequence[TurnRecord], samples: bool = False) -> Path:
    """What ``intentkv replay`` writes; an arm called stock ran without the plugin."""
    folder.mkdir()
    (folder / "turns.jsonl").write_text("".join(t.model_dump_json() + "\n" for t in turns))
    summary = Summary(
        arm=arm,
        provenance=provenance(None if arm == "stock" else "assistant"),
        options=ReplayOptions(url="u", files=[], out=folder),
        seeds={},
        dataset=DatasetInfo(files=[], sha256="0" * 64, trajectories=2, broken_lines=[], shortened=0, without_turns=[]),
        aggregates=aggregate(turns, 2.0),
        prune=PruneFigures(events=4, tokens=40, mean_s=0.02, p50_s=0.01, p99_s=0.03, declined={}) if samples else None,
    )
    (folder / "summary.json").write_text(summary.model_dump_json())
    if samples:
        (folder / "pool.jsonl").write_text("\n".join(SAMPLES) + "\n")
    return folder


def write_watch(folder: Path) -> Path:
    """What ``intentkv watch`` writes."""
    folder.mkdir()
    (folder / "watch.json").write_text(json.dumps({"arm": "served", "provenance": provenance("assistant").model_dump()}))
    (folder / "pool.jsonl").write_text("\n".join(SAMPLES) + "\n")
    return folder


def log_line(
    request: str,
    prompt: Sequence[int],
    cached: int = 0,
    dead: int = 0,
    calls: Sequence[str] = (),
    ttft: float | None = 0.5,
    output: Sequence[int] = (7,) * 10,
    **fields: Any,
) -> str:
    """One request as the recorder writes it: ten generated tokens, ``dead`` positions pruned when five of them were there."""
    logical = len(prompt) + 10
    figures = {
        "prompt_tokens": len(prompt),
        "cached_tokens": cached,
        "completion_tokens": 10,
        "e2e_latency": 1.4,
        "logical_tokens": logical,
        "live_tokens": logical - dead,
        "dead_tokens": dead,
        "pruned_tokens": dead,
        "forced_tokens": 0,
        "target_tokens": 0,
        "live_cached_tokens": cached,
        "peak_live_tokens": logical - 5 if dead else logical,
    }
    if ttft is not None:
        figures["ttft"] = ttft
    record = {"method": "assistant", "budget": 64, "finish": "length", "figures": figures} | fields
    tools = [{"name": name, "arguments": {}} for name in calls]
    return RequestRecord(id=request, input_ids=list(prompt), output_ids=list(output), tool_calls=tools, **record).model_dump_json()


def write_log(folder: Path, ttft: float | None = 0.5) -> Path:
    """What ``intentkv record`` writes, in two shards: a session, a client without one, another method, an abort and a cut line."""
    folder.mkdir()
    shards = [
        [
            log_line("r1", range(100), session="agent", calls=["look"], ttft=ttft),
            log_line("r2", range(500, 550), ttft=ttft),
        ],
        [
            log_line("r3", range(200), cached=110, dead=140, session="agent", calls=["look", "find"], ttft=ttft),
            log_line("r4", range(500, 600), cached=60, ttft=ttft),
            log_line("r5", range(300), session="agent", finish="abort", figures={"completion_tokens": 0}, output=[], ttft=ttft),
            '{"schema_version": "intentkv-log/1", "id": "r5", "inp',
            log_line("r6", range(700, 900), method="snapkv", budget=None, budget_ratio=0.5, ttft=ttft),
        ],
    ]
    for number, lines in enumerate(shards):
        (folder / f"requests-{number:06d}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def write_capacity(folder: Path) -> Path:
    """What the throughput benchmark writes."""
    folder.mkdir()
    arms = ["stock", "assistant:64"]
    turns = [bench_capacity.Turn(**{**t.model_dump(), "arm": arm, "pool_share": 0.3}) for arm in arms for t in TURNS]
    (folder / "turns.jsonl").write_text("".join(t.model_dump_json() + "\n" for t in turns))
    zeros: dict[str, Any] = {
        name: 0
        for name, field in bench_capacity.Cell.model_fields.items()
        if field.annotation in (int, float) and name not in ("pool_share", "window_s")
    }
    cells = [
        bench_capacity.Cell(
            **zeros, arm=arm, pool_share=0.3, window_s=2.0, warm=True, errors=[], ttft_s=None, tpot_s=None, prune=None, server_errors=None
        )
        for arm in arms
    ]
    result = bench_capacity.Result(
        origin=Origin(device="d", seed=0),
        options=bench_capacity.Options(input=[], model="m", arms=arms),
        length_of_sessions="short",
        working_set_tokens=1,
        session_tokens=[1],
        cells=cells,
    )
    (folder / "bench_capacity.json").write_text(result.model_dump_json())
    return folder


def write_decode(folder: Path) -> Path:
    """What the decode benchmark writes: one of its cells was not measured."""
    folder.mkdir()
    cells = [
        bench_decode.Cell(arm="stock", batch=8, length=1000, step_s=0.01),
        bench_decode.Cell(arm="stock", batch=8, length=2000, step_s=0.02),
        bench_decode.Cell(arm="stock", batch=8, length=4000, skipped="too long"),
    ]
    options = bench_decode.Options(model="m", arms=["stock"], lengths=[1000], batches=[8])
    (folder / "bench_decode.json").write_text(
        bench_decode.Result(origin=Origin(device="d", seed=0), options=options, cells=cells).model_dump_json()
    )
    return folder


def write_prune(folder: Path) -> Path:
    """What the benchmark of one eviction writes."""
    folder.mkdir()
    cost = bench_prune.Cost(arm="a:1", length=1000, events=3, evicted_tokens=10, p50_s=0.004, max_s=0.01, share_of_turn=0.1, added_s=0.01)
    options = bench_prune.Options(model="m", arms=["a:1"], lengths=[1000], added=64, tokens=8, repeats=3)
    result = bench_prune.Result(origin=Origin(device="d", seed=0), options=options, costs=[cost])
    (folder / "bench_prune.json").write_text(result.model_dump_json())
    return folder
