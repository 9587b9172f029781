"""The server's KV pool and eviction counters over time: one JSON line a sample, as ``/intentkv/status`` gave it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from intentkv.config import ConfigError
from intentkv_eval.client import RequestFailed, ServerClient, connect
from intentkv_eval.provenance import Provenance, collect

SAMPLES_FILE = "pool.jsonl"
WATCH_FILE = "watch.json"


class Pool(BaseModel):
    """Slots by use; all but ``dead`` sum to ``total`` whenever no batch is in flight."""

    total: int
    available: int
    evictable: int
    """Cached and live, used by no running request: SGLang takes them back when it needs room."""
    protected: int
    """Cached and live, used by a running request."""
    private: int
    """Of running requests, not in the tree yet."""
    dead: int
    """Positions whose KV was pruned; they take no slot."""


class Counters(BaseModel):
    """Totals since the server started."""

    model_config = ConfigDict(extra="ignore")

    prune_events: int
    pruned_tokens: int
    prompt_tokens: int
    cached_tokens: int
    live_cached_tokens: int
    prune_seconds: float
    declined: dict[str, int] = {}


class Sample(BaseModel):
    """One line of ``pool.jsonl``."""

    time_s: float
    """Since the recording began."""
    pool: Pool
    counters: Counters


async def _take(client: ServerClient, start: float) -> Sample | None:
    """A sample; None when the server did not answer, which leaves a gap and is not what a replay fails of."""
    with contextlib.suppress(RequestFailed):
        status = await client.status()
        if status is not None:
            return Sample(time_s=round(time.perf_counter() - start, 3), pool=status["pool"], counters=status["counters"])
    return None


async def _record(client: ServerClient, file: Path, every_s: float, stop: asyncio.Event) -> None:
    """Append samples to ``file`` until ``stop``, the first at once and the last at the end."""
    start = time.perf_counter()
    with file.open("w") as lines:
        while True:
            last = stop.is_set()
            sample = await _take(client, start)
            if sample is not None:
                lines.write(sample.model_dump_json() + "\n")
                lines.flush()
            if last:
                return
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stop.wait(), every_s)


@asynccontextmanager
async def sampling(client: ServerClient, folder: Path, every_s: float) -> AsyncIterator[None]:
    """Write ``pool.jsonl`` to ``folder`` while the context lasts; nothing for a stock server, which has no such status."""
    status = await client.status()
    if status is None:
        yield
        return
    stop = asyncio.Event()
    recorder = asyncio.create_task(_record(client, folder / SAMPLES_FILE, every_s, stop))
    try:
        yield
    finally:
        stop.set()
        await recorder


class WatchInfo(BaseModel):
    """``watch.json``."""

    arm: str
    provenance: Provenance


async def _watch(url: str, out: Path, arm: str | None, every_s: float, seconds: float | None) -> None:
    async with connect(url, timeout_s=60) as client:
        try:
            provenance = await collect(client)
        except RequestFailed as error:
            raise ConfigError(f"The server at {url} cannot be watched: {error}.") from error
        if provenance.method is None:
            raise ConfigError(f"The server at {url} runs without IntentKV, so it has no pool to watch; start it without --stock.")
        out.mkdir(parents=True, exist_ok=True)
        name = arm or f"{provenance.method} {provenance.budget}"
        (out / WATCH_FILE).write_text(WatchInfo(arm=name, provenance=provenance).model_dump_json(indent=2) + "\n")
        async with sampling(client, out, every_s):
            await asyncio.sleep(seconds) if seconds is not None else await asyncio.Event().wait()


def watch(url: str, out: Path, arm: str | None, every_s: float, seconds: float | None) -> None:
    """``intentkv watch``: sample a running server until Ctrl-C, or for ``seconds``.

    Raises:
        ConfigError: no server with the plugin answers, or the folder holds a recording already.
    """
    if (out / SAMPLES_FILE).exists():
        raise ConfigError(f"Folder {str(out)!r} holds a recording already; give another --out.")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_watch(url, out, arm, every_s, seconds))
