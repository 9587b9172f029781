"""The few SGLang endpoints the evaluation needs, over HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from intentkv.config import ConfigError, RequestOptions

_CONNECT_S = 10.0


class RequestFailed(RuntimeError):
    """One request failed; the message is the server's, or says what went wrong on the way."""


@dataclass(frozen=True)
class Generation:
    """What one streamed request gave."""

    output_ids: list[int]
    prompt_tokens: int
    cached_tokens: int
    figures: dict[str, int] | None
    """The plugin's figures of this request; None from a stock server."""
    ttft_s: float
    """Seconds from sending the request to the first token."""
    latency_s: float
    """Seconds from sending the request to the last token."""


def plugin_figures(meta: dict[str, Any]) -> dict[str, int] | None:
    """The plugin's figures in a reply's ``meta_info``; None from a stock server."""
    figures: list[dict[str, int]] | None = meta.get("intentkv")
    return figures[-1] if figures else None


def generate_body(
    input_ids: Sequence[int],
    max_new_tokens: int,
    options: RequestOptions | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """Body of a greedy ``/generate`` request that writes exactly ``max_new_tokens``; ``fields`` go to its top level."""
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    if options is not None and options.model_fields_set:
        sampling["custom_params"] = {"intentkv": options.model_dump(exclude_unset=True)}
    return {"input_ids": list(input_ids), "sampling_params": sampling, **fields}


class ServerClient:
    """Requests to one server."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text as the server's tokenizer gives them, no special tokens added.

        Raises:
            RequestFailed: the server refused.
        """
        reply = await self._post("/tokenize", {"prompt": list(texts), "add_special_tokens": False})
        tokens: list[list[int]] = reply["tokens"]
        return tokens

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """Reply of a ``/generate`` request that does not stream.

        Raises:
            RequestFailed: it was refused, aborted or lost.
        """
        reply = await self._post("/generate", body)
        _check_finish(reply["meta_info"])
        return reply

    async def stream(self, body: dict[str, Any]) -> Generation:
        """Send a ``/generate`` request as a stream and time it.

        Raises:
            RequestFailed: it was refused, aborted or lost, or tokens are missing.
        """
        sent = time.perf_counter()
        first = last = sent
        output: list[int] = []
        meta: dict[str, Any] = {}
        try:
            async with self._http.stream("POST", "/generate", json={**body, "stream": True}) as response:
                async for chunk in _events(response):
                    ids, meta = chunk["output_ids"], chunk["meta_info"]
                    if ids:
                        last = time.perf_counter()
                        first = first if output else last
                    # every chunk holds all tokens so far, or only the new ones (--incremental-streaming-output)
                    output = ids if len(ids) == meta["completion_tokens"] else output + ids
            _check_finish(meta)
            if not output or len(output) != meta["completion_tokens"]:
                raise RequestFailed(f"the stream ended after {len(output)} of {meta.get('completion_tokens', 0)} tokens")
            return Generation(output, meta["prompt_tokens"], meta["cached_tokens"], plugin_figures(meta), first - sent, last - sent)
        except httpx.HTTPError as error:
            raise RequestFailed(_transport_text(error)) from error
        except (KeyError, TypeError, ValueError) as error:
            raise RequestFailed(f"malformed reply: {error!r}") from error

    async def status(self) -> dict[str, Any] | None:
        """``/intentkv/status``, or None from a server without the plugin."""
        return await self._get("/intentkv/status")

    async def metrics(self) -> str | None:
        """Text of ``/metrics``, or None from a server without ``--enable-metrics``.

        Raises:
            RequestFailed: the server does not answer.
        """
        response = await self._send("GET", "/metrics", missing_ok=True)
        return None if response.is_error else response.text

    async def server_info(self) -> dict[str, Any]:
        """``/server_info``; empty where the server has none."""
        return await self._get("/server_info") or {}

    async def flush_cache(self) -> None:
        """Empty the prefix cache.

        Raises:
            RequestFailed: refused, because requests are running.
        """
        await self._send("POST", "/flush_cache")

    async def _get(self, path: str) -> dict[str, Any] | None:
        response = await self._send("GET", path, missing_ok=True)
        return None if response.is_error else _json_object(response)

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return _json_object(await self._send("POST", path, body))

    async def _send(self, method: str, path: str, body: dict[str, Any] | None = None, missing_ok: bool = False) -> httpx.Response:
        try:
            response = await self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise RequestFailed(_transport_text(error)) from error
        if response.is_error and not (missing_ok and response.status_code == httpx.codes.NOT_FOUND):
            raise RequestFailed(_error_text(response))
        return response


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Chunks of a server-sent-event stream, up to its end marker."""
    if response.is_error:
        await response.aread()
        raise RequestFailed(_error_text(response))
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data:"):
            chunk = json.loads(line.removeprefix("data:"))
            if "error" in chunk:
                raise RequestFailed(str(chunk["error"]["message"]))
            yield chunk


def _check_finish(meta: dict[str, Any]) -> None:
    reason = meta.get("finish_reason")
    if isinstance(reason, dict) and reason.get("type") == "abort":
        raise RequestFailed(f"aborted: {reason.get('message', 'no reason given')}")


def _json_object(response: httpx.Response) -> dict[str, Any]:
    try:
        value = response.json()
    except ValueError as error:
        raise RequestFailed(f"{response.request.url.path} did not answer in JSON") from error
    if not isinstance(value, dict):
        raise RequestFailed(f"{response.request.url.path} answered {type(value).__name__}, not an object")
    return value


def _error_text(response: httpx.Response) -> str:
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text.strip() or response.reason_phrase
    return f"HTTP {response.status_code}: {message}"


def _transport_text(error: httpx.HTTPError) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


@asynccontextmanager
async def connect(url: str, timeout_s: float, concurrency: int = 1) -> AsyncIterator[ServerClient]:
    """A client of the server at ``url``.

    Args:
        timeout_s: longest silence of the server during a request.

    Raises:
        ConfigError: no server answers there.
    """
    limits = httpx.Limits(max_connections=concurrency + 1)
    async with httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(timeout_s, connect=_CONNECT_S), limits=limits) as http:
        try:
            await http.get("/model_info")
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise ConfigError(f"No server answers at {url}; start one with 'intentkv serve' or give its --url.") from error
        yield ServerClient(http)
