"""Attention over live slots only equals the full cache with dead positions masked to -inf (invariant 5), for torch_native.

Oracle: dense float64 attention over all logical positions, written here.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention

from intentkv.kernels.compact import compact_rows
from intentkv_sglang import live_view, plugin
from intentkv_sglang.capture import CapturePlan, DecodeTap, QueryBank, QueryTap
from intentkv_sglang.cpu_attention import NewRowsAttnBackend
from intentkv_sglang.live_view import Lane, LanePass, LiveView, PassChannel, ShadowRows, with_live_view

from .attention_case import DIM, LAYER, ROWS, Case, Seq, sequences

pytestmark = pytest.mark.unit

BACKENDS = {"stock": TorchNativeAttnBackend, "new-rows": NewRowsAttnBackend}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(6, 2), (2, 2), (4, 1)])
@pytest.mark.parametrize("decode", [True, False], ids=["decode", "extend"])
@settings(deadline=None, max_examples=25)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_equals_masked_full_cache(backend, q_heads, kv_heads, decode, data, seed):
    """Pruned and whole lanes in one batch; extend with and without a cached prefix, so also every chunk of a chunked prefill.

    Catches: attention that reads a dead slot, a causal mask shifted by the dead count, new tokens left out of the compacted row, lanes
    mixed up.
    """
    case = Case(BACKENDS[backend], decode, data.draw(st.lists(sequences(decode), min_size=1, max_size=ROWS)), q_heads, kv_heads, seed)
    rows = case.table[: ROWS + 1].clone()
    fields = dict(vars(case.batch))
    contents = {name: value.clone() for name, value in fields.items() if isinstance(value, torch.Tensor)}
    out = case.run()
    torch.testing.assert_close(out.double(), case.expected(), rtol=1e-4, atol=1e-4)
    assert all(vars(case.batch)[name] is value for name, value in fields.items()), "a batch field was not put back"
    assert all(torch.equal(vars(case.batch)[name], value) for name, value in contents.items()), "a batch field was written in place"
    assert torch.equal(case.table[: ROWS + 1], rows), "a logical row was changed"


@pytest.mark.parametrize("backend", BACKENDS)
def test_close_to_exact_in_float32(backend):
    """The tolerance above hides nothing: the real difference is rounding."""
    case = Case(BACKENDS[backend], False, [Seq(16, 6, frozenset({1, 2, 9})), Seq(12, 3, frozenset(range(11)))], 6, 2, seed=3)
    assert (case.run().double() - case.expected()).abs().max() < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("key", "name"), [(-1e4, "published sentinel"), (0.0, "zeros")])
def test_published_sentinel_fails(backend, key, name):
    """K = -10^4 and V = 0 in evicted slots, as published, masks only where the query's components sum to more than 0; K = V = 0 masks
    nowhere. Both stay in the softmax: nobody may bring them back in place of the live view."""
    lane = Seq(16, 1, frozenset(range(2, 12)))
    case = Case(BACKENDS[backend], True, [lane] * 4, 6, 2, seed=5, dead_count=[0] * 4)
    case.pool.get_key_buffer(LAYER)[0] = key
    case.pool.get_value_buffer(LAYER)[0] = 0
    error = (case.run().double() - case.expected()).abs().amax(-1)
    wrong = error > 0.1
    assert wrong.float().mean() > 0.25
    if key:
        assert torch.equal(wrong, case.q.sum(-1) < 0)
    # The live view, on the same lanes and with the same slots, is right for every head.
    view = Case(BACKENDS[backend], True, [lane] * 4, 6, 2, seed=5)
    assert (view.run().double() - view.expected()).abs().max() < 1e-4


def test_wrong_dead_count_is_seen():
    """The comparison itself can fail: one dead position that the host does not know of (invariant 3)."""
    case = Case(TorchNativeAttnBackend, True, [Seq(16, 1, frozenset({3, 4}))], 6, 2, seed=1, dead_count=[1])
    assert (case.run().double() - case.expected()).abs().max() > 0.1


@pytest.mark.parametrize("decode", [True, False])
@given(data=st.data(), padding=st.integers(0, 2))
@settings(deadline=None, max_examples=50)
def test_view_fields(decode, data, padding):
    """What backends with host-side metadata read (FlashInfer, FA3): lengths, sums and prefixes in live units, rows in the shadow part.

    A graph runner's view has padded lanes behind the real ones: row 0, left as they are. Host-side prefixes are of the real lanes only.
    """
    chosen = data.draw(st.lists(sequences(decode), min_size=1, max_size=ROWS))
    case = Case(TorchNativeAttnBackend, decode, chosen, 2, 2, seed=0)
    batch, n_dead = case.batch, [lane.n_dead for lane in case.known]
    batch.req_pool_indices = torch.cat([batch.req_pool_indices, torch.zeros(padding, dtype=torch.int64)])
    batch.seq_lens = torch.cat([batch.seq_lens, torch.ones(padding, dtype=torch.int64)])
    batch.seq_lens_cpu = batch.seq_lens.clone()
    if not decode:
        batch.extend_prefix_lens = torch.cat([batch.extend_prefix_lens, torch.zeros(padding, dtype=torch.int64)])
    types = {name: getattr(batch, name).dtype for name in ("req_pool_indices", "seq_lens", "seq_lens_cpu")}
    view = case.shadows.view(batch, case.known)
    if not any(n_dead):
        assert view is None
        return
    live = [seq.prefix + seq.new - dead for seq, dead in zip(chosen, n_dead, strict=True)]
    with view.applied(batch):
        assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == live + [1] * padding
        assert batch.seq_lens_sum == sum(live)
        if not decode:
            prefixes = [seq.prefix - dead for seq, dead in zip(chosen, n_dead, strict=True)]
            assert batch.extend_prefix_lens.tolist() == prefixes + [0] * padding
            assert batch.extend_prefix_lens_cpu == prefixes
        rows = batch.req_pool_indices.tolist()
        assert rows == [row + ROWS * bool(dead) for row, dead in zip(case.rows, n_dead, strict=True)] + [0] * padding
        for logical, row, length in zip(case.rows, rows, live, strict=False):
            assert case.table[row, :length].tolist() == [s for s in case.table[logical].tolist() if s]
        assert {name: getattr(batch, name).dtype for name in types} == types


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_shadow_rows_follow_their_rows(data):
    """Shadow rows are kept from pass to pass: a decode step appends, all else compacts. Whatever the order of decode steps, prunes, chunks,
    pauses and new owners of a row, a shadow row holds what compacting the whole row would give.

    Catches: a shadow row kept although its row was pruned or given to another request, an append to the wrong place.
    """
    rows, context = 3, 32
    table = torch.zeros(2 * rows + 1, context, dtype=torch.int32)
    shadows = ShadowRows(table, rows)
    owned = dict.fromkeys(range(1, rows + 1), (0, 0))
    versions, slots = iter(range(1, 1000)), iter(range(1, 10000))
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["decode", "decode", "decode", "prune", "new owner", "extend"]))
        row = data.draw(st.sampled_from(list(owned)))
        length, version = owned[row]
        if action == "new owner" or length + 4 > context:
            table[row] = 0
            owned[row] = (0, next(versions))
            continue
        if action == "prune":
            live = [p for p, s in enumerate(table[row, :length].tolist()) if s]
            if len(live) > 1:
                table[row, sorted(data.draw(st.sets(st.sampled_from(live[:-1]), min_size=1)))] = 0
                owned[row] = (length, next(versions))
            continue
        # A pass over this row and, in decode, some of the others.
        in_pass = [row]
        if action == "decode":
            in_pass += [r for r in owned if r != row and owned[r][0] + 4 <= context and data.draw(st.booleans())]
        lanes = []
        for r in in_pass:
            start, version = owned[r]
            end = start + (1 if action == "decode" else data.draw(st.integers(1, 4)))
            table[r, start:end] = torch.tensor([next(slots) for _ in range(start, end)])
            lanes.append(Lane(r, start, end, int((table[r, :end] == 0).sum()), version))
            owned[r] = (end, version)
        batch = SimpleNamespace(req_pool_indices=torch.tensor(in_pass), seq_lens=torch.tensor([lane.end for lane in lanes]))
        view = shadows.view(batch, lanes)
        for lane in lanes:
            if lane.n_dead:
                live = [s for s in table[lane.row, : lane.end].tolist() if s]
                assert table[lane.row + rows, : len(live)].tolist() == live
        assert (view is None) == (not any(lane.n_dead for lane in lanes))


@pytest.mark.parametrize(("version", "compactions"), [(7, 1), (-1, 4)])
def test_decode_steps_append(monkeypatch, version, compactions):
    """Catches: a compaction of the whole row at every step, which a long decode would pay for; a request that is not tracked has to."""
    calls = []

    def counted(*arguments):
        calls.append(arguments)
        compact_rows(*arguments)

    monkeypatch.setattr(live_view, "compact_rows", counted)
    table = torch.zeros(3, 16, dtype=torch.int32)
    table[1, :4] = torch.tensor([5, 0, 6, 7])
    shadows = ShadowRows(table, 1)
    for position in range(4, 8):
        table[1, position] = 10 + position
        batch = SimpleNamespace(req_pool_indices=torch.tensor([1]), seq_lens=torch.tensor([position + 1]))
        shadows.view(batch, [Lane(1, position, position + 1, 1, version)])
        assert table[2, :position].tolist() == [5, 6, 7, *range(14, 11 + position)]
    assert len(calls) == compactions


def test_nothing_dead_is_no_work():
    """Decision D3: with nothing pruned the batch is not touched at all (and no table row is written)."""
    case = Case(TorchNativeAttnBackend, False, [Seq(8, 2, frozenset()), Seq(0, 3, frozenset())], 2, 2, seed=0)
    table, fields = case.table.clone(), dict(vars(case.batch))
    assert case.shadows.view(case.batch, case.known) is None
    case.run()
    assert torch.equal(case.table, table)
    assert all(vars(case.batch)[name] is value for name, value in fields.items())


def test_batch_is_restored_when_the_backend_raises():
    batch = SimpleNamespace(seq_lens=torch.tensor([5]), other=1)
    fields = dict(vars(batch))

    def backend():
        with LiveView({"seq_lens": torch.tensor([3])}).applied(batch):
            assert batch.seq_lens.tolist() == [3]
            raise RuntimeError("in the backend")

    with pytest.raises(RuntimeError, match="in the backend"):
        backend()
    assert all(vars(batch)[name] is value for name, value in fields.items())


def test_view_of_a_pass_does_not_leak_into_the_next():
    case = Case(TorchNativeAttnBackend, True, [Seq(8, 1, frozenset({1, 2}))], 2, 2, seed=0)
    case.run()
    whole = Case(TorchNativeAttnBackend, True, [Seq(8, 1, frozenset())], 2, 2, seed=0)
    whole.backend = case.backend
    case.channel.current = whole.channel.current
    case.table[whole.rows[0]] = whole.table[whole.rows[0]]
    case.pool.get_key_buffer(LAYER).copy_(whole.pool.get_key_buffer(LAYER))
    case.pool.get_value_buffer(LAYER).copy_(whole.pool.get_value_buffer(LAYER))
    torch.testing.assert_close(whole.run().double(), whole.expected(), rtol=1e-4, atol=1e-4)


class MetadataBackend:
    """A backend that copies what it needs when its metadata is built, as the GPU backends do; notes the lengths it saw."""

    def __init__(self, nested):
        self.nested, self.seen = nested, {}

    def init_forward_metadata(self, batch):
        self.seen["eager"] = batch.seq_lens.tolist()
        if self.nested:
            self.init_forward_metadata_out_graph(batch)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        self.seen["capture" if in_capture else "out_graph"] = batch.seq_lens.tolist()

    def forward_decode(self, q, k, v, layer, batch):
        self.seen["forward"] = batch.seq_lens.tolist()


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("n_dead", [0, 2])
def test_backends_that_build_metadata(nested, n_dead):
    """Live lengths while metadata is built, eagerly or before a graph is replayed, and once only where one calls the other; logical ones
    in forward, where nothing is read from the row any more, and while a graph is recorded."""
    table = torch.zeros(3, 8, dtype=torch.int32)
    table[1, :6] = torch.tensor([4, 0, 0, 5, 6, 7]) if n_dead else torch.arange(2, 8)
    lanes, channel = [Lane(1, 5, 6, n_dead)], PassChannel()
    bank = QueryBank([LAYER], 4, 2, DIM, torch.float32, "cpu")
    channel.decode_tap = DecodeTap(bank, lanes=2)
    backend = with_live_view(MetadataBackend(nested), "triton", ShadowRows(table, 1), channel)
    batch = SimpleNamespace(req_pool_indices=torch.tensor([1]), seq_lens=torch.tensor([6]))
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    assert backend.seen.pop("capture") == [6]
    channel.current = LanePass(lanes, QueryTap(bank, CapturePlan(tokens=[0], rows=[3])))
    live = [6 - n_dead]
    backend.init_forward_metadata(batch)
    assert backend.seen == ({"eager": live, "out_graph": live} if nested else {"eager": live})
    layer = RadixAttention(2, DIM, 1.0, 2, LAYER)
    backend.forward_decode(torch.ones(1, 2 * DIM), None, None, layer, batch)
    assert backend.seen["forward"] == [6]
    assert bank.storage[0, 3].eq(1).all()
    # A replay: the second lane is padding and writes to the trash row.
    padded = SimpleNamespace(req_pool_indices=torch.tensor([1, 0]), seq_lens=torch.tensor([6, 1]))
    backend.init_forward_metadata_out_graph(padded)
    assert backend.seen["out_graph"] == [*live, 1]
    assert padded.seq_lens.tolist() == [6, 1]
    channel.decode_tap.write(LAYER, torch.tensor([2.0, 9.0])[:, None, None].expand(2, 2, DIM))
    assert bank.storage[0, :, 0, 0].tolist() == [0, 0, 0, 2, 9]


@pytest.mark.parametrize("decode", [True, False])
def test_taps_see_the_queries(decode):
    """Queries reach the bank before attention runs, [tokens, H_q, D], whichever shape the model hands over."""
    case = Case(NewRowsAttnBackend, decode, [Seq(8, 1, frozenset({1})), Seq(4, 1, frozenset())], 6, 2, seed=0)
    bank = QueryBank(range(LAYER, LAYER + 1), 4, 6, DIM, torch.float32, "cpu")
    case.channel.current = LanePass(case.known, QueryTap(bank, CapturePlan(tokens=[1, 0], rows=[2, 3])))
    case.run()
    assert torch.equal(bank.read([2, 3])[0], case.q[[1, 0]])


def test_batches_without_a_pass_run_as_stock():
    """Warm-up batches have none."""
    case = Case(TorchNativeAttnBackend, True, [Seq(8, 1, frozenset())], 2, 2, seed=0)
    case.channel.current = None
    torch.testing.assert_close(case.run().double(), case.expected(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("selected", [True, False])
def test_shadow_rows(monkeypatch, selected):
    """One for every row that a request can have, behind the pool's own; none on a stock server."""
    monkeypatch.setattr(plugin.compat, "plugin_selected", lambda: selected)
    pool = SimpleNamespace(size=4, req_to_token=torch.zeros(5, 7, dtype=torch.int32))
    plugin._add_shadow_rows(None, pool)
    assert pool.req_to_token.shape == (9 if selected else 5, 7)
    assert pool.req_to_token.dtype == torch.int32


@given(
    rows=st.lists(st.lists(st.sampled_from([0, 0, 3, 4, 5]), min_size=6, max_size=6), min_size=1, max_size=4),
    lengths=st.lists(st.integers(0, 6), min_size=4, max_size=4),
)
@settings(deadline=None)
def test_compact_rows(rows, lengths):
    """Catches: order lost, entries behind the length taken, the dead mark copied."""
    n = len(rows)
    table = torch.tensor(rows + [[9] * 6] * n, dtype=torch.int32)
    compact_rows(table, torch.arange(n), torch.tensor(lengths[:n]), torch.arange(n, 2 * n))
    assert table[:n].tolist() == rows
    for target, row, length in zip(table[n:].tolist(), rows, lengths, strict=False):
        live = [slot for slot in row[:length] if slot != 0]
        assert target[: len(live)] == live
