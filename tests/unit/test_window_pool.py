"""SnapKV's pooled window mass. Oracle: SnapKV's formula (softmax, sum over the window, max-pool) derived again, dense, with plain loops.

kvpress, which implements SnapKV, is no oracle here: it needs transformers < 5.3, the server needs a newer one; and it pools by average.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from intentkv.aggregators.window_pool import WindowPool
from intentkv.queries.window import observation_window
from intentkv.sessions import SessionState
from intentkv.spans import Prompt, Span

pytestmark = pytest.mark.unit


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 60),
    size=st.integers(1, 40),
    pool=st.sampled_from([1, 3, 7]),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_pooled_mass(fake_request, dense, length, size, pool, seed, data):
    """Any history, also one that overlaps the window, on a prompt with evicted positions.

    Catches: the window attending to keys behind its queries, pooling shifted by one, a border that wraps or pads with values.
    """
    dead = data.draw(st.sets(st.integers(0, length - 1), max_size=length - 1))
    request = fake_request(length, seed=seed, dead=dead)
    prompt = Prompt(length, (Span("user", 0, length),), length, True)
    live = [p for p in range(length) if p not in dead]
    history = torch.tensor(data.draw(st.lists(st.sampled_from(live), min_size=1, unique=True).map(sorted)))
    window = torch.arange(max(0, length - size), length)
    mass = torch.zeros(len(live), dtype=torch.float64)
    for layer in range(2):
        keys, queries = request.all_keys[layer, live], request.all_queries[layer, window]
        mass += dense(queries, keys, request.scaling, window, torch.tensor(live)).sum((0, 1))
    reach = pool // 2
    pooled = {p: max(mass.tolist()[max(0, i - reach) : i + reach + 1]) for i, p in enumerate(live)}
    captured = [request.capture(observation_window(prompt, size))]
    scores = WindowPool(pool).score(SessionState("s"), history, captured, request, prompt)
    expected = torch.tensor([pooled[p] for p in history.tolist()], dtype=torch.float64)
    torch.testing.assert_close(scores.double(), expected, rtol=1e-4, atol=1e-6)


def test_no_memory_between_turns(fake_request):
    request, state = fake_request(10), SessionState("s")
    WindowPool(3).absorb(state, request.turn(2, 8), request, Prompt(10, (), 10, False))
    assert not state.memory
