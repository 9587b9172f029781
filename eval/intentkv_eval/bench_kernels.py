"""Scoring cost on this GPU against its own ceilings: ``python -m intentkv_eval.bench_kernels --out FILE [--tune]``.

A row a case: milliseconds of one scoring event, K's bytes over the measured copy bandwidth (counted once, and as often as the kernels read
them), the matrix work over the measured matrix rate, and the error against the torch reference at 4,096 tokens.
Then the averages that a learned head reads, likewise; and an eviction's whole score with a head against its rule's, with its parts.
Shapes default to an 8B model: 36 layers, 32 query heads, 8 KV heads, head dim 128.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from triton.runtime.errors import OutOfResources

from intentkv.aggregators.decayed_energy import DecayedEnergy
from intentkv.aggregators.learned import Learned, head_queries
from intentkv.config import load_config
from intentkv.head import HeadConfig, ModelShape, ResidualHead
from intentkv.kernels.attention_scores import Tile, Tiles, choose_tiles, paged_key_scores
from intentkv.kernels.averages import mean_keys, squared_norms
from intentkv.kernels.paged_keys import PagedKeys, PagedKV
from intentkv.protocols import Captured
from intentkv.scoring import LayerwiseKeys, Reduction, key_scores
from intentkv.sessions import SessionState
from intentkv.spans import Prompt, Role, Span
from intentkv_sglang.keys import PoolKeys

CHECKED_TOKENS = 4096
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Case:
    """One scoring event. ``rule``: one query a head and 'mass', IntentKV's rule over its query memory."""

    tokens: int
    queries: int
    reduction: Reduction
    keys: Literal["bf16", "fp8"] = "bf16"
    causal: bool = False

    @property
    def name(self) -> str:
        kind = "memory-rule" if self.queries == 1 and self.reduction == "mass" else f"{self.queries}-{self.reduction}"
        return f"{kind}{'-causal' if self.causal else ''}-{self.keys}-{self.tokens}"


KINDS: tuple[tuple[int, Reduction], ...] = ((1, "mass"), (4, "mass"), (16, "energy"), (64, "energy"), (256, "energy"))
"""(queries a head, reduction)."""
CASES = (
    *(Case(tokens, n, reduction) for tokens in (4096, 8192, 32768, 65536) for n, reduction in KINDS),
    *(Case(32768, n, reduction, "fp8") for n, reduction in (KINDS[0], KINDS[3])),
    *(Case(tokens, 64, "energy", causal=True) for tokens in (4096, 32768)),
    Case(32768, 64, "energy", "fp8", causal=True),
)
TUNED = (
    *(Case(tokens, n, reduction) for n, reduction in KINDS for tokens in (32768, 4096)),
    *(Case(32768, n, reduction, "fp8") for n, reduction in (KINDS[0], KINDS[3])),
)


@dataclass(frozen=True)
class AverageCase:
    """One read of K for its mean over layers and heads, or of V for its squared norms."""

    what: Literal["mean-keys", "value-norms"]
    tokens: int
    keys: Literal["bf16", "fp8"] = "bf16"

    @property
    def name(self) -> str:
        return f"{self.what}-{self.keys}-{self.tokens}"


AVERAGES = (
    *(AverageCase(what, tokens) for what in ("mean-keys", "value-norms") for tokens in (256, 8192, 32768)),
    *(AverageCase(what, 32768, "fp8") for what in ("mean-keys", "value-norms")),
)
LEARNED = (8192, 32768)
"""Tokens of the prompts that a head is timed on."""


@dataclass(frozen=True)
class Model:
    """Attention shape."""

    layers: int
    query_heads: int
    kv_heads: int
    dim: int


class Event:
    """The tensors of a case: keys in scattered slots; causal queries are the last positions, as a finished turn's are."""

    def __init__(self, model: Model, case: Case, keys: PagedKeys) -> None:
        device = keys.pointers.device
        self.case, self.keys, self.scaling = case, keys, model.dim**-0.5
        self.slots = torch.randperm(keys.buffers[0].shape[0] - 1, device=device)[: case.tokens] + 1
        shape = (model.layers, case.queries, model.query_heads, model.dim)
        # what both the kernel's and the reference's number formats hold exactly
        self.queries = (torch.randn(shape, device=device) * 0.3).bfloat16().float()
        self.positions: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        if case.causal:
            last = torch.linspace(max(0, case.tokens - 512), case.tokens - 1, case.queries, device=device).long()
            self.positions = (last, torch.arange(case.tokens, device=device))

    def run(self, tiles: Tiles | None = None) -> torch.Tensor:
        return paged_key_scores(self.queries, self.keys, self.slots, self.scaling, self.case.reduction, *self.positions, tiles=tiles)

    def reference(self) -> torch.Tensor:
        total = torch.zeros(self.case.tokens, device=self.slots.device)
        for index, queries in enumerate(self.queries):
            total += key_scores(queries, self.keys.read(index, self.slots), self.scaling, self.case.reduction, *self.positions)
        return total

    def error(self, tiles: Tiles) -> float:
        """Of the norm, relative."""
        want = self.reference()
        return float((self.run(tiles) - want).norm() / want.norm())


def median_ms(run: Callable[[], object], repeats: int = 20) -> float:
    """Median milliseconds of ``run`` by CUDA events, after three warm-ups."""
    for _ in range(3):
        run()
    times: list[float] = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def ceilings() -> dict[str, float]:
    """Measured copy bandwidth (GB/s, read plus write) and bf16 matrix rate (TFLOP/s)."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    copy = median_ms(lambda: target.copy_(source), 10)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matrix = median_ms(lambda: a @ b, 10)
    return {"copy_gb_s": 2 * source.numel() * 4 / copy / 1e6, "matrix_tflop_s": 2 * 8192**3 / matrix / 1e9}


def measure(model: Model, case: Case, keys: PagedKeys, top: dict[str, float]) -> dict[str, Any]:
    """One row of the result."""
    tiles = choose_tiles(case.queries, model.query_heads, keys, case.tokens)
    reads = 1 if tiles.scratch else 2
    error = Event(model, replace(case, tokens=CHECKED_TOKENS), keys).error(tiles)
    milliseconds = median_ms(Event(model, case, keys).run)
    gigabytes = model.layers * case.tokens * model.kv_heads * model.dim * keys.dtype.itemsize / 1e9
    tflop = reads * 2 * model.layers * model.query_heads * case.queries * case.tokens * model.dim / 1e12
    return {
        "case": case.name,
        **asdict(case),
        "ms": milliseconds,
        "key_reads": reads,
        "gb_s": reads * gigabytes / milliseconds * 1e3,
        "share_of_copy_keys_once": gigabytes / milliseconds * 1e3 / top["copy_gb_s"],
        "share_of_copy_keys_as_read": reads * gigabytes / milliseconds * 1e3 / top["copy_gb_s"],
        "tflop_s": tflop / milliseconds * 1e3,
        "share_of_matrix": tflop / milliseconds * 1e3 / top["matrix_tflop_s"],
        "relative_error": error,
        "tiles": asdict(tiles),
    }


def measure_average(case: AverageCase, pages: PagedKeys, top: dict[str, float]) -> dict[str, Any]:
    """One row of the result; ``pages`` stand for keys or values."""
    run = mean_keys if case.what == "mean-keys" else squared_norms
    slots = torch.randperm(pages.buffers[0].shape[0] - 1, device=pages.pointers.device)[: case.tokens] + 1
    keys = PoolKeys(PagedKV(pages, pages), slots, torch.arange(case.tokens), range(len(pages)), 1.0)
    reference = LayerwiseKeys.mean_keys if case.what == "mean-keys" else LayerwiseKeys.value_norms
    want = reference(keys, keys.live)
    milliseconds = median_ms(lambda: run(pages, slots))
    gigabytes = len(pages) * case.tokens * pages.kv_heads * pages.dim * pages.dtype.itemsize / 1e9
    return {
        "case": case.name,
        **asdict(case),
        "ms": milliseconds,
        "gb_s": gigabytes / milliseconds * 1e3,
        "share_of_copy_keys_as_read": gigabytes / milliseconds * 1e3 / top["copy_gb_s"],
        "relative_error": float((run(pages, slots) - want).norm() / want.norm()),
        "torch_ms": median_ms(lambda: reference(keys, keys.live), 5),
    }


class Eviction:
    """One eviction of a prompt of ``tokens``: system, user, assistant (seen by 64 of its queries) and a tool's answer, which is kept."""

    def __init__(self, model: Model, tokens: int, pages: PagedKV) -> None:
        device = pages.keys.pointers.device
        config = load_config()
        part = tokens // 32
        sizes: dict[Role, int] = {"system": part, "user": tokens - 3 * part, "assistant": part, "tool": part}
        ends = accumulate(sizes.values())
        spans = tuple(Span(role, end - size, end) for (role, size), end in zip(sizes.items(), ends, strict=True))
        self.prompt = Prompt(tokens, spans, tokens, True)
        self.history = torch.arange(spans[0].end, spans[-1].start, device=device)
        slots = torch.randperm(pages.keys.buffers[0].shape[0] - 1, device=device)[:tokens] + 1
        self.keys = PoolKeys(pages, slots, torch.arange(tokens), range(model.layers), model.dim**-0.5)
        shape = ModelShape(
            model_type="random", layers=model.layers, query_heads=model.query_heads, kv_heads=model.kv_heads, head_dim=model.dim
        )
        self.head = ResidualHead(HeadConfig(rule="assistant", feature_set="layered", shape=shape)).to(device).eval().requires_grad_(False)
        torch.nn.init.normal_(self.head.output.weight)
        self.rule = DecayedEnergy(config.decay)
        self.learned = Learned("assistant", self.head, config.decay)
        self.state = SessionState("bench")
        self.captured: list[Captured] = []
        for wanted in head_queries("assistant", "layered", config.turn_queries, config.window).requests(self.prompt):
            at = torch.tensor([] if wanted.form == "mean" else wanted.sampled(wanted.span.start), dtype=torch.int64, device=device)
            count = () if wanted.form == "mean" else (len(at),)
            queries = torch.randn(model.layers, *count, model.query_heads, model.dim, device=device)
            self.captured.append(Captured(wanted.span, wanted.form, at, queries))
            self.learned.absorb(self.state, self.captured[-1], self.keys, self.prompt)

    def score_rule(self) -> torch.Tensor:
        """[n] float32; scores the observation window, as every eviction on a GPU does."""
        window = [c for c in self.captured if c.form == "raw"]
        return self.rule.score(self.state, self.history, window, self.keys, self.prompt)

    def score_learned(self) -> torch.Tensor:
        return self.learned.score(self.state, self.history, self.captured, self.keys, self.prompt)

    def parts(self) -> dict[str, Callable[[], object]]:
        """What a head adds to its rule, each part alone."""
        memory = self.state.memory["query_memory"]
        inputs = self.learned.features.inputs("assistant", "layered", self.state, self.history, self.captured, self.keys, self.prompt)
        return {
            "memory_mass": lambda: self.keys.scores(memory[:, None], self.history, "mass"),
            "mean_keys": lambda: self.keys.mean_keys(self.history),
            "value_norms": lambda: self.keys.value_norms(self.history),
            "network": lambda: self.head.scores(inputs),
        }


def measure_learned(model: Model, tokens: int, pages: PagedKV) -> dict[str, Any]:
    """One row of the result."""
    event = Eviction(model, tokens, pages)
    rule, learned = median_ms(event.score_rule), median_ms(event.score_learned)
    return {
        "case": learned_name(tokens),
        "tokens": tokens,
        "candidates": len(event.history),
        "ms": learned,
        "rule_ms": rule,
        "over_rule": learned / rule,
        "part_ms": {name: median_ms(run) for name, run in event.parts().items()},
    }


def measured(model: Model, keys: dict[str, PagedKeys], top: dict[str, float], only: str) -> Iterator[dict[str, Any]]:
    """Rows of the cases whose name contains ``only``, one by one."""
    for case in CASES:
        if only in case.name:
            yield measure(model, case, keys[case.keys], top)
    for average in AVERAGES:
        if only in average.name:
            yield measure_average(average, keys[average.keys], top)
    if learned := [tokens for tokens in LEARNED if only in learned_name(tokens)]:
        pages = PagedKV(keys["bf16"], make_keys(model, "bf16"))  # gigabytes of values, for these cases alone
        for tokens in learned:
            yield measure_learned(model, tokens, pages)


def learned_name(tokens: int) -> str:
    return f"learned-score-bf16-{tokens}"


def _first_tiles(pairs: int, rows: int, once: bool) -> list[Tile]:
    """Choices for the first step; ``pairs``: (query, head) pairs, ``rows``: those of one KV head."""
    if once:
        few = [Tile(32, 64, 4, 3), Tile(32, 128, 4, 3), Tile(64, 64, 4, 4), Tile(64, 128, 4, 2), Tile(64, 128, 8, 4), Tile(64, 256, 8, 2)]
        many = [Tile(128, 64, 4, 3), Tile(128, 64, 8, 3), Tile(128, 128, 8, 3)]
        return [tile for tile in [*few, Tile(64, 64, 4, 3), Tile(64, 128, 4, 3), *many] if pairs <= tile.rows <= 2 * pairs]
    narrow = [Tile(64, 64, 4, 3), Tile(64, 64, 4, 4), Tile(64, 128, 4, 3), Tile(64, 128, 4, 4), Tile(64, 128, 8, 4)]
    wide = [Tile(128, 64, 8, 3), Tile(128, 64, 8, 4), Tile(128, 128, 8, 2), Tile(256, 32, 8, 4), Tile(256, 64, 8, 3)]
    return narrow if rows <= 64 else [narrow[0], narrow[2], *wide, Tile(256, 64, 8, 4), Tile(128, 64, 4, 3)]


def _second_tiles(rows: int, once: bool) -> list[Tile]:
    if once:
        return [Tile(rows, 64, 4, 1), Tile(rows, 128, 4, 1), Tile(rows, 256, 8, 1)]
    narrow = [Tile(64, 64, 4, 3), Tile(64, 64, 4, 4), Tile(64, 128, 4, 2), Tile(64, 128, 8, 3)]
    wide = [
        Tile(64, 128, 4, 3),
        Tile(64, 256, 8, 2),
        Tile(64, 256, 16, 2),
        Tile(128, 128, 8, 2),
        Tile(128, 128, 16, 2),
        Tile(128, 64, 8, 3),
    ]
    return narrow if rows <= 64 else [narrow[0], *narrow[2:], *wide]


def _choices(model: Model, case: Case) -> Iterator[tuple[str, Callable[[Tiles], Tiles]]]:
    """(mode, change) pairs: each changes one thing in the best found so far in its mode ('once' or 'twice' reading K)."""
    pairs, rows = case.queries * model.query_heads, case.queries * model.query_heads // model.kv_heads
    for once in (True, False):
        if (once and pairs > 128) or (not once and case.queries == 1):
            continue
        mode = "once" if once else "twice"
        for tile in _first_tiles(pairs, rows, once):
            yield mode, partial(replace, first=tile)
        for tile in _second_tiles(max(16, 1 << (pairs - 1).bit_length()) if once else rows, once):
            yield mode, partial(replace, second=tile)
        for size in (16, 32, 128, 256) if once else ():
            yield mode, partial(replace, scratch=size << 20)
        for size in () if once else (512, 1024, 2048, 4096, 8192):
            yield mode, partial(replace, keys_per_split=size)


def tune(model: Model, case: Case, keys: PagedKeys, deadline: float) -> dict[str, Any]:
    """Time the choices for ``case`` until ``deadline`` (``time.monotonic``), print a line each; the best and how many were left out."""
    event = Event(model, case, keys)
    pairs = max(16, 1 << (case.queries * model.query_heads - 1).bit_length())
    once = Tiles(Tile(max(64, pairs), 64, 4 if pairs <= 64 else 8, 3), Tile(max(64, pairs), 128, 4, 1), scratch=64 << 20)
    best = {"once": once, "twice": Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 3))}
    times: dict[str, float] = {}
    seen: dict[Tiles, float] = {}
    left_out = 0
    # the chooser's own first, so that a short run still compares with it
    own = choose_tiles(case.queries, model.query_heads, keys, case.tokens)
    best["once" if own.scratch else "twice"] = own
    for mode, change in [("once" if own.scratch else "twice", replace), *_choices(model, case)]:
        tiles = change(best[mode])
        if tiles in seen:
            continue
        if time.monotonic() > deadline:
            left_out += 1
            continue
        try:
            seen[tiles] = median_ms(partial(event.run, tiles), 7)
        except OutOfResources as error:
            seen[tiles] = float("inf")
            print(f"{case.name} {mode} {_line(tiles)}: does not fit ({error})", flush=True)
            continue
        print(f"{case.name} {mode} {_line(tiles)}: {seen[tiles]:.3f} ms", flush=True)
        if seen[tiles] < times.get(mode, float("inf")):
            times[mode], best[mode] = seen[tiles], tiles
    winner = min(times, key=lambda mode: times[mode], default=None)
    found = {"ms": times[winner], "tiles": asdict(best[winner])} if winner is not None else {}
    return {"case": case.name, "own_ms": seen.get(own), **found, "by_mode": times, "left_out": left_out}


def _line(tiles: Tiles) -> str:
    first, second = (f"{t.rows}x{t.tokens}/w{t.warps}/s{t.stages}" for t in (tiles.first, tiles.second))
    return f"first {first} second {second} " + (f"scratch {tiles.scratch >> 20} MiB" if tiles.scratch else f"split {tiles.keys_per_split}")


def make_keys(model: Model, kind: Literal["bf16", "fp8"], pool: int = 80_000, device: str = "cuda") -> PagedKeys:
    """Random keys in a pool; fp8 ones with a factor that differs between layers."""
    shape = (pool, model.kv_heads, model.dim)
    buffers = [torch.randn(shape, device=device).to(DTYPES[kind]) for _ in range(model.layers)]
    scales = [0.5 + layer / model.layers for layer in range(model.layers)] if kind == "fp8" else None
    return PagedKeys(buffers, scales)


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    tune_tiles: Annotated[bool, typer.Option("--tune", help="Sweep tile shapes instead of measuring the cases.")] = False,
    tune_seconds: Annotated[float, typer.Option(help="With --tune: no new choice is tried after so many seconds.")] = 90.0,
    only: Annotated[str, typer.Option(help="Only cases whose name contains this text.")] = "",
    layers: int = 36,
    query_heads: int = 32,
    kv_heads: int = 8,
    dim: int = 128,
) -> None:
    """Measure, check against the torch reference, print and write one row per case."""
    model = Model(layers, query_heads, kv_heads, dim)
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "model": asdict(model)}
    keys = {"bf16": make_keys(model, "bf16"), "fp8": make_keys(model, "fp8")}
    found: Iterator[dict[str, Any]]
    if tune_tiles:
        deadline = time.monotonic() + tune_seconds
        found = (tune(model, case, keys[case.keys], deadline) for case in TUNED if only in case.name)
    else:
        result["ceilings"] = ceilings()
        print(json.dumps(result["ceilings"]), flush=True)
        found = measured(model, keys, result["ceilings"], only)
    rows = []
    for row in found:
        rows.append(row)
        print(json.dumps(row), flush=True)
    out.write_text(json.dumps(result | {"rows": rows}, indent=1))


if __name__ == "__main__":
    typer.run(main)
