"""QueryMemory and the IntentKV rule. Oracle: the paper's formulas by hand in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from intentkv.aggregators.query_memory import QueryMemoryRule, update_query_memory
from intentkv.protocols import CaptureRequest
from intentkv.sessions import SessionState
from intentkv.spans import Prompt, Span

pytestmark = pytest.mark.unit

PROMPT = Prompt(20, (Span("system", 0, 4), Span("user", 4, 10), Span("tool", 10, 18)), 18, True)


def by_hand(encodings, decay):
    memory = torch.zeros_like(encodings[0].double())
    for encoding in encodings:
        memory = math.exp(-decay) * memory + encoding.double()
        memory = memory / memory.square().sum(-1, keepdim=True).sqrt()
    return memory


@settings(max_examples=40, deadline=None)
@given(turns=st.integers(1, 6), decay=st.floats(0, 4), seed=st.integers(0, 2**16))
def test_memory_of_several_turns(turns, decay, seed):
    """Catches: decay on the new query instead of the old memory, normalisation only at the end or over heads."""
    generator = torch.Generator().manual_seed(seed)
    encodings = [3 * torch.randn(2, 4, 8, generator=generator) for _ in range(turns)]
    memory = None
    for encoding in encodings:
        memory = update_query_memory(memory, encoding, decay)
        torch.testing.assert_close(memory.norm(dim=-1), torch.ones(2, 4))
    torch.testing.assert_close(memory.double(), by_hand(encodings, decay), rtol=1e-4, atol=1e-5)


def test_a_head_without_any_query_stays_zero():
    """Catches: NaN from dividing by a zero norm, which would poison every later turn."""
    assert update_query_memory(None, torch.zeros(1, 1, 4), 0.5).tolist() == [[[0, 0, 0, 0]]]


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_rule_is_the_mass_of_the_memory_over_the_history(fake_request, dense, decay):
    """Catches: softmax over all positions instead of the history, layer ids used as indices, a memory of the wrong spans."""
    request = fake_request(20)
    rule, state = QueryMemoryRule(decay), SessionState("s")
    spans = [(4, 10), (10, 18)]
    for start, end in spans:
        rule.absorb(state, request.capture(CaptureRequest(Span("user", start, end), "mean")), request, PROMPT)
    history = torch.tensor([4, 5, 7, 9])
    scores = rule.score(state, history, [], request, PROMPT)
    memory = by_hand([request.all_queries[:, a:b].double().mean(1) for a, b in spans], decay)
    expected = sum(dense(memory[i][None], request.all_keys[i, history], request.scaling).sum((0, 1)) for i in range(2))
    torch.testing.assert_close(scores.double(), expected, rtol=1e-4, atol=1e-6)


def test_only_means_update_the_memory(fake_request):
    """Catches: single queries of other sources folded in as if they were the span's mean."""
    request = fake_request(20)
    rule, state = QueryMemoryRule(0.5), SessionState("s")
    rule.absorb(state, request.turn(4, 10), request, PROMPT)
    assert not state.memory
    assert rule.score(state, torch.arange(4, 10), [], request, PROMPT).tolist() == [0.0] * 6
