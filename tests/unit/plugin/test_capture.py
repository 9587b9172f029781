"""Capture of queries: which rows of the bank hold what, and that every row comes back.

Oracle: each query's value names its request and position, so what a lease reads shows where it was written.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from intentkv.spans import Span
from intentkv_sglang.capture import CapturePlan, DecodeTap, MeanSum, QueryBank, QueryTap, RowLease

pytestmark = pytest.mark.unit

LAYERS = [1, 4, 7]
HEADS, DIM = 2, 3


def make_bank(rows):
    return QueryBank(LAYERS, rows, HEADS, DIM, torch.float32, "cpu")


def query(request, position, layer):
    return torch.full((HEADS, DIM), 1000.0 * request + position + layer / 10)


def assert_holds(captured, request):
    """Every query is the one that was computed at its position, in every layer."""
    assert captured.queries.shape == (len(LAYERS), len(captured.positions), HEADS, DIM)
    for index, layer in enumerate(LAYERS):
        for place, position in enumerate(captured.positions.tolist()):
            assert torch.allclose(captured.queries[index, place], query(request, position, layer))


@given(limit=st.integers(1, 17), length=st.integers(1, 300), start=st.integers(0, 50), step=st.sampled_from([1, 1, 7, 300]))
@settings(deadline=None)
def test_evenly_spaced_at_any_length(limit, length, start, step):
    """A turn's length is not known in advance. Catches: all rows spent on its beginning, gaps, more rows than the limit.

    After a retraction a pass computes many tokens of the turn at once (``step``): rows change hands within the pass.
    """
    bank = make_bank(limit)
    lease = RowLease(bank, limit)
    for first in range(start, start + length, step):
        plan, positions = CapturePlan(), range(first, min(first + step, start + length))
        for token, position in enumerate(positions):
            row = lease.offer(position)
            if row is not None:
                plan.tokens.append(token)
                plan.rows.append(row)
            assert len(lease.rows) == len(lease.positions) <= limit
        tap = QueryTap(bank, plan)
        for layer in LAYERS:
            tap.write(layer, torch.tensor(positions, dtype=torch.float32)[:, None, None].expand(-1, HEADS, DIM))
    captured = lease.captured(Span("assistant", 0, start + length))
    positions = captured.positions.tolist()
    stride = positions[1] - positions[0] if len(positions) > 1 else length
    assert positions == list(range(start, positions[-1] + 1, stride))
    assert start + length - positions[-1] <= max(stride, lease.stride)
    if length <= limit:
        assert len(positions) == length
    else:
        assert limit / 2 <= len(positions) <= limit
    assert captured.queries[0, :, 0, 0].tolist() == positions, "a row holds another position's query"
    lease.close()
    assert sorted(bank.lease() for _ in range(limit)) == list(range(limit))
    assert bank.lease() is None


@given(data=st.data(), rows=st.integers(1, 12))
@settings(deadline=None)
def test_rows_of_many_requests(data, rows):
    """Requests that come, capture through passes of several lanes, and go, on a bank that is often too small.

    Catches: a row leased twice, a row lost, a query written to another request's row, an exhausted bank that raises.
    """
    bank = make_bank(rows)
    open_leases: dict[int, tuple[RowLease, int]] = {}
    for number in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["open", "pass", "pass", "pass", "close"]))
        if action == "open":
            open_leases[number + 1] = (RowLease(bank, data.draw(st.integers(1, 6))), 0)
        elif action == "close" and open_leases:
            request = data.draw(st.sampled_from(list(open_leases)))
            lease, length = open_leases.pop(request)
            assert_holds(lease.captured(Span("assistant", 0, length)), request)
            lease.close()
            assert lease.rows == []
        elif action == "pass" and open_leases:
            plan, lanes = CapturePlan(), []
            for request in data.draw(st.lists(st.sampled_from(list(open_leases)), unique=True)):
                lease, position = open_leases[request]
                row = lease.offer(position)
                if row is not None:
                    plan.tokens.append(len(lanes))
                    plan.rows.append(row)
                lanes.append((request, position))
                open_leases[request] = (lease, position + 1)
            assert len(set(plan.rows)) == len(plan.rows), "two lanes of a pass write to one row"
            if lanes:
                tap = QueryTap(bank, plan)
                for layer in LAYERS:
                    tap.write(layer, torch.stack([query(*lane, layer) for lane in lanes]))
        held = [row for lease, _ in open_leases.values() for row in lease.rows]
        assert len(set(held)) == len(held), "a row is leased twice"
        assert bank.available == rows - len(held)
        assert bank.trash not in held
    for request, (lease, length) in open_leases.items():
        assert_holds(lease.captured(Span("assistant", 0, length)), request)
        lease.close()
    assert sorted(bank.lease() for _ in range(rows)) == list(range(rows))
    assert not bank.storage[:, bank.trash].any(), "a captured query went to the trash row"


def test_exhausted_bank_gives_nothing_and_recovers():
    bank = make_bank(2)
    first, second = RowLease(bank, 4), RowLease(bank, 4)
    assert [first.offer(p) is not None for p in range(4)] == [True, True, False, False]
    assert second.offer(0) is None
    assert second.captured(Span("assistant", 0, 1)).queries.shape == (len(LAYERS), 0, HEADS, DIM)
    first.close()
    assert second.offer(1) is not None
    assert second.positions == [1]


def test_captured_takes_the_span_only():
    """The overrun token of an overlapped batch, behind the end of the turn, is left out."""
    bank = make_bank(8)
    lease = RowLease(bank, 8)
    for position in range(10, 16):
        row = lease.offer(position)
        bank.storage[:, row] = position
    captured = lease.captured(Span("assistant", 11, 15))
    assert captured.positions.tolist() == [11, 12, 13, 14]
    assert captured.queries[2, :, 1, 2].tolist() == [11, 12, 13, 14]
    assert (captured.form, captured.span) == ("raw", Span("assistant", 11, 15))


@given(chunks=st.lists(st.integers(1, 7), min_size=1, max_size=5), seed=st.integers(0, 99))
@settings(deadline=None)
def test_mean_over_chunks(chunks, seed):
    """A span that several passes compute, each pass with other lanes before and behind it."""
    generator = torch.Generator().manual_seed(seed)
    bank = make_bank(1)
    total, all_queries = MeanSum(bank), []
    for size in chunks:
        before, behind = (int(torch.randint(0, 3, (), generator=generator)) for _ in range(2))
        # Layers that the bank does not hold (layer_stride) pass by.
        queries = {layer: torch.randn(before + size + behind, HEADS, DIM, generator=generator) for layer in range(9)}
        tap = QueryTap(bank, CapturePlan(means=[(total, before, before + size)]))
        total.count += size
        for layer, values in queries.items():
            tap.write(layer, values)
        all_queries.append(torch.stack([queries[layer][before : before + size] for layer in LAYERS]))
    captured = total.captured(Span("user", 0, sum(chunks)))
    torch.testing.assert_close(captured.queries, torch.cat(all_queries, dim=1).mean(1))
    assert captured.form == "mean"
    assert not bank.storage.any(), "a mean wrote into the bank"


def test_layers_that_are_not_scored_are_not_captured():
    bank = make_bank(2)
    tap = QueryTap(bank, CapturePlan(tokens=[0], rows=[1]))
    for layer in range(9):
        tap.write(layer, torch.full((1, HEADS, DIM), float(layer)))
    assert bank.read([1])[:, 0, 0, 0].tolist() == LAYERS


def test_layers_that_share_their_memory():
    """A pass may compute every layer's queries in one buffer. Catches: a query, or a mean, of the last layer in the place of all."""
    bank = make_bank(1)
    total = MeanSum(bank)
    total.count = 2
    tap = QueryTap(bank, CapturePlan(tokens=[1], rows=[0], means=[(total, 0, 2)]))
    buffer = torch.empty(2, HEADS, DIM)
    for layer in LAYERS:
        tap.write(layer, buffer.fill_(layer))
    assert bank.read([0])[:, 0, 0, 0].tolist() == LAYERS
    assert total.captured(Span("user", 0, 2)).queries[:, 0, 0].tolist() == LAYERS


def test_low_precision_storage_is_read_in_float32():
    bank = QueryBank([0], 1, HEADS, DIM, torch.bfloat16, "cpu")
    QueryTap(bank, CapturePlan(tokens=[1], rows=[0])).write(0, torch.tensor([[[9.0] * DIM] * HEADS, [[1.5] * DIM] * HEADS]))
    assert bank.read([0]).dtype == torch.float32
    assert torch.equal(bank.read([0]), torch.full((1, 1, HEADS, DIM), 1.5))


@given(
    passes=st.lists(st.one_of(st.none(), st.dictionaries(st.integers(0, 4), st.integers(0, 5), max_size=5)), max_size=8),
    graph_lanes=st.integers(1, 5),
)
@settings(deadline=None)
def test_recorded_capture(passes, graph_lanes):
    """In a graph every lane writes at every replay: to its row, or to the trash row. A replay after a pass that captured nothing, or had no
    tap, must not write where the pass before did."""
    bank = make_bank(6)
    decode_tap = DecodeTap(bank, lanes=5)
    static = decode_tap._rows
    expected = torch.zeros(6)
    for number, targets in enumerate(passes, start=1):
        tap = None
        if targets is not None:
            # One row for one lane.
            targets = {lane: row for lane, row in targets.items() if list(targets.values()).index(row) == list(targets).index(lane)}
            tap = QueryTap(bank, CapturePlan(tokens=list(targets), rows=list(targets.values())))
            for lane, row in targets.items():
                if lane < graph_lanes:
                    expected[row] = 10 * number + lane
        decode_tap.aim(tap)
        assert decode_tap._rows is static, "the graph was recorded with another tensor"
        for layer in LAYERS:
            queries = torch.arange(graph_lanes)[:, None, None].expand(-1, HEADS, DIM) + 10.0 * number
            decode_tap.write(layer, queries)
        assert torch.equal(bank.storage[0, :6, 0, 0], expected)
        assert torch.equal(bank.storage[2, :6, 1, 2], expected)
