"""How many history tokens stay, and when an eviction happens. The oracles are what a budget promises, not its formula."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intentkv.budgets import FixedTokens, HistoryRatio
from intentkv.triggers import OverTarget

pytestmark = pytest.mark.unit

counts = st.integers(0, 50_000)


@given(tokens=st.integers(1, 40_000), n_history=counts, n_forced=counts)
def test_fixed_budget_is_full_and_not_exceeded(tokens, n_history, n_forced):
    """Catches: forced keep not counted against C, a prompt cut into its forced keep, a budget that is not used up."""
    kept = FixedTokens(tokens).keep_count(n_history, n_forced)
    assert 0 <= kept <= n_history
    if n_forced >= tokens:
        assert kept == 0
    else:
        assert n_forced + kept <= tokens
        assert kept == n_history or n_forced + kept == tokens


@given(ratio=st.floats(0, 1, exclude_min=True), n_history=counts, n_forced=counts)
def test_ratio_keeps_its_share_of_the_history(ratio, n_history, n_forced):
    """Catches: a share of the whole prompt instead of the history, an empty history that keeps a token, one that keeps none."""
    kept = HistoryRatio(ratio).keep_count(n_history, n_forced)
    assert kept <= n_history
    assert kept == 0 if n_history == 0 else kept >= 1
    if kept > 1:
        assert abs(kept - ratio * n_history) < 1


@given(ratios=st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)), n_history=counts)
def test_a_larger_ratio_never_keeps_less(ratios, n_history):
    low, high = (HistoryRatio(ratio).keep_count(n_history, 0) for ratio in sorted(ratios))
    assert low <= high
    assert HistoryRatio(1.0).keep_count(n_history, 0) == n_history


@given(hysteresis=st.integers(0, 2000), target=counts)
def test_one_event_per_hysteresis(hysteresis, target):
    """A request grows token by token. Catches: an event a token right after an eviction, or one token early or late."""
    trigger = OverTarget(hysteresis)
    assert not any(trigger.fires(live, target) for live in (0, target, target + hysteresis))
    assert trigger.fires(target + hysteresis + 1, target)
