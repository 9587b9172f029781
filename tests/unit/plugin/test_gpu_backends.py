"""SGLang's own FlashInfer and FA3 backends with the live view, on a CPU: their kernels are replaced by plain torch that computes what it
was planned with.

Oracle: dense float64 attention over all logical positions with the dead ones masked. Slot 0 and the former slots of dead positions are
full of large numbers, so one dead slot in a plan, or a length in logical units, is far outside the tolerance.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.layers.attention import flashinfer_backend
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from intentkv_sglang.live_view import LanePass

from .attention_case import CONTEXT, LAYER, ROWS, Case, Seq, sequences
from .gpu_kernels import fa3_module, one_rank, patch_flashinfer, runner_of

pytestmark = pytest.mark.unit

Q_HEADS, KV_HEADS = 6, 2


@pytest.fixture(scope="module")
def make_backend():
    """``make_backend(name)(runner)``."""
    with pytest.MonkeyPatch.context() as patch, one_rank():
        patch_flashinfer(patch)
        classes = {"flashinfer": flashinfer_backend.FlashInferAttnBackend, "fa3": fa3_module(patch).FlashAttentionBackend}
        yield lambda name: lambda runner: classes[name](runner_of(runner, Q_HEADS, KV_HEADS, CONTEXT))


def check(case):
    torch.testing.assert_close(case.run().double(), case.expected(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["flashinfer", "fa3"])
@pytest.mark.parametrize("decode", [True, False], ids=["decode", "extend"])
@settings(deadline=None, max_examples=25)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_equals_masked_full_cache(make_backend, name, decode, data, seed):
    """Pruned and whole lanes in one batch, with and without a cached prefix.

    Catches: a prefix length or sum that stayed logical, on the host or on the device; a plan over dead slots.
    """
    chosen = data.draw(st.lists(sequences(decode), min_size=1, max_size=ROWS))
    check(Case(make_backend(name), decode, chosen, Q_HEADS, KV_HEADS, seed, name=name))


@pytest.mark.parametrize("name", ["flashinfer", "fa3"])
def test_wrong_dead_count_is_seen(make_backend, name):
    """The comparison can fail."""
    case = Case(make_backend(name), True, [Seq(16, 1, frozenset({3, 4}))], Q_HEADS, KV_HEADS, seed=1, dead_count=[1], name=name)
    assert (case.run().double() - case.expected()).abs().max() > 0.1


def test_decode_steps_of_a_mixed_batch(make_backend):
    """With --enable-mixed-chunk running requests decode inside an extend pass: one new token behind all others."""
    lanes = [Seq(12, 5, frozenset({1, 2, 7})), Seq(9, 1, frozenset({0, 4})), Seq(6, 1, frozenset())]
    for name in ("flashinfer", "fa3"):
        case = Case(make_backend(name), False, lanes, Q_HEADS, KV_HEADS, seed=2, name=name)
        case.batch.forward_mode = ForwardMode.MIXED
        check(case)


@pytest.mark.parametrize(("paged", "reads_new"), [(False, False), (True, True)])
def test_flashinfer_plans(make_backend, paged, reads_new):
    """Ragged new tokens beside a paged prefix, or all of it paged (deterministic mode): each plan names exactly the live slots."""
    lanes = [Seq(10, 3, frozenset({0, 3, 9})), Seq(8, 2, frozenset()), Seq(0, 4, frozenset())]
    case = Case(make_backend("flashinfer"), False, lanes, Q_HEADS, KV_HEADS, seed=4, name="flashinfer")
    case.backend.use_paged = paged
    check(case)
    ends = [lane.prefix + lane.new * reads_new for lane in lanes]
    live = [[slot for slot in case.table[row, :end].tolist() if slot] for row, end in zip(case.rows, ends, strict=True)]
    assert case.backend.prefill_wrappers_paged[0].slots() == live
    assert not case.backend.forward_metadata.extend_no_prefix


def test_flashinfer_with_a_prefix_that_is_all_dead(make_backend):
    """Nothing of any prefix is live: SGLang then skips the paged part."""
    case = Case(make_backend("flashinfer"), False, [Seq(5, 3, frozenset(range(5)))], Q_HEADS, KV_HEADS, seed=6, name="flashinfer")
    check(case)
    assert case.backend.forward_metadata.extend_no_prefix


def padded(case, lanes):
    """A decode graph runner's view of the case's batch, as wide as the recorded graph; lanes behind the batch read slot 0 of row 0."""
    missing = lanes - len(case.lanes)
    batch = case.batch
    return SimpleNamespace(
        batch_size=lanes,
        forward_mode=ForwardMode.DECODE,
        positions=torch.zeros(lanes, dtype=torch.int64),
        req_pool_indices=torch.cat([batch.req_pool_indices, torch.zeros(missing, dtype=torch.int64)]),
        seq_lens=torch.cat([batch.seq_lens, torch.ones(missing, dtype=torch.int64)]),
        seq_lens_cpu=torch.cat([batch.seq_lens_cpu, torch.ones(missing, dtype=torch.int64)]),
        seq_lens_sum=batch.seq_lens_sum + missing,
        encoder_lens=None,
        out_cache_loc=batch.out_cache_loc,
        spec_info=None,
    )


@pytest.mark.parametrize("name", ["flashinfer", "fa3"])
def test_replayed_decode_graph(make_backend, name):
    """Recorded once for four lanes, then replayed with other batches: metadata in place, forward not called by SGLang but by the graph.

    Catches: logical lengths at a replay, a shadow row of the batch before, padded lanes that move.
    """
    width = 4
    batches = [
        [Seq(12, 1, frozenset({2, 3, 11}))],
        [Seq(9, 1, frozenset()), Seq(12, 1, frozenset({0, 5}))],
        [Seq(3, 1, frozenset())],
        [Seq(16, 1, frozenset(range(1, 15))), Seq(6, 1, frozenset()), Seq(8, 1, frozenset({7}))],
    ]
    backend = None
    for number, lanes in enumerate(batches):
        case = Case(make_backend(name), True, lanes, Q_HEADS, KV_HEADS, seed=number, name=name)
        if backend is None:
            backend, channel, table = case.backend, case.channel, case.table
            channel.current = None
            backend.init_cuda_graph_state(width, width)
            backend.init_forward_metadata_out_graph(padded(case, width), in_capture=True)
        else:
            # The same server: one table and one pool.
            table.copy_(case.table)
            for stored, other in zip(backend.token_to_kv_pool.get_kv_buffer(LAYER), case.pool.get_kv_buffer(LAYER), strict=True):
                stored.copy_(other)
        channel.current = LanePass([replace(lane, version=number) for lane in case.known])
        view = padded(case, width)
        backend.init_forward_metadata_out_graph(view)
        assert view.seq_lens.tolist()[: len(lanes)] == [lane.prefix + 1 for lane in lanes]
        case.q = torch.randn(width, Q_HEADS, case.layer.qk_head_dim, generator=case.generator)
        out = super(type(backend), backend).forward_decode(case.q.flatten(1), None, None, case.layer, view)
        got = out.view(width, Q_HEADS, -1)[: len(lanes)].double()
        torch.testing.assert_close(got, case.expected(), rtol=1e-4, atol=1e-4)
