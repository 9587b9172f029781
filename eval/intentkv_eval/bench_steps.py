"""Time of a decode step as a client sees it in the stream."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import httpx

from intentkv.config import RequestOptions
from intentkv_eval.client import RequestFailed, generate_body, plugin_figures

_LANES_A_CHUNK = 4


class Timed(NamedTuple):
    """One streamed request, with the time of every chunk."""

    output_ids: list[int]
    prompt_tokens: int
    cached_tokens: int
    figures: dict[str, int] | None
    sent_s: float
    chunks: list[tuple[float, int]]
    """(arrival on the client's clock, tokens so far) of every chunk that brought tokens."""

    @property
    def ttft_s(self) -> float:
        return self.chunks[0][0] - self.sent_s


class Steps(NamedTuple):
    """Decode steps of a batch."""

    median_s: float
    mean_s: float
    intervals: int
    """Chunk intervals the figures are of."""
    requests: list[Timed]


async def timed_generate(http: httpx.AsyncClient, body: dict[str, Any]) -> Timed:
    """Stream a ``/generate`` request. Chunks are only stamped while they come and parsed afterwards, so parsing delays no stamp.

    Raises:
        RequestFailed: it was refused, aborted or lost.
    """
    sent = time.perf_counter()
    lines: list[tuple[float, str]] = []
    try:
        async with http.stream("POST", "/generate", json={**body, "stream": True}) as response:
            if response.is_error:
                raise RequestFailed(f"HTTP {response.status_code}: {(await response.aread()).decode(errors='replace').strip()}")
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    lines.append((time.perf_counter(), line))
        return _parsed(sent, lines)
    except httpx.HTTPError as error:
        raise RequestFailed(f"{type(error).__name__}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise RequestFailed(f"malformed reply: {error!r}") from error


def _parsed(sent: float, lines: Sequence[tuple[float, str]]) -> Timed:
    output: list[int] = []
    chunks: list[tuple[float, int]] = []
    meta: dict[str, Any] = {}
    for arrived, line in lines:
        chunk = json.loads(line.removeprefix("data: "))
        if "error" in chunk:
            raise RequestFailed(str(chunk["error"]["message"]))
        ids, meta = chunk["output_ids"], chunk["meta_info"]
        # every chunk holds all tokens so far, or only the new ones (--incremental-streaming-output)
        output = ids if len(ids) == meta["completion_tokens"] else output + ids
        if ids:
            chunks.append((arrived, meta["completion_tokens"]))
    reason = meta.get("finish_reason")
    if not chunks or (isinstance(reason, dict) and reason.get("type") == "abort"):
        raise RequestFailed(f"ended without its tokens: {reason}")
    return Timed(output, meta["prompt_tokens"], meta["cached_tokens"], plugin_figures(meta), sent, chunks)


async def decode_batch(
    http: httpx.AsyncClient, prompts: Sequence[Sequence[int]], tokens: int, options: RequestOptions, session_ids: Sequence[str]
) -> Steps:
    """Generate ``tokens`` behind each prompt, all at once, and time the steps that all of them share.

    Raises:
        RequestFailed: a request failed, or the requests never decoded together.
    """
    bodies = [generate_body(prompt, tokens, options, session_id=name) for prompt, name in zip(prompts, session_ids, strict=True)]
    for body in bodies:
        # as many chunks a step whatever the batch, or a large batch would measure the client
        body["sampling_params"]["stream_interval"] = max(1, len(prompts) // _LANES_A_CHUNK)
    requests = list(await asyncio.gather(*(timed_generate(http, body) for body in bodies)))
    return step_times(requests)


def step_times(requests: Sequence[Timed]) -> Steps:
    """Seconds a token in the chunk intervals that lie between the last request's first token and the first request's last.

    Raises:
        RequestFailed: there is no such interval.
    """
    start = max(request.chunks[0][0] for request in requests)
    end = min(request.chunks[-1][0] for request in requests)
    gaps = [
        (after - before, tokens - earlier)
        for request in requests
        for (before, earlier), (after, tokens) in pairwise(request.chunks)
        if before >= start and after <= end and tokens > earlier
    ]
    if not gaps:
        raise RequestFailed("the requests of the batch did not decode at the same time; generate more tokens")
    mean = sum(seconds for seconds, _ in gaps) / sum(tokens for _, tokens in gaps)
    return Steps(statistics.median(seconds / tokens for seconds, tokens in gaps), mean, len(gaps), list(requests))
