"""One server under test, and conversations whose every position is known."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import httpx
import torch
from transformers import PreTrainedTokenizerBase

from intentkv_eval.server import Server

T = TypeVar("T")

BUDGET = 256
POOL = 6000
TIGHT_POOL = 1500
CHUNK = 128
API_KEY = "secret"
DECODE_INTERVAL = 32
"""Settings of the servers; TIGHT_POOL, CHUNK and API_KEY only of the tight one."""

PATIENCE_S = 300.0
"""A shared machine may be 30 times slower than an idle one."""


@dataclass(frozen=True)
class Answer:
    """What ``/generate`` gave for one prompt."""

    output_ids: list[int]
    cached_tokens: int
    figures: dict[str, int]
    """The plugin's; empty from a stock server."""
    meta: dict[str, Any]

    @classmethod
    def of(cls, reply: dict[str, Any]) -> Answer:
        meta = reply["meta_info"]
        figures = meta.get("intentkv", [{}])
        assert len(figures) == 1, "a request has one set of figures"
        return cls(reply["output_ids"], meta["cached_tokens"], figures[0], meta)

    @property
    def input_logprobs(self) -> torch.Tensor:
        """Log-probabilities of the prompt's tokens behind the first one asked for, in order."""
        return torch.tensor([value for value, *_ in self.meta["input_token_logprobs"] if value is not None])

    @property
    def output_logprobs(self) -> torch.Tensor:
        return torch.tensor([value for value, *_ in self.meta["output_token_logprobs"]])


def generate_body(ids: Any, new_tokens: int, options: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A greedy request of exactly ``new_tokens``; ``fields`` go to its top level."""
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    if options is not None:
        sampling["custom_params"] = {"intentkv": options}
    return {"input_ids": ids, "sampling_params": sampling, **fields}


def at_once(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """Results of ``jobs``, each run in a thread of its own."""
    with ThreadPoolExecutor(len(jobs)) as threads:
        return [future.result() for future in [threads.submit(job) for job in jobs]]


class Client:
    """Requests to one server."""

    def __init__(self, server: Server, api_key: str | None = None) -> None:
        self.log = server.log
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.http = httpx.Client(base_url=server.url, headers=headers, timeout=PATIENCE_S)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.http.post(path, json=body)

    def generate(self, ids: list[int], new_tokens: int, options: dict[str, Any] | None = None, **fields: Any) -> Answer:
        response = self.post("/generate", generate_body(ids, new_tokens, options, **fields))
        assert response.status_code == httpx.codes.OK, response.text
        return Answer.of(response.json())

    def generate_batch(
        self, prompts: Sequence[list[int]], new_tokens: int, options: dict[str, Any] | None = None, **fields: Any
    ) -> list[Answer]:
        """All prompts in one HTTP request: they meet in one prefill batch, as far as they fit."""
        response = self.post("/generate", generate_body(list(prompts), new_tokens, options, **fields))
        assert response.status_code == httpx.codes.OK, response.text
        return [Answer.of(reply) for reply in response.json()]

    def flush(self) -> None:
        """Empty the prefix cache, once the server is idle."""
        response = self.http.post("/flush_cache", params={"timeout": PATIENCE_S})
        assert response.status_code == httpx.codes.OK, response.text

    # ---- Only with the plugin ----

    def status(self, session: str | None = None) -> dict[str, Any]:
        response = self.http.get("/intentkv/status", params={"session": session} if session is not None else {})
        assert response.status_code == httpx.codes.OK, response.text
        status: dict[str, Any] = response.json()
        return status

    def dead(self, session: str) -> set[int]:
        """Evicted positions of the session's longest path."""
        (item,) = self.status(session)["sessions"]["items"]
        return {position for start, end in item["dead_spans"] for position in range(start, end)}

    def idle_status(self) -> dict[str, Any]:
        """The status once no request holds anything."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            status = self.status()
            if status["pool"]["protected"] == status["pool"]["private"] == 0:
                return status
            assert time.monotonic() < deadline, f"a request never let go of its slots: {status['pool']}"
            time.sleep(0.05)

    def check_idle(self) -> None:
        """The server lives, nothing is held, and every slot is accounted for."""
        pool = self.idle_status()["pool"]
        assert pool["available"] + pool["evictable"] == pool["total"], pool
        # SGLang's own leak check runs when the server falls idle, and ends it: it must outlive one more request.
        self.generate([0], 1)
        assert self.status()["pool"]["total"] == pool["total"]


class Span(NamedTuple):
    role: str
    start: int
    end: int


@dataclass
class Chat:
    """A ChatML conversation with random content, built from token ids: what each position is is known and not parsed."""

    tokenizer: PreTrainedTokenizerBase
    seed: str
    ids: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    generation_start: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def words(self, count: int) -> list[int]:
        """Random ids, none of them special."""
        return [self._random.randrange(1000, 40000) for _ in range(count)]

    def say(self, role: str, size: int | list[int]) -> Chat:
        """Append a message of ``size`` random tokens, or of the given ones."""
        start = len(self.ids)
        content = self.words(size) if isinstance(size, int) else size
        self.ids += self._encode(f"<|im_start|>{role}\n") + content + self._encode("<|im_end|>\n")
        self.spans.append(Span(role, start, len(self.ids)))
        return self

    def ask(self) -> list[int]:
        """Open the assistant's message and return the prompt."""
        self.generation_start = len(self.ids)
        self.ids += self._encode("<|im_start|>assistant\n")
        return list(self.ids)

    def answered(self, output_ids: list[int]) -> Chat:
        """Close the assistant's message with what the server wrote."""
        self.ids += output_ids + self._encode("<|im_end|>\n")
        self.spans.append(Span("assistant", self.generation_start, len(self.ids)))
        return self
