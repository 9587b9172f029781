"""A rehearsal of evictions when the server starts: kernels are compiled before a request would have to wait for them."""

from __future__ import annotations

import torch

from intentkv.config import Config
from intentkv.kernels.compact import compact_rows
from intentkv.kernels.paged_keys import PagedKV
from intentkv.methods import Method, build_method, method_names, method_problem
from intentkv.protocols import Captured, CaptureRequest, KeyReader
from intentkv.selection import top_positions
from intentkv.sessions import SessionState
from intentkv.spans import Prompt, Role, Span
from intentkv_sglang.capture import QueryBank
from intentkv_sglang.keys import PoolKeys
from intentkv_sglang.ranks import RankGroup, needs_all_heads

_MESSAGE = 8
"""Tokens of every message but the assistant's."""
_SHORT_TURN = 4


def rehearse(config: Config, pages: PagedKV, bank: QueryBank, req_to_token: torch.Tensor, scaling: float, ranks: RankGroup) -> None:
    """Score, select and compact once in every way that a request can ask for, on the padding slot's keys; all results are thrown away.

    Requests choose their method, so all methods take part, on all ranks in the same order. ``req_to_token``: [rows, context];
    only row 0, which SGLang gives to nobody, is written.
    """
    rows = torch.zeros(1, dtype=torch.int64, device=req_to_token.device)
    compact_rows(req_to_token, rows, rows, rows)
    for method in [build_method(name, config) for name in method_names() if method_problem(name, config) is None]:
        for turn in (_SHORT_TURN, max(_SHORT_TURN, method.queries.decode_limit)):
            prompt = _prompt(turn)
            slots = torch.zeros(prompt.length, dtype=torch.int64, device=bank.storage.device)
            keys = PoolKeys(pages, slots, torch.arange(prompt.length), bank.layers, scaling)
            _score(method, prompt, ranks.reader(keys, needs_all_heads(method, config)), bank)


def _score(method: Method, prompt: Prompt, keys: KeyReader, bank: QueryBank) -> None:
    if (aggregator := method.aggregator) is None:
        return
    captured = [_capture(wanted, bank) for wanted in method.queries.requests(prompt)]
    state = SessionState("rehearsal")
    for part in captured:
        aggregator.absorb(state, part, keys, prompt)
    top_positions(aggregator.score(state, keys.live, captured, keys, prompt), 1)


def _prompt(turn: int) -> Prompt:
    """A prompt whose assistant turn has ``turn`` tokens."""
    sizes: list[tuple[Role, int]] = [("system", _MESSAGE), ("user", _MESSAGE), ("assistant", turn), ("user", _MESSAGE)]
    spans, end = [], 0
    for role, size in sizes:
        spans.append(Span(role, end, end + size))
        end += size
    return Prompt(end + 1, tuple(spans), end, True)


def _capture(wanted: CaptureRequest, bank: QueryBank) -> Captured:
    span, device = wanted.span, bank.storage.device
    if wanted.form == "mean":
        return Captured(span, "mean", torch.empty(0, dtype=torch.int64, device=device), bank.read([bank.trash])[:, 0])
    positions = torch.arange(max(span.start, span.end - wanted.limit), span.end, device=device)
    return Captured(span, "raw", positions, bank.read([bank.trash] * len(positions)))
