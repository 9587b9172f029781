"""Scoring cost on this GPU against its own ceilings: ``python -m intentkv_eval.bench_kernels --out FILE``.

Per (tokens, queries a head): milliseconds of one scoring event, bytes of K read twice over measured copy bandwidth, and matrix work over
the measured matrix rate. Shapes default to an 8B model: 36 layers, 32 query heads, 8 KV heads, head dim 128, bf16.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from intentkv.kernels.attention_scores import paged_key_scores
from intentkv.scoring import Reduction, key_scores

CASES: tuple[tuple[int, Reduction], ...] = ((1, "mass"), (16, "energy"), (64, "energy"), (256, "energy"))
"""(queries a head, reduction)."""


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


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    layers: int = 36,
    query_heads: int = 32,
    kv_heads: int = 8,
    dim: int = 128,
) -> None:
    """Measure, check against the torch reference, print and write one row per case."""
    top = ceilings()
    rows = []
    pool = 80_000
    buffers = [torch.randn(pool, kv_heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(layers)]
    for tokens in (4096, 8192, 32768, 65536):
        slots = torch.randperm(pool - 1, device="cuda")[:tokens] + 1
        for n_queries, reduction in CASES:
            queries = torch.randn(layers, n_queries, query_heads, dim, device="cuda") * 0.3
            run = partial(paged_key_scores, queries, buffers, slots, dim**-0.5, reduction)
            error = 0.0
            if tokens == 4096:
                half = queries.bfloat16()
                want = torch.stack([key_scores(half[i], buffers[i][slots], dim**-0.5, reduction) for i in range(layers)]).sum(0)
                error = float((run() - want).norm() / want.norm())
            milliseconds = median_ms(run)
            gigabytes = 2 * layers * tokens * kv_heads * dim * 2 / 1e9
            tflop = 2 * 2 * layers * query_heads * n_queries * tokens * dim / 1e12
            rows.append(
                {
                    "tokens": tokens,
                    "queries": n_queries,
                    "reduction": reduction,
                    "ms": milliseconds,
                    "gb_s": gigabytes / milliseconds * 1e3,
                    "share_of_copy": gigabytes / milliseconds * 1e3 / top["copy_gb_s"],
                    "tflop_s": tflop / milliseconds * 1e3,
                    "share_of_matrix": tflop / milliseconds * 1e3 / top["matrix_tflop_s"],
                    "relative_error": error,
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "ceilings": top, "rows": rows}
    out.write_text(json.dumps(result, indent=1))
    print(json.dumps(top))


if __name__ == "__main__":
    typer.run(main)
