"""Evictions from a generation that outgrows its budget while it runs (architecture D4).

The engine compares every pass with masked dense attention and its own ledgers with the raw tree, so each test also catches a row that
names a freed slot, a lock or a slot lost by the checkpoint, and a pass that sees a stale row.
"""

from __future__ import annotations

import pytest
import torch

from intentkv.head import HeadConfig, ModelShape, ResidualHead, save_head
from intentkv_sglang.figures import KEY

from .conftest import DIM, KV_HEADS, LAYERS, Q_HEADS
from .test_runtime import Formulas, dead_of, figures, losers

pytestmark = pytest.mark.unit


@pytest.fixture
def chat(tokenizers):
    from .test_runtime import Chat

    return Chat(tokenizers["chatml"])


@pytest.fixture
def tokenizer(tokenizers):
    return tokenizers["chatml"]


@pytest.fixture
def head_of(tmp_path):
    """Options of a server with ``method``: a learned one gets a head that turns its rule's order over."""

    def options(method):
        rule, learned, _ = method.partition("-learned")
        if not learned:
            return {"method": method}
        shape = ModelShape(model_type="llama", layers=len(LAYERS), query_heads=Q_HEADS, kv_heads=KV_HEADS, head_dim=DIM)
        head = ResidualHead(HeadConfig(rule=rule, residual="additive", shape=shape))
        with torch.no_grad():  # s = rule - 1000 gelu(rule + 1)
            head.hidden.weight.zero_()
            head.hidden.weight[0, 3 * DIM] = 1
            head.hidden.bias.fill_(1)
            head.output.weight[0, 0] = -1000
        save_head(head, tmp_path / "head")
        return {"method": method, "head": tmp_path / "head"}

    return options


def opening(chat):
    """A prompt of 33 tokens: system message of 9, one user message and the generation prompt, all of them always kept."""
    return chat.message("system", 4), chat.message("user", 16) + chat.generation


def whole(chat):
    system, newest = opening(chat)
    return system + newest


def generate(engine, req, steps):
    for _ in range(steps):
        engine.decode(req)
        engine.check()


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("method", ["streamingllm", "random", "intentkv", "assistant", "intentkv-learned", "assistant-learned"])
def test_a_long_generation_stays_near_its_budget(engine, tokenizer, chat, head_of, method, deferred):
    """Catches: generated tokens that are never evicted, the prompt's forced part or the newest tokens gone, an unbounded cadence."""
    budget, interval = 60, 8
    engine.start_runtime(tokenizer, deferred, **head_of(method), budget=budget, decode_interval=interval)
    prompt = whole(chat)
    output = [7 + i for i in range(120)]
    req = engine.request("r", prompt, output=output, session_id="s")
    engine.prefill(req)
    peak = 0
    while not req.finished():
        engine.decode(req)
        engine.check()
        peak = max(peak, figures(req)["live_tokens"])
    dead = dead_of(engine, [*prompt, *output[:-1]])
    assert min(dead) >= len(prompt), "the prompt is all forced here"
    # over by what one interval generates, and the pass an eviction may be late
    assert budget < peak <= budget + interval + 2
    assert 5 <= engine.runtime.counters.prune_events <= len(output) // interval
    kept_for_being_new = min(interval, (budget - len(prompt)) // 2)
    assert not dead & set(range(len(prompt) + len(output) - 1 - kept_for_being_new, len(prompt) + len(output)))
    assert req.customized_info[KEY].pruned_tokens == len(dead)
    # the next turn hits everything, dead or not
    assert engine.match_length([*prompt, *output, 3]) == len(prompt) + len(output) - 1


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("method", ["assistant", "assistant-learned"])
def test_the_running_turn_decides(engine, tokenizer, chat, dense, head_of, method, deferred):
    """The queries of the turn so far score everything they saw, history and own text; when the turn ends they are folded in once.
    A head has no part in it.

    Catches: a partial turn that decays the memory or is counted again at the end, a query of the pass under way that nobody computed yet.
    """
    budget, interval = 40, 10
    engine.start_runtime(tokenizer, deferred, **head_of(method), budget=budget, decode_interval=interval, window=5)
    system, newest = opening(chat)
    prompt = system + newest
    output = [7 + i for i in range(24)]
    req = engine.request("r", prompt, output=output, session_id="s")
    engine.prefill(req)
    known = len(prompt) + interval
    formulas = Formulas(engine, dense, [*prompt, *output])
    # first look: 10 generated tokens computed
    generate(engine, req, interval + deferred)
    live = list(range(known))
    own = list(range(len(prompt), known))
    room = budget - len(prompt)
    candidates = own[: len(own) - min(interval, room // 2)]
    energy = formulas.energy(own, live)
    dead = losers(energy[candidates], candidates, room - (len(own) - len(candidates)))
    assert dead
    done = [*prompt, *req.output_ids]
    assert dead_of(engine, done[:known]) == dead
    generate(engine, req, len(output) - len(req.output_ids))
    end = len(prompt) + len(output) - 1
    all_dead = dead_of(engine, [*prompt, *output[:-1]])
    visible = sorted(set(range(end)) - all_dead)
    memory = engine.runtime.sessions.get("id:s").memory["assistant_energy"]
    expected = formulas.energy(list(range(len(prompt), end)), visible)
    assert memory[visible].double().sub(expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    "options", [{"method": "snapkv"}, {"method": "full"}, {"method": "streamingllm", "decode_interval": 0}, {"method": "streamingllm"}]
)
def test_who_does_not(engine, tokenizer, chat, options):
    """SnapKV evicts after a prefill only, as published; ``full`` never; 0 turns it off; and nothing is due before the first interval."""
    engine.start_runtime(tokenizer, **{"budget": 40, "decode_interval": 100} | options)
    prompt, output = whole(chat), [7] * 60
    engine.run(engine.request("r", prompt, output=output))
    assert dead_of(engine, [*prompt, *output[:-1]]) == set()


@pytest.mark.parametrize("deferred", [False, True])
def test_retracted_after_it(engine, tokenizer, chat, deferred):
    """Catches: a checkpoint that leaves a lock or slots behind, a pruned chain that the same request cannot continue."""
    engine.start_runtime(tokenizer, deferred, method="streamingllm", budget=40, decode_interval=5)
    prompt, output = whole(chat), [7 + i for i in range(40)]
    req = engine.request("r", prompt, output=output)
    engine.prefill(req)
    generate(engine, req, 20)
    assert figures(req)["pruned_tokens"] > 0
    engine.retract(req)
    engine.check()
    before = dead_of(engine, [*prompt, *req.output_ids[:-1]])
    assert before
    engine.prefill(req)
    engine.check()
    generate(engine, req, 40 - len(req.output_ids))
    assert req.finished()
    assert before < dead_of(engine, [*prompt, *output[:-1]])


def test_text_that_another_session_generated_stays_whole(engine, tokenizer, chat):
    """Two sessions with equal prompts and answers: the second finds its text in the tree and must not evict it (decision D6)."""
    engine.start_runtime(tokenizer, method="streamingllm", budget=40, decode_interval=5)
    prompt, output = whole(chat), [7 + i for i in range(30)]
    engine.run(engine.request("a", prompt, output=output, session_id="a", options={"method": "full"}))
    engine.run(engine.request("b", prompt, output=output, session_id="b"))
    engine.check()
    assert dead_of(engine, [*prompt, *output[:-1]]) == set()


def test_bank_without_rows(engine, tokenizer, chat):
    """No query of the turn was kept: its newest positions stay. Catches: a score of positions that no query has seen."""
    engine.start_runtime(tokenizer, method="assistant", budget=60, decode_interval=8, query_rows=1, window=1)
    hog = engine.request("hog", chat.turn(("user", 2)), output=[5] * 200)
    engine.prefill(hog)
    engine.decode(hog)
    prompt, output = whole(chat), [7 + i for i in range(60)]
    engine.run(engine.request("r", prompt, output=output))
    dead = dead_of(engine, [*prompt, *output[:-1]])
    assert dead == set(range(len(prompt), len(prompt) + len(dead)))
    engine.abort(hog)
