"""What is recorded of a turn, and the figures of a run."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from pydantic import BaseModel

from intentkv_eval.client import Generation

OK = "ok"
SKIPPED = "skipped: previous turn failed"

QUERY_BLOCK = 128
"""Query rows that share one pass over the prefix in an extend, as in FlashAttention; the unit of :func:`kv_reads`."""


class TurnRecord(BaseModel):
    """One line of ``turns.jsonl``: tokens as the server counted them, 0 for a turn that did not happen."""

    trajectory: str
    source: str
    turn: int
    """From 0, within the trajectory."""
    arm: str
    status: str
    """``ok``, the error's text, or why the turn was skipped."""
    prompt_tokens: int
    """Of the prompt that was sent; of the planned one when the turn was skipped."""
    cached_tokens: int = 0
    live_cached: int = 0
    """Part of the cached prefix whose KV was resident."""
    logical: int = 0
    live: int = 0
    dead: int = 0
    """Of the whole request at its end; live + dead = logical."""
    peak_live: int = 0
    """Most live tokens at any time of the request."""
    pruned: int = 0
    forced: int = 0
    target: int = 0
    generated: int = 0
    ttft_s: float | None = None
    latency_s: float | None = None
    kv_reads: int = 0
    tool_calls: int | None = None
    """Recorded calls of the turn; None where that is not known."""
    duplicate_calls: int | None = None
    near_duplicate_calls: int | None = None
    """Repeats of an earlier call of the trajectory, exact and by cosine (:mod:`intentkv_eval.overhead`)."""

    @property
    def ok(self) -> bool:
        return self.status == OK

    @property
    def tpot_s(self) -> float | None:
        """(last token - first token) / (generated - 1); None for a turn that generated fewer than two tokens."""
        if self.ttft_s is None or self.latency_s is None or self.generated < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.generated - 1)


class Percentiles(BaseModel):
    p50: float
    p95: float
    p99: float


class Aggregates(BaseModel):
    """Figures of one run. Failed and skipped turns stay in every denominator."""

    trajectories: int
    turns: int
    failed_turns: int
    skipped_turns: int
    prompt_tokens: int
    cached_tokens: int
    live_cached_tokens: int
    recomputed_tokens: int
    """Prompt tokens of finished turns that were not cached."""
    generated_tokens: int
    pruned_tokens: int
    prefix_hit_rate: float
    """Sum of cached tokens / sum of prompt tokens."""
    live_hit_rate: float
    """Sum of live cached tokens / sum of prompt tokens."""
    peak_live_mean: float
    """Mean over trajectories of the most live tokens of any turn."""
    peak_live_max: int
    peak_logical_mean: float
    peak_logical_max: int
    kv_reads: int
    wall_s: float
    generated_tokens_per_s: float
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    """(last token - first token) / (generated - 1), of turns that generated at least two tokens."""


def kv_reads(prompt: int, cached: int, live_cached: int, dead: int, generated: int) -> int:
    """KV positions attention reads for one request.

    The extend reads the live cached prefix once per block of :data:`QUERY_BLOCK` new tokens; each decode step (all tokens but the first)
    reads everything live before and at its position.
    """
    blocks = -(-(prompt - cached) // QUERY_BLOCK)
    steps = max(0, generated - 1)
    return blocks * live_cached + steps * (prompt - dead) + steps * (steps + 1) // 2


def arm_name(method: str, budget: int | None, budget_ratio: float | None = None) -> str:
    """Name of an arm in reports: its method and its limit."""
    if method == "full":
        return method
    return f"{method} {budget}" if budget_ratio is None else f"{method} {budget_ratio:.0%}"


def finished(record: TurnRecord, generation: Generation) -> TurnRecord:
    """``record`` with what the server reported; on a stock server everything is live."""
    g = generation
    return measured(record, g.prompt_tokens, g.cached_tokens, len(g.output_ids), g.figures or {}, g.ttft_s, g.latency_s)


def measured(
    record: TurnRecord,
    prompt: int,
    cached: int,
    generated: int,
    figures: Mapping[str, int],
    ttft_s: float | None,
    latency_s: float | None,
) -> TurnRecord:
    """``record`` as a finished turn.

    Args:
        prompt: tokens of the prompt; ``cached`` of them were cached, and ``generated`` new ones followed.
        figures: the plugin's (``meta_info["intentkv"]``); without any, everything is live.
        ttft_s: seconds to the first token; ``latency_s``: to the last one. None where they were not measured.
    """
    logical = figures.get("logical_tokens", prompt + generated)
    live = figures.get("live_tokens", logical)
    dead = figures.get("dead_tokens", 0)
    live_cached = figures.get("live_cached_tokens", cached)
    return record.model_copy(
        update={
            "status": OK,
            "prompt_tokens": prompt,
            "cached_tokens": cached,
            "live_cached": live_cached,
            "logical": logical,
            "live": live,
            "dead": dead,
            "peak_live": figures.get("peak_live_tokens", live),
            "pruned": figures.get("pruned_tokens", 0),
            "forced": figures.get("forced_tokens", 0),
            "target": figures.get("target_tokens", 0),
            "generated": generated,
            "ttft_s": ttft_s,
            "latency_s": latency_s,
            "kv_reads": kv_reads(prompt, cached, live_cached, dead, generated),
        }
    )


def aggregate(records: Sequence[TurnRecord], wall_s: float) -> Aggregates:
    """Figures of a run from its turns."""
    ok = [record for record in records if record.ok]
    prompt, cached = sum(r.prompt_tokens for r in records), sum(r.cached_tokens for r in records)
    live_cached = sum(r.live_cached for r in records)
    generated = sum(r.generated for r in records)
    peaks_live, peaks_logical = _peaks(records, "peak_live"), _peaks(records, "logical")
    return Aggregates(
        trajectories=len(peaks_live),
        turns=len(records),
        failed_turns=sum(not r.ok and r.status != SKIPPED for r in records),
        skipped_turns=sum(r.status == SKIPPED for r in records),
        prompt_tokens=prompt,
        cached_tokens=cached,
        live_cached_tokens=live_cached,
        recomputed_tokens=sum(r.prompt_tokens - r.cached_tokens for r in ok),
        generated_tokens=generated,
        pruned_tokens=sum(r.pruned for r in records),
        prefix_hit_rate=cached / prompt if prompt else 0.0,
        live_hit_rate=live_cached / prompt if prompt else 0.0,
        peak_live_mean=statistics.fmean(peaks_live) if peaks_live else 0.0,
        peak_live_max=max(peaks_live, default=0),
        peak_logical_mean=statistics.fmean(peaks_logical) if peaks_logical else 0.0,
        peak_logical_max=max(peaks_logical, default=0),
        kv_reads=sum(r.kv_reads for r in records),
        wall_s=wall_s,
        generated_tokens_per_s=generated / wall_s if wall_s else 0.0,
        ttft_s=_percentiles(r.ttft_s for r in ok),
        tpot_s=_percentiles(r.tpot_s for r in ok),
    )


def _peaks(records: Sequence[TurnRecord], field: str) -> list[int]:
    peaks: dict[str, int] = {}
    for record in records:
        peaks[record.trajectory] = max(peaks.get(record.trajectory, 0), getattr(record, field))
    return list(peaks.values())


def _percentiles(values: Iterable[float | None]) -> Percentiles | None:
    """Linearly interpolated percentiles of the values that are there; None without any."""
    present = [value for value in values if value is not None]
    if not present:
        return None
    cuts = statistics.quantiles(present, n=100, method="inclusive") if len(present) > 1 else present * 99
    return Percentiles(p50=cuts[49], p95=cuts[94], p99=cuts[98])
