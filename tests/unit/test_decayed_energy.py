"""The assistant's energy memory. Oracle: s <- e^-lambda s + sum over layers and heads of mean_i alpha^2, dense, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from intentkv.aggregators.decayed_energy import DecayedEnergy
from intentkv.protocols import CaptureRequest
from intentkv.queries.window import observation_window
from intentkv.sessions import SessionState
from intentkv.spans import Prompt, Span

pytestmark = pytest.mark.unit

SYSTEM = Span("system", 0, 4)


def prompt_of(length):
    return Prompt(length, (SYSTEM, Span("user", 4, length)), length, True)


def energy(request, dense, queries, visible):
    """[length] float64: energy of the queries at positions ``queries`` over the positions ``visible``."""
    total = torch.zeros(request.length, dtype=torch.float64)
    for layer in range(len(request.layers)):
        alpha = dense(request.all_queries[layer, queries], request.all_keys[layer, visible], request.scaling, queries, visible)
        total[visible] += alpha.square().mean(1).sum(0)
    return total


@settings(max_examples=30, deadline=None)
@given(
    turns=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 20)), min_size=1, max_size=4),
    decay=st.floats(0, 3),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_memory_over_turns_with_evictions(fake_request, dense, turns, decay, seed, data):
    """Turns of (other text, assistant text), positions evicted in between.

    Catches: decay once too often, non-causal attention, a softmax over less than what the query sees, scores lost or read for evicted
    positions, new positions that inherit something.
    """
    length = 4 + sum(a + b for a, b in turns)
    request = fake_request(length, seed=seed)
    aggregator, state = DecayedEnergy(decay), SessionState("s")
    expected = torch.zeros(length, dtype=torch.float64)
    end = 4
    for other, own in turns:
        start, end = end + other, end + other + own
        request.dead |= set(data.draw(st.lists(st.integers(4, start - 1), max_size=4)))
        live = request.live[request.live < end]
        aggregator.absorb(state, request.turn(start, end), request, prompt_of(start))
        expected = math.exp(-decay) * expected + energy(request, dense, torch.arange(start, end), live)
        assert state.scored_length == end
    history = request.live[(request.live >= 4) & (request.live < end)]
    scores = aggregator.score(state, history, [], request, prompt_of(end))
    torch.testing.assert_close(scores.double(), expected[history], rtol=1e-4, atol=1e-6)


def test_positions_behind_the_last_turn_are_scored_by_the_window(fake_request, dense):
    """History reaches into the window itself. Catches: non-causal window attention, the window's scores given to remembered positions."""
    request = fake_request(40)
    prompt = prompt_of(40)
    aggregator, state = DecayedEnergy(0.5), SessionState("s")
    aggregator.absorb(state, request.turn(10, 16), request, prompt)
    window = request.capture(observation_window(prompt, 8))
    history = torch.arange(4, 36)
    scores = aggregator.score(state, history, [request.turn(10, 16), window], request, prompt)
    remembered = energy(request, dense, torch.arange(10, 16), torch.arange(16))
    seen_by_window = energy(request, dense, torch.arange(32, 40), torch.arange(40))
    expected = torch.cat([remembered[4:16], seen_by_window[16:36]])
    torch.testing.assert_close(scores.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("role", ["user", "tool", "unknown"])
def test_other_roles_leave_the_memory_alone(fake_request, role):
    request, state = fake_request(20), SessionState("s")
    DecayedEnergy(0.5).absorb(state, request.capture(CaptureRequest(Span(role, 8, 12), "raw")), request, prompt_of(20))
    assert not state.memory
    assert state.scored_length == 0


def test_a_cached_turn_does_not_decay_the_memory(fake_request):
    """A turn whose queries nobody computed. Catches: forgetting on every repeat of a prompt."""
    request, state, aggregator = fake_request(20), SessionState("s"), DecayedEnergy(0.5)
    aggregator.absorb(state, request.turn(8, 12), request, prompt_of(20))
    before = state.memory["assistant_energy"].clone()
    aggregator.absorb(state, request.no_queries(CaptureRequest(Span("assistant", 12, 16), "raw")), request, prompt_of(20))
    assert torch.equal(state.memory["assistant_energy"], before)
    assert state.scored_length == 12


def test_a_fork_remembers_what_is_shared(fake_request):
    """Catches: a branch scored by what the other branch attended to, or scores of tokens that the branch replaced."""
    request, state, aggregator = fake_request(30), SessionState("s"), DecayedEnergy(0.5)
    aggregator.absorb(state, request.turn(12, 20), request, prompt_of(20))
    branch = state.fork("t", 15)
    aggregator.absorb(state, request.turn(24, 30), request, prompt_of(30))
    history = torch.arange(4, 20)
    scores = aggregator.score(branch, history, [], request, prompt_of(20))
    fresh = SessionState("u")
    aggregator.absorb(fresh, request.turn(12, 20), request, prompt_of(20))
    assert torch.equal(scores[:11], aggregator.score(fresh, history, [], request, prompt_of(20))[:11])
    assert scores[11:].tolist() == [0.0] * 5
