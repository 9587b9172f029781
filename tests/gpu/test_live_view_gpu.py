"""The live view on a GPU: what it costs when nothing is pruned, that it never waits for the device, and capture in a replayed graph."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from intentkv_sglang import live_view
from intentkv_sglang.capture import CapturePlan, DecodeTap, QueryBank, QueryTap
from intentkv_sglang.live_view import Lane, LanePass, PassChannel, ShadowRows, with_live_view

ROWS, CONTEXT = 8, 4096
HEADS, DIM, LAYER = 4, 128, 5


class NoOperation(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        raise AssertionError(f"{function} was called")


def batch_of(lanes: list[Lane], extend: bool) -> SimpleNamespace:
    lengths = [lane.end for lane in lanes]
    prefixes = [lane.start for lane in lanes]
    return SimpleNamespace(
        req_pool_indices=torch.tensor([lane.row for lane in lanes], device="cuda"),
        seq_lens=torch.tensor(lengths, device="cuda"),
        seq_lens_cpu=torch.tensor(lengths),
        seq_lens_sum=sum(lengths),
        extend_prefix_lens=torch.tensor(prefixes, device="cuda", dtype=torch.int32) if extend else None,
        extend_prefix_lens_cpu=prefixes if extend else None,
    )


@pytest.fixture
def table() -> torch.Tensor:
    """Rows 1..ROWS with every third position dead, shadow rows behind them."""
    table = torch.zeros(2 * ROWS + 1, CONTEXT, dtype=torch.int32)
    table[1 : ROWS + 1] = torch.arange(1, ROWS * CONTEXT + 1).view(ROWS, CONTEXT)
    table[1 : ROWS + 1, :3000:3] = 0
    return table.cuda()


def test_nothing_pruned_costs_nothing(table: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one torch operation or kernel, so no launch and no wait."""
    monkeypatch.setattr(live_view, "compact_rows", lambda *arguments: pytest.fail("a row was compacted"))
    lanes = [Lane(row, 3000, 3001, 0, version=row) for row in range(1, 5)]
    batch = batch_of(lanes, extend=False)
    with NoOperation():
        assert ShadowRows(table, ROWS).view(batch, lanes) is None


@pytest.mark.parametrize("extend", [True, False])
def test_pruned_lanes_never_wait_for_the_device(table: torch.Tensor, extend: bool) -> None:
    """Compaction, then a decode step that appends. Catches: copies from pageable memory, sizes read back from the device."""
    shadows = ShadowRows(table, ROWS)

    def step(start: int, new: int, version: int) -> tuple[list[Lane], SimpleNamespace]:
        lanes = [Lane(row, start, start + new, 1000 if row != 2 else 0, version) for row in (1, 2, 3)]
        return lanes, batch_of(lanes, extend)

    new = 8 if extend else 1
    passes = [step(3000, new, 1), step(3000 + new, 1, 1)]
    for _ in range(2):
        # Compiles first; then takes as much pinned memory as passes in flight need, none of which is free while the device sleeps.
        torch.cuda._sleep(500_000_000)
        for lanes, batch in passes:
            shadows.view(batch, lanes)
        torch.cuda.synchronize()
        shadows._filled.clear()
        table[ROWS + 1 :] = 0
    torch.cuda.synchronize()
    stream = torch.cuda.current_stream()
    # Far longer than the host needs for all that follows.
    torch.cuda._sleep(4_000_000_000)
    torch.cuda.set_sync_debug_mode("error")
    try:
        views = [shadows.view(batch, lanes) for lanes, batch in passes]
        waited = stream.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not waited, "the host waited for the device"
    end = 3000 + new + 1
    assert views[-1] is not None
    assert views[-1].fields["seq_lens"].tolist() == [end - 1000, end, end - 1000]
    assert views[-1].fields["req_pool_indices"].tolist() == [1 + ROWS, 2, 3 + ROWS]
    for row in (1, 3):
        live = [slot for slot in table[row, :end].tolist() if slot]
        assert table[row + ROWS, : len(live)].tolist() == live


class GraphBackend:
    """Attention that returns the queries; all that matters here is what the live view does around it."""

    def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
        self.lengths = batch.seq_lens.clone()

    def forward_decode(self, q: torch.Tensor, k: Any, v: Any, layer: Any, batch: Any) -> torch.Tensor:
        return q * 1


def test_capture_inside_a_replayed_graph(table: torch.Tensor) -> None:
    """One recording, three replays with other rows. Lanes that capture nothing, padded ones among them, write to the trash row.

    Catches: rows baked into the recording, rows of the replay before, a padded lane that writes to a leased row.
    """
    width, bank = 4, QueryBank([LAYER], 6, HEADS, DIM, torch.bfloat16, "cuda")
    channel = PassChannel(decode_tap=DecodeTap(bank, lanes=width))
    backend = with_live_view(GraphBackend(), "flashinfer", ShadowRows(table, ROWS), channel)
    layer = SimpleNamespace(layer_id=LAYER, tp_q_head_num=HEADS, qk_head_dim=DIM)
    q = torch.zeros(width, HEADS * DIM, dtype=torch.bfloat16, device="cuda")
    padded = [Lane(row, 3000, 3001) for row in (1, 2, 3, 0)]
    backend.init_forward_metadata_out_graph(batch_of(padded, extend=False), in_capture=True)
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        backend.forward_decode(q, None, None, layer, None)
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.forward_decode(q, None, None, layer, None)
    assert bank.storage.count_nonzero() == 0

    expected = torch.zeros(bank.trash + 1)
    for number, targets in enumerate([{0: 2, 2: 5}, {}, {1: 0}], 1):
        plan = CapturePlan(tokens=list(targets), rows=list(targets.values()))
        lanes = [Lane(1, 3000, 3001, 1000), Lane(2, 3000, 3001), Lane(3, 3000, 3001)]
        channel.current = LanePass(lanes, QueryTap(bank, plan) if plan else None)
        backend.init_forward_metadata_out_graph(batch_of(padded, extend=False))
        assert backend.lengths.tolist() == [2001, 3001, 3001, 3001]
        for lane in range(width):
            q[lane] = 10 * number + lane
        graph.replay()
        for lane, row in targets.items():
            expected[row] = 10 * number + lane
        stored = bank.storage[0, : bank.trash].float().amax((1, 2)).cpu()
        assert torch.equal(stored, expected[: bank.trash])
        assert torch.equal(bank.storage[0, : bank.trash].float().amin((1, 2)).cpu(), stored)
        # Of the lanes that go to the trash row any may be the last.
        assert int(bank.storage[0, bank.trash].float().amax()) // 10 == number
