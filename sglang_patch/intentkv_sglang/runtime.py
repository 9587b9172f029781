"""The plugin at work in one scheduler process: from a request's first pass to its last.

Per forward pass: tell attention which lanes are pruned and which queries to keep. After each batch result: fold captured queries into the
session, score, select, prune. Method-agnostic: everything a method decides comes from its parts.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from intentkv.budgets import FixedTokens, HistoryRatio
from intentkv.config import Config, RequestOptions, parse_request_options
from intentkv.methods import Method, build_method
from intentkv.protocols import Budget, Captured, KeyReader, Trigger
from intentkv.sessions import SessionState, SessionStore
from intentkv.spans import Prompt, PromptParser, Span
from intentkv.triggers import OverTarget
from intentkv_sglang import compat
from intentkv_sglang.capture import CapturePlan, MeanSum, QueryBank, QueryTap, RowLease
from intentkv_sglang.eviction import Counters, Evictions
from intentkv_sglang.figures import Figures
from intentkv_sglang.identity import SessionResolver
from intentkv_sglang.keys import PoolKeys
from intentkv_sglang.live_view import Lane, LanePass, PassChannel
from intentkv_sglang.radix_cache import CacheEvent, IntentKVRadixCache
from intentkv_sglang.ranks import RankGroup, needs_all_heads
from intentkv_sglang.warmup import rehearse

_versions = itertools.count(1)


@dataclass
class RunningRequest:
    """What the plugin holds for one request between its first pass and its end."""

    req: Any
    method: Method
    budget: Budget
    trigger: Trigger
    prompt: Prompt
    state: SessionState
    figures: Figures
    whole: bool
    """Its method reads the keys of all ranks' heads; see ranks.needs_all_heads."""
    means: list[tuple[Span, MeanSum]] = field(default_factory=list)
    windows: list[tuple[Span, RowLease, range]] = field(default_factory=list)
    """(span, lease, sampled positions, ascending) of single queries wanted from the prompt."""
    turn: RowLease | None = None
    """Queries of the turn being generated."""
    prefilled: bool = False
    next_look: int = 0
    """Computed tokens at which the generation is next compared with its budget."""
    version: int = field(default_factory=_versions.__next__)
    """Of the entries in its row's tree-owned prefix; see live_view.Lane. No two requests ever have the same."""

    def touch(self) -> None:
        """Its row has changed below ``cache_protected_len``."""
        self.version = next(_versions)

    @property
    def evicts_while_decoding(self) -> bool:
        """Whether its method does, and has the queries it needs for it."""
        method = self.method
        return method.aggregator is not None and method.while_decoding and not (method.queries.decode and self.turn is None)

    @property
    def computed(self) -> int:
        """Tokens whose KV finished passes have written: the last sampled one is an input of the pass under way."""
        return len(self.req.origin_input_ids) + len(self.req.output_ids) - 1

    def book(self, dead: int) -> None:
        """It now has ``dead`` dead positions."""
        self.figures.now(dead)
        self.state.logical_tokens = self.figures.logical_tokens
        self.state.live_tokens = self.state.logical_tokens - dead

    def captured(self) -> list[Captured]:
        """Queries of the prompt's spans, in order of position."""
        found = [total.captured(span) for span, total in self.means if total.count]
        found += [lease.captured(span) for span, lease, _ in self.windows if lease.rows]
        return sorted(found, key=lambda c: (c.span.end, c.span.start))

    def release_prompt_rows(self) -> None:
        for _, lease, _ in self.windows:
            lease.close()
        self.windows, self.means = [], []

    def release(self) -> None:
        self.release_prompt_rows()
        if self.turn is not None:
            self.turn.close()


class Runtime:
    """One per scheduler process, made by the radix factory and completed by :meth:`bind` when the scheduler is ready."""

    def __init__(self, config: Config, cache: IntentKVRadixCache) -> None:
        self.config = config
        self.cache = cache
        self.counters = Counters()
        self.sessions = SessionStore(config.max_sessions)
        self._resolver = SessionResolver(cache, self.sessions)
        self._running: dict[str, RunningRequest] = {}
        self._admitted: dict[str, Any] = {}
        """Every request that holds a row, health checks included."""
        self._events: list[CacheEvent] = []
        cache.on_event = self._note
        cache.on_reset = self._forget

    def bind(self, scheduler: Any, bank: QueryBank, channel: PassChannel) -> None:
        """Attach to the scheduler's model, pools and tokenizer; called once, before the first request."""
        runner = scheduler.tp_worker.model_runner
        self._scaling = compat.attention_shape(runner.model).scaling
        self._pages = compat.paged_kv(runner.model, runner.token_to_kv_pool, bank.layers)
        self._rows = runner.req_to_token_pool
        self._bank = bank
        self._channel = channel
        self._parser = PromptParser(scheduler.tokenizer)
        self._ranks = RankGroup.of(scheduler)
        self.evictions = Evictions(self.cache, self.counters, self._rows.req_to_token, self._ranks)
        rehearse(self.config, self._pages, bank, self._rows.req_to_token, self._scaling, self._ranks)
        self._captures_decode = not self._rows.req_to_token.is_cuda or channel.decode_tap is not None
        """A recorded decode graph captures only what it was recorded with: nothing when the server's own method needs nothing."""

    # ---- Before a pass ----

    def begin_pass(self, batch: Any) -> None:
        """Tell attention about the forward pass over ScheduleBatch ``batch``: its lanes' dead counts and what to capture."""
        plan = CapturePlan()
        lanes = []
        token = 0
        for req, (start, end) in zip(batch.reqs, _computed_positions(batch), strict=True):
            self._admitted[req.rid] = req
            n_dead = self.cache.n_dead(req.last_node)
            request = self._open(req, start) if not compat.is_health_check(req.rid) else None
            if request is not None:
                self._plan(plan, request, start, end, token)
            version = request.version if request is not None else -1
            lanes.append(Lane(req.req_pool_idx, start, end, n_dead, version))
            token += end - start
        self._channel.current = LanePass(lanes, QueryTap(self._bank, plan) if plan else None) if lanes else None

    def _open(self, req: Any, cached: int) -> RunningRequest:
        request = self._running.get(req.rid)
        if request is not None and request.req is req:
            return request
        figures = Figures.of(req)
        # Of a retracted request, as it was admitted first: what it has generated since belongs to the turn, which goes on.
        prompt = self._parser.parse(req.origin_input_ids, cached if figures.session_key is None else figures.cached_tokens)
        if figures.session_key is None:
            state = self._resolver.resolve(req.session_id, req.last_node, cached)
        else:
            # Retracted and admitted again: still the same turn of the same session.
            state = self._resolver.by_key(figures.session_key)
        figures.session_key = state.key
        self.cache.add_owner(req.last_node, state.key)
        method, budget, trigger = self._compose(_options(req))
        request = RunningRequest(req, method, budget, trigger, prompt, state, figures, needs_all_heads(method, self.config))
        dead = self.cache.n_dead(req.last_node)
        if figures.admitted(cached, dead):
            self.counters.prompt_tokens += prompt.length
            self.counters.cached_tokens += cached
            self.counters.live_cached_tokens += cached - dead
            state.turns += 1
        # Per-position memory behind the match belongs to tokens that this request replaced.
        state.truncate(cached)
        state.active.add(req.rid)
        self._running[req.rid] = request
        for wanted in method.queries.requests(prompt) if method.aggregator is not None else []:
            # A partly cached assistant turn was generated here: its queries were folded in when it ended.
            if wanted.span.end <= cached or (wanted.span.role == "assistant" and wanted.span.start < cached):
                continue
            start = max(wanted.span.start, cached)
            if wanted.form == "mean":
                request.means.append((wanted.span, MeanSum(self._bank)))
            else:
                request.windows.append((wanted.span, RowLease(self._bank, wanted.limit), wanted.sampled(start)))
        if method.aggregator is not None and method.queries.decode and self._captures_decode:
            request.turn = RowLease(self._bank, method.queries.decode_limit)
        return request

    def _compose(self, options: RequestOptions) -> tuple[Method, Budget, Trigger]:
        method = build_method(options.method or self.config.method, self.config)
        if options.keep:
            method = replace(method, forced=replace(method.forced, protected=tuple(options.keep)))
        limit = options.limit(self.config)
        budget: Budget = HistoryRatio(limit) if isinstance(limit, float) else FixedTokens(limit)
        hysteresis = self.config.hysteresis if options.hysteresis is None else options.hysteresis
        return method, budget, OverTarget(hysteresis)

    def _plan(self, plan: CapturePlan, request: RunningRequest, start: int, end: int, token: int) -> None:
        """Add what the lane computing positions ``[start, end)``, tokens ``token`` on, is to capture."""
        for span, total in request.means:
            first, last = max(start, span.start), min(end, span.end)
            if first < last:
                plan.means.append((total, token + first - start, token + last - start))
                total.count += last - first
        for _, lease, sampled in request.windows:
            for position in (p for p in sampled if start <= p < end):
                self._take(plan, lease, position, token + position - start)
        if request.turn is not None:
            for position in range(max(start, request.prompt.length), end):
                self._take(plan, request.turn, position, token + position - start)

    def _take(self, plan: CapturePlan, lease: RowLease, position: int, token: int) -> None:
        row = lease.offer(position)
        if row is not None:
            plan.tokens.append(token)
            plan.rows.append(row)
        elif not self._bank.available:
            self.counters.declined["query_rows"] += 1

    # ---- Notes taken inside SGLang's calls ----

    def _note(self, event: CacheEvent) -> None:
        if event.kind in ("finish", "drop"):
            self._admitted.pop(event.req.rid, None)
        request = self._running.get(event.req.rid)
        if request is None or request.req is not event.req:
            return
        # SGLang may have repointed the row to slots the tree had already.
        request.touch()
        if event.kind == "chunk":
            return
        if event.kind == "drop":
            self.evictions.drop(request)
            self._close(request)
            return
        # At once and not when the event is handled: another request's event must already see the path as shared.
        self.cache.add_owner(event.node_id, request.state.key)
        self._events.append(event)

    def _forget(self) -> None:
        """The tree is gone (flush, weight update): so are all chains."""
        for request in self._running.values():
            request.release()
        self._running.clear()
        self._admitted.clear()
        self._events.clear()
        self.evictions.clear()
        self.sessions.clear()

    # ---- After a batch result ----

    def end_pass(self) -> None:
        """Handle what the batch result brought: outside SGLang's free groups, before the next batch is built."""
        changed = self.evictions.commit()
        events, self._events = self._events, []
        for event in events:
            request = self._running.get(event.req.rid)
            if request is None or request.req is not event.req:
                continue
            if event.kind == "checkpoint":
                self._after_prefill(request, event.node_id, running=True)
                continue
            self.evictions.commit(finishing=request)
            # A request aborted in mid-prefill leaves less than its prompt behind: nothing to score.
            if self.cache.has_node(event.node_id) and self.cache.path_length(event.node_id) >= request.prompt.length:
                if not request.prefilled:
                    self._after_prefill(request, event.node_id, running=False)
                self._after_turn(request, event.node_id)
            self._close(request)
        changed |= self._while_decoding()
        if (events or changed) and self.config.debug:
            self.check_rows()

    def _close(self, request: RunningRequest) -> None:
        request.release()
        request.state.active.discard(request.req.rid)
        del self._running[request.req.rid]

    def _after_prefill(self, request: RunningRequest, node_id: int, running: bool) -> None:
        request.prefilled = True
        request.next_look = request.prompt.length + self.config.decode_interval
        state, aggregator = request.state, request.method.aggregator
        state.tip = request.prompt.length
        if aggregator is not None:
            started = time.perf_counter()
            keys = self._keys(node_id, request.whole)
            captured = request.captured()
            for part in captured:
                aggregator.absorb(state, part, keys, request.prompt)
            decision = self.evictions.decide(request, node_id, request.method.forced.mask(request.prompt), running)
            if decision is not None:
                score = partial(aggregator.score, state, captured=captured, keys=keys, prompt=request.prompt)
                self.evictions.select(request, node_id, decision, score, running, started)
        request.release_prompt_rows()
        request.book(self.cache.n_dead(node_id))

    def _after_turn(self, request: RunningRequest, node_id: int) -> None:
        """Fold the queries of the turn that was just generated into the session's memory."""
        aggregator, turn = request.method.aggregator, request.turn
        end = self.cache.path_length(node_id)
        if aggregator is not None and turn is not None and end > request.prompt.length:
            keys = self._keys(node_id, request.whole)
            captured = turn.captured(Span("assistant", request.prompt.generation_start, end))
            if captured.positions.numel():
                aggregator.absorb(request.state, captured, keys, request.prompt)
        request.book(self.cache.n_dead(node_id))

    def _while_decoding(self) -> bool:
        """Evict from generations that have outgrown their budget since somebody last looked; True when something was scored."""
        interval = self.config.decode_interval
        scored = False
        for request in self._running.values() if interval else ():
            due = request.prefilled and request.computed >= request.next_look and request.req.kv is not None
            if due and request.evicts_while_decoding and not self.evictions.waiting(request):
                request.next_look = request.computed + interval
                scored |= self._shrink(request, interval)
        return scored

    def _shrink(self, request: RunningRequest, interval: int) -> bool:
        """Check the generated tokens of a running request into the tree, then evict as after a prefill (architecture D4)."""
        req, rule = request.req, request.method.decode_rule or request.method.aggregator
        assert rule is not None
        started = time.perf_counter()
        n = request.computed
        forced = torch.zeros(n, dtype=torch.bool)
        forced[: request.prompt.length] = request.method.forced.mask(request.prompt)
        # What is younger than one look has met too few queries to be judged; half of what the budget leaves is enough for it.
        room = request.budget.keep_count(n, int(forced.sum()))
        forced[max(request.prompt.length, n - min(interval, room // 2)) :] = True
        if self.evictions.decide(request, req.last_node, forced, running=True) is None:
            return False
        self.cache.checkpoint(req, n)
        self.cache.add_owner(req.last_node, request.state.key)
        request.touch()
        # The tree may have known the generated text, as another session's.
        decision = self.evictions.decide(request, req.last_node, forced, running=True)
        if decision is None:
            return False
        keys = self._keys(req.last_node, request.whole)
        # As if the turn ended here, on a copy: its end folds all its queries in once.
        state = replace(request.state, memory=dict(request.state.memory))
        if request.turn is not None:
            rule.absorb(state, request.turn.captured(Span("assistant", request.prompt.generation_start, n)), keys, request.prompt)
        score = partial(rule.score, state, captured=(), keys=keys, prompt=request.prompt)
        self.evictions.select(request, req.last_node, decision, score, True, started)
        return True

    def _keys(self, node_id: int, whole: bool) -> KeyReader:
        """Keys of the path to ``node_id``: all ranks' heads if ``whole``, else this rank's."""
        slots = self.cache.path_slots(node_id)
        live = torch.nonzero(~self.cache.dead_mask(node_id)).flatten()
        return self._ranks.reader(PoolKeys(self._pages, slots, live, self._bank.layers, self._scaling), whole)

    # ---- Looking from outside ----

    def running(self) -> Iterator[Any]:
        """SGLang's requests that hold a row."""
        return (req for req in self._admitted.values() if req.kv is not None)

    def check_rows(self) -> None:
        """Invariants 1 to 3, rows included (debug; slow).

        Raises:
            IntegrityError: naming the terms that do not agree.
        """
        private = sum(r.kv.kv_allocated_len - r.cache_protected_len for r in self.running())
        self.cache.check_integrity(private)
        for req in self.running():
            row = self._rows.req_to_token[req.req_pool_idx, : req.cache_protected_len]
            self.cache.check_row(req.rid, row, req.last_node)

    def dead_spans(self, session: str) -> list[tuple[int, int]]:
        """Dead spans ``[start, end)`` of the session's longest path."""
        return self.cache.dead_spans(f"id:{session}")


def _options(req: Any) -> RequestOptions:
    """The request's options; they were validated when it arrived (see routes.validate_request)."""
    params = req.sampling_params.custom_params or {}
    raw = params.get(compat.BACKEND_NAME)
    return parse_request_options(raw) if raw is not None else RequestOptions()


def _computed_positions(batch: Any) -> list[tuple[int, int]]:
    """Logical positions ``[start, end)`` that each lane of ``batch`` computes."""
    if batch.forward_mode.is_decode():
        return [(length - 1, length) for length in batch.seq_lens_cpu.tolist()]
    return [(prefix, prefix + new) for prefix, new in zip(batch.prefix_lens, batch.extend_lens, strict=True)]
