"""Time of a decode step out of chunk arrivals."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from intentkv.config import RequestOptions
from intentkv_eval import bench_steps
from intentkv_eval.bench_steps import Steps, Timed, decode_batch, step_times
from intentkv_eval.client import RequestFailed

from .test_replay import FAILURES, FakeServer

pytestmark = pytest.mark.unit


def timed(*chunks: tuple[float, int]) -> Timed:
    return Timed([], 0, 0, None, 0.0, list(chunks))


def test_only_steps_that_all_requests_share_are_counted() -> None:
    """Catches steps beside another request's prefill, or of a batch that has become smaller, among the measured ones."""
    early = timed((1.0, 1), (9.0, 2), (10.0, 3), (11.0, 4), (12.0, 5), (13.0, 6))
    late = timed((10.0, 1), (11.0, 2), (12.0, 3), (20.0, 4))
    # together: from 10 (the late one's first token) to 13 (the early one's last)
    assert step_times([early, late]) == Steps(1.0, 1.0, 5, [early, late])


def test_a_chunk_of_several_tokens_is_several_steps() -> None:
    """Catches a chunk interval taken for one step, and chunks without new tokens."""
    steps = step_times([timed((0.0, 1), (4.0, 9), (4.1, 9), (12.1, 17), (13.1, 25))])
    assert steps.median_s == 0.5
    assert steps.mean_s == pytest.approx((4.0 + 8.0 + 1.0) / 24)
    assert steps.intervals == 3


def test_requests_that_never_decode_together_are_no_batch() -> None:
    """Catches a step time of a batch that did not exist."""
    with pytest.raises(RequestFailed, match="at the same time"):
        step_times([timed((0.0, 1), (1.0, 2)), timed((5.0, 1), (6.0, 2))])


def run(server: FakeServer, prompts: list[list[int]], tokens: int, **options: Any) -> Steps:
    async def go() -> Steps:
        async with httpx.AsyncClient(transport=server.transport(), base_url="http://fake") as http:
            names = [f"s{k}" for k in range(len(prompts))]
            return await decode_batch(http, prompts, tokens, RequestOptions(**options), names)

    return asyncio.run(go())


@pytest.mark.parametrize("incremental", [False, True])
def test_stream_is_timed_chunk_by_chunk(incremental: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches the prefill among the steps, outputs that are cut, and options that are not sent. The clock is the fake server's."""
    server = FakeServer(incremental, plugin=True)
    monkeypatch.setattr(bench_steps.time, "perf_counter", lambda: server.now)
    steps = run(server, [[5] * 40], 6, method="snapkv", budget=64)
    (request,) = steps.requests
    assert request.output_ids == [100, 101, 102, 103, 104, 105]
    assert (request.prompt_tokens, request.ttft_s) == (40, 1.0)
    assert request.figures is not None
    assert request.figures["live_tokens"] == 60
    assert (steps.median_s, steps.mean_s, steps.intervals) == (0.25, 0.25, 5)
    (body,) = server.bodies
    assert body["sampling_params"]["custom_params"]["intentkv"] == {"method": "snapkv", "budget": 64}
    assert body["sampling_params"]["stream_interval"] == 1


def test_batch_runs_at_once() -> None:
    """Catches a batch that is measured one request after the other."""
    server = FakeServer()
    run(server, [[lane] * 20 for lane in range(8)], 20)
    assert server.most_running == 8


@pytest.mark.parametrize("message", FAILURES)
def test_failed_request_ends_the_measurement(message: str) -> None:
    """Catches a step time of a request that was refused, aborted or lost."""
    server = FakeServer()
    server.fail = {0: FAILURES[message]()}
    with pytest.raises(RequestFailed):
        run(server, [[5] * 40], 6)
