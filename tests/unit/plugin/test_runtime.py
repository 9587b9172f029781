"""The plugin's runtime against SGLang's own requests, pools and cache: what dies, when, and what is left behind.

Oracle: scores recomputed densely in float64 from the made-up model's tables by the formulas of the methods; selection by a plain sort.
Every forward pass of the engine also compares its attention with the masked full cache, so a wrong dead count or a slot that is used
after it was freed shows in whichever test meets it.
"""

from __future__ import annotations

import math
import random
from itertools import chain, pairwise

import pytest
import torch
from hypothesis import Phase, given, note, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from intentkv.methods import method_info, method_names
from intentkv.templates import TEMPLATES
from intentkv_sglang import status
from intentkv_sglang.figures import KEY
from intentkv_sglang.radix_cache import IntegrityError

pytestmark = pytest.mark.unit

SCALING = 8**-0.5
DECAY = math.exp(-0.5)
HEADLESS = [name for name in method_names() if not method_info(name).needs_head]


class Chat:
    """Writes conversations as token ids and remembers where its messages lie."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._template = TEMPLATES["chatml"]
        self._random = random.Random(0)
        self.end = self.encode("<|im_end|>")

    def encode(self, text):
        return self._tokenizer.encode(text, add_special_tokens=False)

    def message(self, role, letters):
        """A message of ``letters`` content tokens and 5 of the template."""
        # Digits are single tokens and never merge.
        content = "".join(self._random.choices("0123456789", k=letters))
        return self.encode(self._template.render(role, content))

    def turn(self, *messages):
        """Token ids of new messages and the generation prompt behind them."""
        return [token for role, letters in messages for token in self.message(role, letters)] + self.generation

    @property
    def generation(self):
        return self.encode(self._template.generation_prompt())

    def answer(self, letters):
        """What the model generates: it closes its turn itself."""
        return self.message("user", letters)[-letters - 2 : -2] + self.end

    def newline(self):
        """What the template writes behind a closed turn."""
        return self.encode("\n")


@pytest.fixture
def chat(tokenizers):
    return Chat(tokenizers["chatml"])


@pytest.fixture
def tokenizer(tokenizers):
    return tokenizers["chatml"]


def dead_of(engine, ids):
    """Dead positions of the path of ``ids``."""
    return {p for p, dead in enumerate(engine.tree()[None, tuple(ids)].dead) if dead}


def figures(req):
    return req.customized_info[KEY].as_dict()


def losers(scores, candidates, keep):
    """Positions of ``candidates`` that go when the ``keep`` best-scored stay; of equals the earlier goes."""
    order = sorted(range(len(candidates)), key=lambda i: (float(scores[i]), candidates[i]))
    return {candidates[i] for i in order[: max(0, len(candidates) - keep)]}


class Formulas:
    """The methods' scores from the tables, all at once."""

    def __init__(self, engine, dense, ids):
        self._dense = dense
        self._q = engine.tables.read("q", ids)
        self._k = engine.tables.read("k", ids)

    def attention(self, queries, keys, causal=True):
        """[L, H_q, n_q, n] probabilities of the queries at positions ``queries`` over the keys at positions ``keys``."""
        at = (torch.tensor(queries), torch.tensor(keys)) if causal else ()
        return torch.stack([self._dense(q[queries], k[keys], SCALING, *at) for q, k in zip(self._q, self._k, strict=True)])

    def energy(self, queries, keys):
        return self.attention(queries, keys).square().mean(2).sum((0, 1))

    def mean_query(self, start, end):
        return self._q[:, start:end].double().mean(1)

    def memory_mass(self, memory, keys):
        return sum(self._dense(m[None], k[keys], SCALING).sum((0, 1)) for m, k in zip(memory, self._k, strict=True))


# ---- What dies ----


@pytest.mark.parametrize("chunk", [None, 7, 1])
@pytest.mark.parametrize("deferred", [False, True])
def test_snapkv_matches_its_formula(engine, tokenizer, chat, dense, chunk, deferred):
    """Chunked or not: the window's queries are captured wherever the chunks cut it."""
    engine.start_runtime(tokenizer, deferred, method="snapkv", budget=30, window=9, pool=3)
    system, user = chat.message("system", 4), chat.message("user", 8)
    old, newest = chat.message("user", 12), chat.message("user", 5) + chat.generation
    ids = system + user + chat.message("assistant", 6) + old + newest
    forced = {*range(len(system)), *range(len(ids) - len(newest), len(ids))}
    req = engine.request("r", ids, output=[5, 6, 7])
    engine.prefill(req, chunk=chunk)
    if deferred:
        assert dead_of(engine, ids) == set()
        engine.decode(req)
    everything = list(range(len(ids)))
    forced |= set(everything[-9:])
    mass = Formulas(engine, dense, ids).attention(everything[-9:], everything).sum((0, 1, 2))
    pooled = [max(mass[max(0, i - 1) : i + 2]) for i in everything]
    candidates = sorted(set(everything) - forced)
    expected = losers([pooled[p] for p in candidates], candidates, 30 - len(forced))
    assert len(expected) == len(ids) - 30
    assert dead_of(engine, ids) == expected
    engine.generate(req)
    assert figures(req)["dead_tokens"] == figures(req)["pruned_tokens"] == len(expected)


@pytest.mark.parametrize("chunk", [None, 6])
def test_query_memory_over_two_turns(engine, tokenizer, chat, dense, chunk):
    """One update a message, in order, over chunks and turns; a cached message updates nothing again."""
    engine.start_runtime(tokenizer, method="intentkv", budget=44)
    parts = [chat.message("system", 4), chat.message("user", 9), chat.message("tool", 11), chat.message("user", 6), chat.generation]
    first, answer = list(chain(*parts)), chat.answer(5)
    engine.run(engine.request("one", first, output=answer), chunk)
    tail = [chat.newline(), chat.message("tool", 10), chat.message("user", 7), chat.generation]
    second = [*first, *answer, *chain(*tail)]

    memory = torch.zeros(2, 4, 8, dtype=torch.float64)
    formulas = Formulas(engine, dense, second)

    def bounds(pieces, at):
        for piece in pieces:
            yield at, at + len(piece)
            at += len(piece)

    def update(memory, start, end):
        return torch.nn.functional.normalize(DECAY * memory + formulas.mean_query(start, end), dim=-1)

    (_, system_end), *spans, (newest, _), _ = bounds(parts, 0)
    for start, end in [*spans, (newest, len(first) - len(parts[-1]))]:
        memory = update(memory, start, end)
    candidates = list(range(system_end, newest))
    forced = len(first) - len(candidates)
    dead = losers(formulas.memory_mass(memory, candidates), candidates, 44 - forced)
    assert dead
    assert dead_of(engine, first + answer[:-1]) == dead

    engine.run(engine.request("two", second, output=[5]), chunk)
    _, tool, user, _ = bounds(tail, len(first) + len(answer))
    for start, end in (tool, user):
        memory = update(memory, start, end)
    candidates = sorted(set(range(system_end, user[0])) - dead)
    forced = system_end + len(second) - user[0]
    dead |= losers(formulas.memory_mass(memory, candidates), candidates, 44 - forced)
    assert dead_of(engine, second) == dead
    assert len(second) - len(dead) == 44


@pytest.mark.parametrize(("turn_queries", "sampled"), [(64, range(7)), (4, range(0, 7, 2)), (3, range(0, 7, 4))])
@pytest.mark.parametrize("deferred", [False, True])
def test_assistant_energy_over_two_turns(engine, tokenizer, chat, dense, turn_queries, sampled, deferred):
    """The generated turn's own queries, captured in decode, decide at the next turn; the window scores what they have not seen."""
    engine.start_runtime(tokenizer, deferred, method="assistant", budget=40, window=5, turn_queries=turn_queries)
    system, history, newest = chat.message("system", 4), chat.message("user", 14), chat.message("user", 7) + chat.generation
    first, answer = system + history + newest, chat.answer(7)
    engine.run(engine.request("one", first, output=answer))
    tail = [chat.newline(), chat.message("tool", 9), chat.message("user", 6) + chat.generation]
    second = [*first, *answer, *chain(*tail)]
    formulas = Formulas(engine, dense, second)

    # Turn one: nothing was generated yet, so the window decides.
    candidates = list(range(len(system), len(system) + len(history)))
    by_window = formulas.energy(list(range(len(first) - 5, len(first))), list(range(len(first))))
    dead = losers(by_window[candidates], candidates, 40 - len(system) - len(newest))
    assert dead
    # The turn: the KV of the last generated token is never computed.
    end = len(first) + len(answer) - 1
    assert dead_of(engine, second[:end]) == dead
    visible = sorted(set(range(end)) - dead)
    memory = dict(zip(visible, formulas.energy([len(first) + i for i in sampled], visible), strict=True))

    # Turn two.
    engine.run(engine.request("two", second, output=[5, 6]))
    user_start = len(second) - len(tail[-1])
    candidates = sorted(set(range(len(system), user_start)) - dead)
    live = sorted(set(range(len(second))) - dead)
    by_window = dict(zip(live, formulas.energy(live[-5:], live), strict=True))
    scores = [memory[p] if p < end else by_window[p] for p in candidates]
    dead |= losers(scores, candidates, 40 - len(system) - len(tail[-1]))
    assert dead_of(engine, second) == dead


@pytest.mark.parametrize(("turn_queries", "sampled"), [(64, range(13)), (3, range(2, 13, 5))])
@pytest.mark.parametrize("chunk", [None, 8])
def test_assistant_turn_sent_by_the_client(engine, tokenizer, chat, dense, turn_queries, sampled, chunk):
    """A history that this server did not generate: the assistant's queries, evenly spaced up to the last one, are captured in the prefill
    that computes them."""
    engine.start_runtime(tokenizer, method="assistant", budget=40, window=5, turn_queries=turn_queries)
    system, user, turn = chat.message("system", 4), chat.message("user", 10), chat.message("assistant", 8)
    newest = chat.message("user", 6) + chat.generation
    ids = system + user + turn + newest
    engine.run(engine.request("r", ids, output=[5]), chunk)
    start, end = len(system) + len(user), len(system) + len(user) + len(turn)
    candidates = list(range(len(system), end))
    energy = Formulas(engine, dense, ids).energy([start + i for i in sampled], list(range(end)))
    assert dead_of(engine, ids) == losers(energy[candidates], candidates, 40 - len(system) - len(newest))


def test_memory_of_replaced_tokens_is_not_used(engine, tokenizer, chat, dense):
    """A session that edits its history: what was remembered of the positions behind the edit belongs to tokens that are gone."""
    engine.start_runtime(tokenizer, method="assistant", budget=40, window=5)
    system = chat.message("system", 4)
    engine.run(engine.request("one", system + chat.turn(("user", 16), ("user", 6)), output=chat.answer(7), session_id="x"))
    history, newest = chat.message("user", 20), chat.message("user", 6) + chat.generation
    ids = system + history + newest
    req = engine.run(engine.request("two", ids, output=[5], session_id="x"))
    cached = req.customized_info[KEY].cached_tokens
    assert len(system) < cached < len(system) + 6
    everything = list(range(len(ids)))
    by_window = Formulas(engine, dense, ids).energy(everything[-5:], everything)
    candidates = everything[cached : len(system) + len(history)]
    # The header of the first message is shared by two paths of the one session; the turn's memory says nothing else of this prompt.
    memory = engine.runtime.sessions.get("id:x").memory["assistant_energy"]
    scores = [*memory[len(system) : cached], *by_window[candidates]]
    candidates = everything[len(system) : len(system) + len(history)]
    assert dead_of(engine, ids) == losers(scores, candidates, 40 - len(system) - len(newest))


# ---- How many die, and which never ----


def conversation(engine, tokenizer, chat, deferred=False, **options):
    """A prompt of 48 tokens: a system message of 9, 24 of history, the newest message and the generation prompt; its forced positions."""
    engine.start_runtime(tokenizer, deferred, **{"method": "streamingllm"} | options)
    system, history, newest = chat.message("system", 4), chat.message("user", 19), chat.message("user", 7) + chat.generation
    ids = system + history + newest
    # StreamingLLM's four sinks lie in the system prefix.
    return ids, {*range(len(system)), *range(len(ids) - len(newest), len(ids))}


@pytest.mark.parametrize("budget", [1, 15, 23, 24, 25, 30, 47, 48, 49, 500])
@pytest.mark.parametrize("output", [[5], [5, 6, 7]], ids=["finished-at-prefill", "decoded"])
def test_budget_is_exact(engine, tokenizer, chat, budget, output):
    """max(budget, forced) tokens stay, the newest ones; never a forced one goes, however small the budget."""
    ids, forced = conversation(engine, tokenizer, chat, budget=budget)
    assert (len(forced), len(ids)) == (24, 48)
    req = engine.run(engine.request("r", ids, output=output))
    free = max(0, budget - 24)
    history = sorted(set(range(len(ids))) - forced)
    dead = set(history[: max(0, len(history) - free)])
    assert dead_of(engine, ids + output[:-1]) == dead
    assert engine.runtime.counters.pruned_tokens == engine.runtime.counters.freed_slots == len(dead)
    assert engine.runtime.counters.prune_events == bool(dead)
    if dead:
        assert figures(req) | {"forced_tokens": 24, "target_tokens": max(24, budget), "pruned_tokens": len(dead)} == figures(req)
    assert engine.runtime.counters.declined["budget_below_forced_keep"] == (budget <= 24)


@pytest.mark.parametrize(("hysteresis", "fires"), [(0, True), (17, True), (18, False), (512, False)])
@pytest.mark.parametrize("per_request", [True, False])
def test_hysteresis(engine, tokenizer, chat, hysteresis, fires, per_request):
    """48 live tokens, a target of 30: an event once they are more than ``hysteresis`` over it; then down to the target, not to the edge."""
    ids, _ = conversation(engine, tokenizer, chat, budget=30, hysteresis=99 if per_request else hysteresis)
    options = {"hysteresis": hysteresis} if per_request else None
    engine.run(engine.request("r", ids, output=[5], options=options))
    assert len(dead_of(engine, ids)) == (18 if fires else 0)


@pytest.mark.parametrize(("options", "dead"), [
    ({"budget": 40}, 8),
    ({"budget_ratio": 0.25}, 18),
    ({"budget_ratio": 1.0}, 0),
    ({"method": "full"}, 0),
    ({"keep": [[9, 33]], "budget": 1}, 0),
    ({}, 18),
    (None, 18),
])  # fmt: skip
def test_options_of_a_request(engine, tokenizer, chat, options, dead):
    """They hold for the request that names them, not for the next one."""
    ids, _ = conversation(engine, tokenizer, chat, budget=30)
    engine.run(engine.request("r", ids, output=[5], options=options))
    assert len(dead_of(engine, ids)) == dead
    other = [i for i in ids if i != ids[12]]
    engine.run(engine.request("s", other, output=[5], extra_key="other"))
    assert sum(engine.tree()["other", tuple(other)].dead) == len(other) - 30


def test_ratio_of_the_server(engine, tokenizer, chat):
    """A budget in the request is stronger than the server's ratio."""
    ids, _ = conversation(engine, tokenizer, chat, budget_ratio=0.5)
    engine.run(engine.request("r", ids, output=[5], extra_key="a"))
    engine.run(engine.request("s", ids, output=[5], extra_key="b", options={"budget": 26}))
    assert [sum(engine.tree()[key, tuple(ids)].dead) for key in "ab"] == [12, 22]


@pytest.mark.parametrize("method", ["streamingllm", "random", "snapkv", "assistant", "intentkv"])
@pytest.mark.parametrize("deferred", [False, True])
def test_no_system_message_and_several_chunks(engine, tokenizer, chat, method, deferred):
    """Nothing is forced at the front, not even position 0 (but StreamingLLM's sinks), and the prompt took several passes: the attention of
    the decode steps and of the next turn's chunks behind it is the masked full cache's (checked in every pass)."""
    engine.start_runtime(tokenizer, deferred, method=method, budget_ratio=0.25, window=4)
    ids = chat.turn(("user", 30), ("assistant", 11), ("user", 5))
    answer = chat.answer(6)
    engine.run(engine.request("r", ids, output=answer), chunk=13)
    newest, sinks = 10 + 3, 4 if method == "streamingllm" else 0
    history = len(ids) - newest - sinks
    dead = dead_of(engine, [*ids, *answer[:-1]])
    assert len(dead) == history - round(0.25 * history)
    assert min(dead) >= sinks
    longer = [*ids, *answer, *chat.newline(), *chat.turn(("tool", 30), ("user", 5))]
    engine.run(engine.request("s", longer, output=answer), chunk=13)
    assert dead < dead_of(engine, [*longer, *answer[:-1]])


@pytest.mark.parametrize("keep", [[[12, 15]], [[12, 15], [20, 21]], [[40, 400]], [[14, 13 + 500]]])
def test_keep_spans(engine, tokenizer, chat, keep):
    """Protected positions stay and count as forced; a span may reach past the prompt."""
    ids, forced = conversation(engine, tokenizer, chat, budget=31)
    engine.run(engine.request("r", ids, output=[5], options={"keep": keep}))
    forced |= {p for start, end in keep for p in range(start, end) if p < len(ids)}
    history = sorted(set(range(len(ids))) - forced)
    dead = history[: max(0, len(history) - max(0, 31 - len(forced)))]
    assert dead_of(engine, ids) == set(dead)


@pytest.mark.parametrize(("hysteresis", "fires"), [(22, False), (21, True)])
def test_hysteresis_counts_live_tokens(engine, tokenizer, chat, hysteresis, fires):
    """What died before is not over the target any more."""
    ids, _ = conversation(engine, tokenizer, chat, budget=30)
    answer = chat.answer(2)
    engine.run(engine.request("r", ids, output=answer))
    longer = ids + answer + chat.newline() + chat.turn(("tool", 2), ("user", 3))
    # 30 stayed of 48; 3 generated, a newline, 7 and 8 of new messages, 3 of the generation prompt.
    assert len(longer) - len(dead_of(engine, ids + answer[:-1])) == 30 + 22
    engine.run(engine.request("s", longer, output=[5], options={"hysteresis": hysteresis}))
    assert engine.runtime.counters.prune_events == 1 + fires


def test_second_event_counts_from_what_is_live(engine, tokenizer, chat):
    """Dead positions cost nothing and do not die twice; the budget holds again after the next turn."""
    ids, _ = conversation(engine, tokenizer, chat, budget=40)
    answer = chat.answer(5)
    engine.run(engine.request("r", ids, output=answer))
    before = dead_of(engine, ids + answer[:-1])
    longer = ids + answer + chat.newline() + chat.turn(("user", 6))
    req = engine.run(engine.request("s", longer, output=[5]))
    dead = dead_of(engine, longer)
    assert before < dead
    assert len(longer) - len(dead) == 40
    counters = engine.runtime.counters
    assert (counters.prune_events, counters.pruned_tokens) == (2, len(dead))
    assert counters.prompt_tokens == len(ids) + len(longer)
    assert counters.cached_tokens == len(ids) + len(answer) - 1
    assert counters.live_cached_tokens == len(ids) + len(answer) - 1 - len(before)
    assert figures(req)["live_cached_tokens"] == counters.live_cached_tokens
    assert figures(req)["pruned_tokens"] == len(dead) - len(before)


def test_protecting_what_is_dead_costs_nothing(engine, tokenizer, chat):
    """Dead positions inside a protected span, or shared ones, do not use up the budget."""
    ids, _ = conversation(engine, tokenizer, chat, budget=30)
    engine.run(engine.request("r", ids, output=[5]))
    before = dead_of(engine, ids)
    longer = ids + chat.answer(3) + chat.newline() + chat.turn(("tool", 10), ("user", 7))
    engine.run(engine.request("s", longer, output=[5], options={"keep": [[min(before), max(before) + 1]], "budget": 36}))
    assert len(longer) - len(dead_of(engine, longer)) == 36


@pytest.mark.parametrize("names", [("snapkv", "assistant"), ("intentkv", "snapkv"), ("assistant", "intentkv"), ("full", "assistant")])
def test_method_may_change_between_turns(engine, tokenizer, chat, names):
    """What one method remembers must not break, or be read by, another."""
    engine.start_runtime(tokenizer, method="random", budget=40, window=8)
    ids = chat.turn(("system", 4), ("user", 12), ("assistant", 6), ("user", 6))
    for number, name in enumerate([*names, *names]):
        answer = chat.answer(6)
        engine.run(engine.request(f"r{number}", ids, output=answer, options={"method": name}))
        ids = ids + answer + chat.newline() + chat.turn(("tool", 8), ("user", 4))
    engine.run(engine.request("last", ids, output=[5], options={"method": names[1]}))
    assert len(ids) - len(dead_of(engine, ids)) == 40
    assert len(engine.runtime.sessions) == 1


@pytest.mark.parametrize("chunk", [None, 5])
def test_full_captures_nothing(engine, tokenizer, chat, chunk):
    """Invariant 6: no budget, no work. No query is copied, no row leased, no position dies."""
    engine.start_runtime(tokenizer, method="full", budget=1)
    ids = chat.turn(("system", 4), ("user", 20), ("assistant", 5), ("user", 6))
    req = engine.run(engine.request("r", ids, output=chat.answer(9)), chunk)
    engine.run(engine.request("s", ids + chat.turn(("user", 3)), output=[5]), chunk)
    assert all(p.tap is None and not any(lane.n_dead for lane in p.lanes) for p in engine.passes)
    assert not engine.bank.storage.any()
    assert figures(req)["dead_tokens"] == figures(req)["pruned_tokens"] == figures(req)["target_tokens"] == 0
    assert engine.runtime.counters.prune_events == 0
    assert not engine.runtime.counters.declined


def test_layer_stride(engine, tokenizer, chat, dense):
    """Every second layer only: its queries meet its own keys."""
    engine.start_runtime(tokenizer, method="snapkv", budget=30, window=9, pool=1, layer_stride=2)
    system, history, newest = chat.message("system", 4), chat.message("user", 20), chat.message("user", 6) + chat.generation
    ids = system + history + newest
    engine.run(engine.request("r", ids, output=[5]))
    candidates = list(range(len(system), len(system) + len(history)))
    everything = list(range(len(ids)))
    mass = Formulas(engine, dense, ids).attention(everything[-9:], everything)[0].sum((0, 1))
    assert dead_of(engine, ids) == losers(mass[candidates], candidates, 30 - len(system) - len(newest))


# ---- Requests that do not simply run to their end ----


@pytest.fixture
def busy(engine, tokenizer, chat):
    """An engine whose default method captures everything there is to capture, with a budget that every prompt exceeds."""
    engine.start_runtime(tokenizer, method="assistant", budget=30, window=6, query_rows=64)
    yield engine
    assert engine.bank.available == 64, "rows were not given back"
    assert not any(state.active for state in engine.runtime.sessions)
    assert not list(engine.runtime.running())


def test_retraction_and_readmission(busy, chat):
    """Situations #33783, #19881: the same turn of the same session goes on; nothing is counted twice, no row is lost."""
    ids = chat.turn(("system", 4), ("user", 12), ("user", 6))
    req = busy.request("r", ids, output=chat.answer(12))
    busy.prefill(req)
    dead = dead_of(busy, ids)
    assert dead
    assert busy.bank.available == 64, "the prompt's queries are not needed any more"
    for _ in range(4):
        busy.decode(req)
    assert busy.bank.available == 60
    key = req.customized_info[KEY].session_key
    busy.retract(req)
    assert busy.bank.available == 64
    busy.check()
    busy.prefill(req)
    assert req.customized_info[KEY].session_key == key
    assert dead <= dead_of(busy, [*ids, *req.output_ids[:-1]])
    busy.generate(req)
    counters = busy.runtime.counters
    assert (counters.prompt_tokens, counters.cached_tokens) == (len(ids), 0)
    (state,) = busy.runtime.sessions
    assert (state.key, state.turns) == (key, 1)
    assert figures(req)["dead_tokens"] == len(dead_of(busy, [*ids, *req.output_ids[:-1]]))
    # The next turn still is the session's next turn.
    busy.run(busy.request("s", [*ids, *req.output_ids, *chat.newline(), *chat.turn(("user", 5))], output=[5]))
    assert [(s.key, s.turns) for s in busy.runtime.sessions] == [(key, 2)]


def test_retraction_after_the_tree_was_evicted(busy, chat):
    """Everything is computed again, whole; then it is over budget again and pruned again."""
    ids = chat.turn(("system", 4), ("user", 12), ("user", 6))
    req = busy.request("r", ids, output=chat.answer(6))
    busy.prefill(req)
    busy.decode(req)
    busy.retract(req)
    busy.cache.evict(EvictParams(num_tokens=1000))
    assert busy.tree() == {}
    busy.prefill(req)
    busy.generate(req)
    assert figures(req)["pruned_tokens"] > figures(req)["dead_tokens"] > 0


@pytest.mark.parametrize("turn_queries", [64, 3])
@pytest.mark.parametrize(("method", "evicted"), [
    ("assistant", False), ("assistant", True), ("snapkv", False), ("snapkv", True), ("streamingllm", True), ("intentkv", False),
])  # fmt: skip
def test_a_retraction_does_not_change_what_dies(engine_class, tokenizer, chat, method, turn_queries, evicted):
    """Retraction is SGLang's affair: the tokens generated so far are not part of the prompt, so they are never evicted in their own turn,
    and the turn's queries count at the next turn as if it had run through; whether or not the prompt stayed in the cache."""
    first, answer = chat.turn(("system", 4), ("user", 12), ("user", 6)), chat.answer(9)
    second = [*first, *answer, *chat.newline(), *chat.turn(("tool", 8), ("user", 4))]
    dead = []
    for retracted in (False, True):
        engine = engine_class()
        engine.start_runtime(tokenizer, method=method, budget=30, window=6, turn_queries=turn_queries)
        req = engine.request("one", first, output=answer)
        engine.prefill(req)
        for _ in range(4):
            engine.decode(req)
        if retracted:
            engine.retract(req)
            if evicted:
                engine.cache.evict(EvictParams(num_tokens=1000))
            engine.prefill(req, chunk=20)
        engine.generate(req)
        after_one = dead_of(engine, [*first, *answer[:-1]])
        engine.run(engine.request("two", second, output=[5]))
        dead.append((after_one, dead_of(engine, second)))
        engine.check()
        assert engine.runtime.sessions.get("chain:0").turns == 2
    assert dead[0] == dead[1]
    assert max(dead[0][0]) < len(first)


def test_retraction_without_a_chat_template(engine):
    """The newest uncached part of a prompt stands in for its newest message: that of the first admission, also when all of it is cached by
    the time of the second."""
    engine.start_runtime(method="streamingllm", budget=8)
    engine.run(engine.request("one", range(30), output=[5]))
    ids = [*range(30), 5, *range(40, 55)]
    req = engine.request("two", ids, output=[6] * 8)
    engine.prefill(req)
    dead = dead_of(engine, ids)
    # The sinks and the 16 uncached tokens.
    assert dead == set(range(4, 30))
    engine.decode(req)
    engine.retract(req)
    engine.prefill(req)
    engine.generate(req)
    assert dead_of(engine, [*ids, *[6] * 7]) == dead


@pytest.mark.parametrize("chunks", [1, 2])
def test_abort_in_the_middle_of_the_prefill(busy, chat, chunks):
    """Situation #38319: pages are given back once, and the same prefix is served right afterwards."""
    ids = chat.turn(("system", 4), ("user", 12), ("user", 6))
    req = busy.request("r", ids)
    for _ in range(chunks):
        busy.extend(req, chunk=9)
    busy.abort(req)
    busy.check()
    assert busy.runtime.counters.prune_events == 0
    again = busy.run(busy.request("s", ids, output=[5, 6]))
    assert again.customized_info[KEY].cached_tokens == 9 * (chunks - 1)
    assert len(ids) - len(dead_of(busy, [*ids, 5])) == 30


@pytest.mark.parametrize("deferred", [False, True])
def test_decode_steps_in_a_prefill_pass(engine_class, tokenizer, deferred):
    """``--enable-mixed-chunk``: the decoding lane's query and dead count are its own, not those of the lanes before it."""
    dead = []
    for mixed in (False, True):
        other = engine_class()
        other.start_runtime(tokenizer, deferred, method="assistant", budget=30, window=5)
        talk = Chat(tokenizer)
        ids, answer = talk.turn(("system", 4), ("user", 12), ("user", 6)), talk.answer(8)
        req = other.request("r", ids, output=answer)
        other.prefill(req)
        late = other.request("late", talk.turn(("user", 30)), output=[5])
        while not req.finished():
            if mixed and not late.finished():
                assert other.admit(late, 9)
                other.extend_admitted(late, decoding=[req])
            else:
                other.decode(req)
        if not late.finished():
            other.prefill(late)
        longer = [*ids, *answer, *talk.newline(), *talk.turn(("tool", 9), ("user", 4))]
        other.run(other.request("s", longer, output=[5]))
        dead.append(dead_of(other, longer))
        other.check()
    assert dead[0] == dead[1]


def test_abort_while_decoding(busy, chat):
    ids = chat.turn(("system", 4), ("user", 12), ("user", 6))
    req = busy.request("r", ids, output=chat.answer(12))
    busy.prefill(req)
    busy.decode(req)
    busy.abort(req)
    busy.check()


def test_requests_of_one_batch_leave_the_shared_part_alone(busy, chat):
    """Neither was in the tree when the other started. Both count the stem as forced, both evict from their own parts only."""
    stem = chat.message("system", 4) + chat.message("user", 9)
    tails = [chat.message("user", 10) + chat.message("assistant", 3) + chat.turn(("user", 3)) for _ in range(2)]
    first, second = (busy.request(f"r{i}", stem + tail, output=chat.answer(3)) for i, tail in enumerate(tails))
    busy.prefill(first, second)
    common = next(i for i, (a, b) in enumerate(zip(*(stem + tail for tail in tails), strict=False)) if a != b)
    for tail in tails:
        dead = dead_of(busy, stem + tail)
        assert dead
        assert min(dead) >= common
        assert len(stem + tail) - len(dead) == max(30, common + 11)
    busy.generate(first, second)
    assert not any(busy.tree()[None, tuple((stem + tails[0])[:common])].dead)
    assert len(busy.runtime.sessions) == 2


def test_a_reader_protects_what_another_session_may_evict(busy, chat):
    """The second request arrives while the first is running on the same prompt: two locks, so the stem stays whole for both."""
    ids = chat.turn(("system", 4), ("user", 12), ("user", 4))
    first = busy.request("a", ids, output=chat.answer(8), options={"method": "full"}, session_id="x")
    busy.prefill(first)
    second = busy.request("b", ids + chat.turn(("user", 3)), output=chat.answer(3), session_id="x")
    busy.prefill(second)
    assert not any(busy.tree()[None, tuple(ids)].dead)
    busy.generate(first, second)


def test_full_bank_loses_queries_only(engine, tokenizer, chat):
    """Catches: an error, or a request that is not served, when more requests run than the bank has rows for."""
    engine.start_runtime(tokenizer, method="assistant", budget=30, window=6, query_rows=4)
    reqs = [engine.request(f"r{i}", chat.turn(("system", 4 + i), ("user", 12), ("user", 6)), output=chat.answer(6)) for i in range(3)]
    engine.prefill(*reqs)
    engine.generate(*reqs)
    assert engine.runtime.counters.declined["query_rows"] > 0
    assert engine.runtime.counters.prune_events == 3
    assert engine.bank.available == 4


def test_flush_forgets_everything(busy, chat):
    ids = chat.turn(("system", 4), ("user", 12), ("user", 6))
    busy.run(busy.request("r", ids, output=chat.answer(6)))
    busy.flush()
    assert len(busy.runtime.sessions) == 0
    assert busy.run(busy.request("s", ids, output=[5])).customized_info[KEY].cached_tokens == 0


def test_health_checks_leave_no_trace(busy, chat):
    """SGLang sends them all the time; they hold rows, but are no sessions and are never pruned."""
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

    check = busy.request(f"{HEALTH_CHECK_RID_PREFIX}_1", chat.turn(("system", 4), ("user", 30), ("user", 6)), output=[5, 6])
    busy.prefill(check)
    assert list(busy.runtime.running()) == [check]
    busy.runtime.check_rows()
    busy.generate(check)
    assert len(busy.runtime.sessions) == 0
    assert busy.runtime.counters.prompt_tokens == 0
    assert check.customized_info is None


def test_explicit_session(busy, chat):
    """Named by the client: its state and its dead spans are found under that name, whatever path it takes."""
    ids = chat.turn(("system", 4), ("user", 12), ("user", 6))
    req = busy.run(busy.request("r", ids, output=[5], session_id="agent"))
    dead = dead_of(busy, ids)
    spans = busy.runtime.dead_spans("agent")
    assert {p for start, end in spans for p in range(start, end)} == dead
    assert all(end < start for (_, end), (start, _) in pairwise(spans)), "spans that touch are one"
    assert busy.runtime.dead_spans("stranger") == []
    assert req.customized_info[KEY].session_key == "id:agent"


def test_deferred_eviction_spares_what_became_shared(engine, tokenizer, chat):
    """On a GPU an eviction is committed a pass after it was scored: whoever joined in between keeps the path whole (decision D6)."""
    ids, _ = conversation(engine, tokenizer, chat, deferred=True, budget=30)
    first = engine.request("a", ids, output=[5] * 8)
    engine.prefill(first)
    second = engine.request("b", [*ids, *chat.turn(("user", 3))], output=[5] * 8, options={"method": "full"})
    engine.prefill(second)
    assert dead_of(engine, ids) == set()
    assert engine.runtime.counters.prune_events == 0
    engine.generate(first, second)
    assert dead_of(engine, ids) == set()


@pytest.mark.parametrize("leave", ["finish", "retract", "retract and wait", "abort"])
def test_deferred_eviction_of_a_request_that_left(engine, tokenizer, chat, leave):
    """Its eviction is under way: after its end the path is still its own, after a retraction it is scored anew."""
    ids, _ = conversation(engine, tokenizer, chat, deferred=True, budget=30)
    req = engine.request("a", ids, output=[5, 6] if leave == "finish" else [5] * 8)
    engine.prefill(req)
    if leave == "finish":
        engine.decode(req)
        assert req.finished()
    elif leave == "abort":
        engine.abort(req)
    else:
        engine.retract(req)
        if leave == "retract and wait":
            engine.run(engine.request("other", chat.turn(("user", 3)), output=[5]))
        engine.check()
        assert dead_of(engine, ids) == set()
        engine.prefill(req)
        engine.generate(req)
    engine.check()
    assert len(dead_of(engine, [*ids, *req.output_ids[:-1]])) == 18


def test_deferred_eviction_of_an_evicted_path(engine, tokenizer, chat):
    ids, _ = conversation(engine, tokenizer, chat, deferred=True, budget=30)
    req = engine.request("a", ids, output=[5] * 8)
    engine.prefill(req)
    engine.running.remove(req)
    from sglang.srt.mem_cache.common import release_kv_cache

    release_kv_cache(req, engine.cache)
    engine.cache.evict(EvictParams(num_tokens=1000))
    engine.runtime.end_pass()
    assert engine.runtime.counters.prune_events == 0


# ---- What it says ----


@pytest.mark.parametrize(("deferred", "passes"), [(False, 1), (False, 2), (False, 4), (True, 2), (True, 3)])
def test_what_the_client_is_told(engine, tokenizer, chat, deferred, passes):
    """The response is on its way when the last result is handled, so an eviction that comes only then is in no response: that of a request
    of one token, or of two where evictions are deferred. All others are told exactly."""
    ids, _ = conversation(engine, tokenizer, chat, deferred, budget=30)
    engine.run(engine.request("r", ids, output=[5] * passes))
    (told,) = engine.responses["r"]
    assert len(dead_of(engine, [*ids, *[5] * (passes - 1)])) == engine.runtime.counters.pruned_tokens == 18
    dead = 18 if passes > 1 + deferred else 0
    assert told == {
        "logical_tokens": 48 + passes,
        "live_tokens": 48 + passes - dead,
        "dead_tokens": dead,
        "pruned_tokens": dead,
        "forced_tokens": 24 if dead else 0,
        "target_tokens": 30 if dead else 0,
        "live_cached_tokens": 0,
        "peak_live_tokens": 48 + (deferred if dead else passes),
    }


def test_status_adds_up(busy, chat):
    """In flight and at rest: the pool's terms are the pool."""

    def pool_of(answer):
        pool = answer["pool"]
        assert pool["available"] + pool["evictable"] + pool["protected"] + pool["private"] == pool["total"]
        return pool

    ids = chat.turn(("system", 4), ("user", 12), ("user", 6))
    req = busy.request("r", ids, output=chat.answer(4), session_id="x")
    busy.extend(req, chunk=9)
    assert pool_of(status.status(busy.runtime))["private"] == 9
    busy.prefill(req)
    busy.decode(req)
    assert pool_of(status.status(busy.runtime))["private"] == 1
    busy.generate(req)
    busy.run(busy.request("s", chat.turn(("user", 3)), output=[5]))
    answer = status.status(busy.runtime)
    dead = len(dead_of(busy, [*ids, *req.output_ids[:-1]]))
    assert pool_of(answer) | {"private": 0, "protected": 0, "dead": dead} == answer["pool"]
    assert answer["counters"]["pruned_tokens"] == dead
    assert answer["sessions"]["count"] == len(answer["sessions"]["items"]) == 2
    assert answer["method"] == "assistant"
    (item,) = status.status(busy.runtime, session="x")["sessions"]["items"]
    logical = len(ids) + len(req.output_ids)
    spans = item.pop("dead_spans")
    assert sum(end - start for start, end in spans) == dead
    assert item == {"key": "id:x", "turns": 1, "logical_tokens": logical, "live_tokens": logical - dead, "pruned_tokens": dead}
    assert status.status(busy.runtime, session="nobody")["sessions"]["items"] == []


def test_debug_mode_notices_a_broken_row(engine, tokenizer, chat):
    """The check after every change that ``debug`` promises."""
    ids, _ = conversation(engine, tokenizer, chat, budget=30)
    req = engine.request("a", ids, output=[5, 6, 7])
    engine.prefill(req)
    row = engine.rows.req_to_token[req.req_pool_idx]
    kept = int(row[1])
    row[1] = int(row[0])
    with pytest.raises(IntegrityError, match="request a: row and tree differ"):
        engine.runtime.check_rows()
    row[1] = kept
    engine.generate(req)


# ---- All of it in any order ----


class Agents:
    """A random sequence of everything that agents, the scheduler and a tight pool do to the runtime."""

    def __init__(self, engine_class, chat, tokenizer, seed):
        self.random = random.Random(seed)
        self.chat = chat
        self.engine = engine_class(slots=self.random.randint(90, 220), rows=4)
        self.rows = self.pick([6, 200])
        self.runtime = self.engine.start_runtime(
            self.pick([tokenizer, tokenizer, None]),
            deferred=self.random.random() < 0.5,
            method=self.pick(m for m in HEADLESS if m != "full"),
            budget=self.random.randint(10, 50),
            hysteresis=self.pick([0, 0, 10]),
            window=self.random.randint(1, 8),
            turn_queries=self.random.randint(1, 5),
            max_sessions=self.pick([1, 3, 100]),
            decode_interval=self.pick([0, 1, 3]),
            query_rows=self.rows,
        )
        self.histories = [chat.message("system", 3)]
        self.retracted = []
        self.count = 0

    def pick(self, things):
        return self.random.choice(list(things))

    def running(self, mid_prefill):
        return [r for r in self.engine.running if self.engine.mid_prefill(r) == mid_prefill]

    def step(self):
        """One possible action."""
        actions = {self.evict: 0.5}
        if self.engine.rows.available_size():
            actions[self.request_arrives] = 4
            if self.retracted:
                actions[self.readmit] = 3
        if self.running(mid_prefill=True):
            actions[self.next_chunk] = 5
        if self.running(mid_prefill=False):
            actions |= {self.decode: 8, self.retract: 0.7}
        if self.engine.running:
            actions[self.abort] = 0.5
        else:
            actions[self.flush] = 0.1
        (action,) = self.random.choices(list(actions), weights=list(actions.values()))
        note(action.__name__)
        action()

    def request_arrives(self):
        history = self.pick(self.histories[-4:] + self.histories[:1])
        cut = self.pick([len(history)] * 4 + [len(history) // 2])
        roles = self.random.choices(["user", "tool", "assistant"], k=self.random.randint(1, 3))
        ids = history[:cut] + self.chat.turn(*[(role, self.random.randint(1, 12)) for role in roles])
        if len(ids) > 150:
            ids = ids[-40:]
        options = self.pick([None, None, {}, {"budget": 25}, {"budget_ratio": 0.3, "hysteresis": 0}, {"keep": [[5, 20]]}])
        if self.random.random() < 0.3:
            options = {"method": self.pick(HEADLESS)} | (options or {})
        self.count += 1
        output = self.chat.answer(self.random.randint(1, 9))
        self.histories.append([*ids, *output, *self.chat.newline()])
        self.start(self.engine.request(f"r{self.count}", ids, output, self.pick([None, None, None, "x", "y"]), options))

    def start(self, req):
        decoding = self.pick([[], self.running(mid_prefill=False)])
        room = self.engine.allocator.available_size() + self.engine.cache.evictable_size()
        if self.engine.admit(req, self.pick([None, 8])):
            fits = req.extend_range.length + len(decoding) <= room - len(req.prefix_indices)
            self.engine.extend_admitted(req, decoding=decoding if fits else [])

    def readmit(self):
        self.start(self.retracted.pop())

    def next_chunk(self):
        req = self.pick(self.running(mid_prefill=True))
        if self.engine.admit(req, 8):
            self.engine.extend_admitted(req)
        else:
            self.engine.abort(req)

    def decode(self):
        reqs = self.running(mid_prefill=False)
        if self.engine.allocator.available_size() + self.engine.cache.evictable_size() >= len(reqs):
            self.engine.decode(*reqs)

    def abort(self):
        self.engine.abort(self.pick(self.engine.running))

    def retract(self):
        req = self.pick(self.running(mid_prefill=False))
        self.engine.retract(req)
        self.retracted.append(req)

    def evict(self):
        self.engine.cache.evict(EvictParams(num_tokens=self.random.randint(1, 60)))

    def flush(self):
        self.engine.flush()

    def check(self):
        self.engine.check()
        assert list(self.runtime.running()) == self.engine.running
        for req in self.engine.running:
            row = self.engine.rows.req_to_token[req.req_pool_idx, : req.cache_protected_len]
            assert torch.equal(req.prefix_indices[: len(row)], row.long()), "SGLang would write the stale copy to the row again"
        counters = self.runtime.counters
        assert counters.live_cached_tokens <= counters.cached_tokens <= counters.prompt_tokens
        assert counters.freed_slots == counters.pruned_tokens
        for state in self.runtime.sessions:
            assert state.active <= {r.rid for r in self.engine.running}

    def finish(self):
        for req in list(self.engine.running):
            self.engine.abort(req)
        assert self.engine.bank.available == self.rows
        assert not any(state.active for state in self.runtime.sessions)
        self.engine.cache.evict(EvictParams(num_tokens=1000))
        assert self.engine.allocator.available_size() == self.engine.allocator.size


def test_soak(engine_class, tokenizer, chat):
    """Agents, chunks, retractions, aborts, eviction pressure and flushes in any order, evictions at once or deferred: every invariant after
    every step, attention equal to the masked full cache in every pass, and everything given back at the end."""
    events = []

    @settings(deadline=None, max_examples=25, phases=[Phase.explicit, Phase.reuse, Phase.generate])
    @given(seed=st.integers(0, 2**32))
    def run(seed):
        agents = Agents(engine_class, chat, tokenizer, seed)
        for _ in range(80):
            agents.step()
            agents.check()
        agents.finish()
        events.append(agents.runtime.counters.prune_events)

    run()
    assert sum(events) > len(events), "the programs tested nothing"
