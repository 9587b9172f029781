"""What the plugin tells about itself: the JSON of ``GET /intentkv/status``, answered by the scheduler process."""

from __future__ import annotations

from typing import Any

import torch

import intentkv
from intentkv_sglang import compat
from intentkv_sglang.runtime import Runtime

STATUS_COMMAND = "intentkv:status"
_SESSIONS_SHOWN = 1024


def status(runtime: Runtime, session: str | None = None) -> dict[str, Any]:
    """Versions, method, pool, counters and sessions.

    The pool's terms sum to ``total`` whenever no batch is in flight: available + evictable + protected + private, in live slots.

    Args:
        session: only this ``session_id``, with the dead spans of its prompt.
    """
    cache, counters = runtime.cache, runtime.counters
    allocator = cache.token_to_kv_pool_allocator
    private = sum(req.kv.kv_allocated_len - req.cache_protected_len for req in runtime.running())
    states = [s for s in runtime.sessions if session is None or s.key == f"id:{session}"]
    items = [
        {
            "key": s.key,
            "turns": s.turns,
            "logical_tokens": s.logical_tokens,
            "live_tokens": s.live_tokens,
            "pruned_tokens": s.pruned_tokens,
        }
        for s in states[-_SESSIONS_SHOWN:]
    ]
    if session is not None:
        for item in items:
            item["dead_spans"] = [list(span) for span in runtime.dead_spans(session)]
    return {
        "versions": {"intentkv": intentkv.__version__, "sglang": compat.sglang_version(), "torch": torch.__version__},
        "method": runtime.config.method,
        "budget": runtime.config.budget,
        "budget_ratio": runtime.config.budget_ratio,
        "pool": {
            "total": allocator.size,
            "available": allocator.available_size(),
            "evictable": cache.evictable_size(),
            "protected": cache.protected_size(),
            "private": private,
            "dead": cache.component.total_dead,
        },
        "counters": {
            "prune_events": counters.prune_events,
            "pruned_tokens": counters.pruned_tokens,
            "freed_slots": counters.freed_slots,
            "prompt_tokens": counters.prompt_tokens,
            "cached_tokens": counters.cached_tokens,
            "live_cached_tokens": counters.live_cached_tokens,
            "prune_seconds": counters.prune_seconds,
            "declined": dict(counters.declined),
        },
        "sessions": {"count": len(runtime.sessions), "items": items},
    }


def answer(runtime: Runtime, scheduler: Any, request: Any) -> None:
    """Reply to a status command that came over SGLang's control channel (``DumperControlReqInput``)."""
    from sglang.srt.managers.io_struct import DumperControlReqOutput

    reply = DumperControlReqOutput(success=True, response=[status(runtime, request.body.get("session"))])
    scheduler.ipc_channels.send_to_tokenizer.send_output(reply, request)
