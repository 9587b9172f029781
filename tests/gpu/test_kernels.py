"""The project's kernels compiled and run on a real GPU, at sizes that an interpreter does not reach. Oracles: Python lists, and the torch
reference in float32 on the CPU.

The kernels are imported by the tests: where these are only collected, others want them interpreted.
"""

from __future__ import annotations

import pytest
import torch

from intentkv.scoring import key_scores


def test_compaction_of_long_rows() -> None:
    """Rows of up to 65,536 positions of a table that is a slice of a wider one; arguments are columns of one tensor.

    Catches: arguments read flat (seen: illegal accesses with several pruned lanes), the width taken for the stride, entries lost at block
    borders.
    """
    from intentkv.kernels.compact_triton import compact_rows_triton

    rows, context = 10, 65536
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(1, 1 << 20, (rows, context + 64), generator=generator, dtype=torch.int32)
    table[torch.rand(table.shape, generator=generator) < 0.6] = 0
    table[3] = 0
    table[4] = torch.arange(1, context + 65)
    on_gpu = table.cuda()[:, :context]
    arguments = torch.tensor([[0, context], [1, 1], [2, 2049], [3, context], [4, context]])
    sources, lengths = arguments.cuda().unbind(1)
    compact_rows_triton(on_gpu, sources, lengths, sources + 5)
    result = on_gpu.cpu()
    assert torch.equal(result[:5], table[:5, :context])
    for source, length in arguments.tolist():
        live = [slot for slot in table[source, :length].tolist() if slot]
        assert result[source + 5, : len(live)].tolist() == live
        assert torch.equal(result[source + 5, len(live) :], table[source + 5, len(live) : context])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("reduction", ["mass", "energy"])
@pytest.mark.parametrize("n_queries", [1, 20, 64])
@pytest.mark.parametrize("key_type", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_scores(key_type: torch.dtype, n_queries: int, reduction: str, causal: bool) -> None:
    """More keys than one split of pass 1 holds, grouped heads, several blocks of query rows.

    Catches: a head that reads another group's keys, wrong strides or types on a tensor core, splits combined without rescaling.
    """
    from intentkv.kernels.attention_scores import paged_key_scores
    from intentkv.kernels.paged_keys import PagedKeys

    layers, q_heads, kv_heads, dim, pool, n_keys = 3, 8, 2, 128, 12000, 9000
    generator = torch.Generator().manual_seed(0)
    # What the kernel multiplies with: half precision as it is, fp8 keys as float16.
    query_type = key_type if key_type.itemsize == 2 else torch.float16
    queries = torch.randn(layers, n_queries, q_heads, dim, generator=generator).to(query_type)
    buffers = [torch.randn(pool, kv_heads, dim, generator=generator).to(key_type) for _ in range(layers)]
    slots = torch.randperm(pool - 1, generator=generator)[:n_keys] + 1
    scales = [0.5, 1.0, 2.0] if key_type.itemsize == 1 else [1.0] * layers
    positions = (torch.linspace(-1, n_keys, n_queries + 1).long()[1:], torch.arange(n_keys)) if causal else (None, None)
    on_gpu = [None if p is None else p.cuda() for p in positions]
    pages = PagedKeys([b.cuda() for b in buffers], scales)
    got = paged_key_scores(queries.cuda(), pages, slots.cuda(), dim**-0.5, reduction, *on_gpu)
    keys = [buffer[slots].float() * scale for buffer, scale in zip(buffers, scales, strict=True)]
    want = sum(key_scores(queries[i].float(), keys[i], dim**-0.5, reduction, *positions) for i in range(layers))
    torch.testing.assert_close(got.cpu(), want, rtol=0.01, atol=1e-3 * float(want.mean()))


@pytest.mark.parametrize(("kv_heads", "dim"), [(8, 128), (3, 64), (2, 80), (12, 64), (1, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2])
def test_averages(dtype: torch.dtype, kv_heads: int, dim: int) -> None:
    """Many programs, a last tile that is not full, slots that are a column of a table. Catches: masked loads of an 8-bit type, padding
    columns, a layer's factor, sums that differ from run to run."""
    from intentkv.kernels.averages import mean_keys, squared_norms
    from intentkv.kernels.paged_keys import PagedKeys

    layers, pool, n = 5, 12000, 9001
    generator = torch.Generator().manual_seed(0)
    buffers = [torch.randn(pool, kv_heads, dim, generator=generator).to(dtype) for _ in range(layers)]
    scales = [0.5, 1.0, 2.0, 0.25, 1.5]
    slots = torch.randperm(pool - 1, generator=generator)[:n] + 1
    pages = PagedKeys([b.cuda() for b in buffers], scales)
    column = torch.stack([slots, -slots], 1).int().cuda()[:, 0]
    stored = torch.stack([b.float()[slots] * s for b, s in zip(buffers, scales, strict=True)])
    for run, want in ((mean_keys, stored.mean((0, 2))), (squared_norms, stored.square().sum(-1).mean(-1).T)):
        got = run(pages, column)
        torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)
        assert torch.equal(got, run(pages, column))


def test_averages_do_not_wait() -> None:
    """Catches: a read of device memory on the host between two launches."""
    from intentkv.kernels.paged_keys import PagedKeys, PagedKV
    from intentkv_sglang.keys import PoolKeys

    buffers = [torch.randn(5000, 4, 64, device="cuda") for _ in range(3)]
    pages = PagedKV(PagedKeys(buffers), PagedKeys(buffers))
    positions = torch.arange(0, 4000, 3, device="cuda")
    keys = PoolKeys(pages, torch.arange(1, 4001, device="cuda"), torch.arange(4000), range(3), 0.125)
    keys.mean_keys(positions), keys.value_norms(positions)  # compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        mean, norms = keys.mean_keys(positions), keys.value_norms(positions)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stored = torch.stack([b[positions + 1] for b in buffers])
    torch.testing.assert_close(mean, stored.mean((0, 2)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norms, stored.square().sum(-1).mean(-1).T, rtol=1e-4, atol=1e-5)
