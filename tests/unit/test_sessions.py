"""Session states. Oracle: a plain list ordered by last use."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from intentkv.sessions import SessionState, SessionStore

pytestmark = pytest.mark.unit

KEYS = "abcdef"
operations = st.lists(st.tuples(st.sampled_from(["put", "get", "start", "stop"]), st.sampled_from(KEYS)), max_size=60)


@given(capacity=st.integers(1, 4), steps=operations)
def test_least_recently_used_goes_first_and_active_never(capacity, steps):
    """Catches: eviction by age instead of use, a running request's session dropped, a store that stays over capacity for ever."""
    store, order, active = SessionStore(capacity), [], set()
    for action, key in steps:
        if action == "put":
            state = SessionState(key)
            state.active = {"rid"} if key in active else set()
            assert store.put(state) is state
            order = [k for k in order if k != key] + [key]
            while len(order) > capacity and (idle := [k for k in order if k not in active and k != key]):
                order.remove(idle[0])
        elif action == "get":
            state = store.get(key)
            assert (state is not None) == (key in order)
            if state is not None:
                order = [k for k in order if k != key] + [key]
        elif key in order:
            state = next(s for s in store if s.key == key)
            state.active = {"rid"} if action == "start" else set()
            active = active | {key} if action == "start" else active - {key}
        active &= set(order)
        assert [state.key for state in store] == order
        assert len(store) == len(order)


def test_clear_and_bad_capacity():
    store = SessionStore(2)
    store.put(SessionState("a"))
    store.clear()
    assert store.get("a") is None
    assert len(store) == 0
    with pytest.raises(ValueError, match="at least 1"):
        SessionStore(0)


def session():
    memory = {"per_position": torch.arange(10.0), "per_head": torch.ones(2, 3, 4)}
    return SessionState("a", memory, scored_length=10, tip=10, turns=3, active={"r"}, pruned_tokens=5, logical_tokens=9, live_tokens=4)


@pytest.mark.parametrize(("length", "whole"), [(3, False), (8, False), (9, True), (10, True), (25, True)])
def test_fork(length, whole):
    """Catches: intents from beyond the fork carried into a branch, counters or running requests shared with it."""
    parent = session()
    child = parent.fork("b", length)
    assert child.key == "b"
    assert child.memory["per_position"].tolist() == list(range(min(length, 10)))
    assert child.scored_length == min(length, 10)
    assert ("per_head" in child.memory) == whole
    assert child.turns == 0
    assert not child.active
    assert child.pruned_tokens == child.logical_tokens == child.live_tokens == 0


@pytest.mark.parametrize("name", ["per_position", "per_head"])
def test_forks_do_not_share_memory(name):
    """Catches: two branches that write into one tensor."""
    parent = session()
    before = parent.memory[name].clone()
    parent.fork("b", 10).memory[name].zero_()
    assert torch.equal(parent.memory[name], before)


@pytest.mark.parametrize("length", [0, 4, 10, 30])
def test_truncate(length):
    """Catches: scores of replaced tokens given to the ones that stand there now; memory without positions lost."""
    state = session()
    state.truncate(length)
    assert state.memory["per_position"].tolist() == list(range(min(length, 10)))
    assert state.scored_length == min(length, 10)
    assert state.memory["per_head"].shape == (2, 3, 4)
