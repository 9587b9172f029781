"""``intentkv serve --record DIR``: every finished request becomes one line of a log.

Runs in the HTTP process. A request is only noted there; one thread of its own turns notes into lines and writes them. When it falls
behind, notes are dropped and counted: recording never holds up or fails a request.
"""

from __future__ import annotations

import atexit
import json
import logging
import queue
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from intentkv.config import Config, RequestOptions, parse_request_options
from intentkv.recording import RequestRecord, ShardWriter
from intentkv_sglang import compat
from intentkv_sglang.figures import KEY

logger = logging.getLogger(__name__)

_BACKLOG = 1024
"""Requests that may wait to be written."""
_FIGURES = ("prompt_tokens", "cached_tokens", "completion_tokens", "e2e_latency")
_ARRIVED, _PREFILLED = "request_received_ts", "prefill_finished_time"
"""Unix times SGLang gives when its metrics are on. A reply that does not stream tells nothing else of its first token."""
_PROMPT, _CHAT = "_intentkv_prompt_ids", "_intentkv_chat"
"""Attributes that carry a request's token ids and messages from where SGLang knows them to where the request ends."""
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class Recorder:
    """Hooks of the HTTP process and the writing thread."""

    def __init__(self, config: Config) -> None:
        """Raises:
        OSError: the folder cannot be made.
        """
        if config.record is None:
            raise ValueError("nothing is to be recorded")
        self._config = config
        self._writer = ShardWriter(config.record, config.record_limit_mb << 20, config.record_shard_mb << 20)
        self._queue: queue.Queue[tuple[Any, dict[str, Any], float] | None] = queue.Queue(_BACKLOG)
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="intentkv-recorder", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    # ---- Hooks: they only set attributes and put a note into a queue ----

    def note_prompt(self, manager: Any, obj: Any, input_ids: Any = None, *args: Any, **kwargs: Any) -> None:
        """Before SGLang validates a request: remember its token ids."""
        setattr(obj, _PROMPT, input_ids)

    def note_chat(self, result: Any, serving: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        """After SGLang turned a chat request into a generation request: remember what was sent."""
        if isinstance(result, tuple) and result:
            setattr(result[0], _CHAT, request)

    def note_finished(self, logger_: Any, obj: Any, out: Any, *args: Any, **kwargs: Any) -> None:
        """When a request is finished."""
        rid = getattr(obj, "rid", None)
        if not isinstance(out, dict) or not isinstance(rid, str) or compat.is_health_check(rid):
            return
        try:
            self._queue.put_nowait((obj, out, time.time()))
        except queue.Full:
            self.dropped += 1

    # ---- The writing thread ----

    def close(self, timeout: float = 5.0) -> None:
        """Write what is waiting, then stop."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(timeout)

    def _run(self) -> None:
        while (note := self._queue.get()) is not None:
            try:
                line = record_of(*note, self._config).model_dump_json().encode()
                self._writer.write(line)
            except (OSError, ValidationError, ValueError, TypeError, AttributeError, KeyError) as error:
                self.dropped += 1
                if self.dropped == 1:
                    logger.warning("A request could not be recorded (further ones are only counted): %s", error)


def record_of(obj: Any, out: dict[str, Any], finished: float, config: Config) -> RequestRecord:
    """The record of a finished request.

    Args:
        obj: SGLang's request object.
        out: its last output.
        finished: Unix time, seconds.
        config: of the server.

    Raises:
        ValidationError: SGLang's objects do not hold what is expected.
    """
    meta = out["meta_info"]
    chat = getattr(obj, _CHAT, None)
    text = out.get("text") or ""
    figures = {name: meta[name] for name in _FIGURES if name in meta}
    for ours in meta.get(KEY) or []:
        figures.update(ours)
    if _ARRIVED in meta and _PREFILLED in meta:
        figures["ttft"] = meta[_PREFILLED] - meta[_ARRIVED]
    options = _options(obj)
    limit = options.limit(config)
    prompt = getattr(obj, _PROMPT, None)
    return RequestRecord(
        id=obj.rid,
        session=getattr(obj, "session_id", None),
        finished=finished,
        model=getattr(chat, "model", "") or "",
        method=options.method or config.method,
        budget=None if isinstance(limit, float) else limit,
        budget_ratio=limit if isinstance(limit, float) else None,
        finish=(meta.get("finish_reason") or {}).get("type", ""),
        messages=[_plain(message) for message in getattr(chat, "messages", None) or []],
        tools=[_plain(tool) for tool in getattr(chat, "tools", None) or []],
        input_ids=list(prompt if prompt is not None else obj.input_ids),
        output_ids=list(out.get("output_ids") or []),
        output_text=text,
        tool_calls=list(tool_calls(text)),
        figures=figures,
    )


def _options(obj: Any) -> RequestOptions:
    """The request's own options, which were validated when it arrived."""
    params = getattr(obj, "sampling_params", None)
    raw = ((params.get("custom_params") if isinstance(params, dict) else None) or {}).get(compat.BACKEND_NAME)
    return RequestOptions() if raw is None else parse_request_options(raw)


def _plain(value: Any) -> dict[str, Any]:
    plain: dict[str, Any] = value.model_dump(mode="json", exclude_none=True) if hasattr(value, "model_dump") else dict(value)
    return plain


def tool_calls(text: str) -> Iterator[dict[str, Any]]:
    """Calls written as ``<tool_call>{"name": ..., "arguments": ...}</tool_call>``."""
    for match in _CALL.finditer(text):
        try:
            call = json.loads(match.group(1))
        except (ValueError, RecursionError):
            continue
        if isinstance(call, dict) and isinstance(call.get("name"), str):
            yield {"name": call["name"], "arguments": call.get("arguments", {})}
