"""Repeated tool calls of an agent."""

from __future__ import annotations

import pytest

from intentkv.trajectories import Message, ToolCall
from intentkv_eval.overhead import CallCounts, count_calls

pytestmark = pytest.mark.unit


def message(*calls: tuple[str, dict[str, object] | str]) -> Message:
    return Message(role="assistant", tool_calls=tuple(ToolCall(name=name, arguments=arguments) for name, arguments in calls))


def test_repeats_are_counted_in_the_turn_that_repeats() -> None:
    """Catches a call that repeats a later one, order of arguments that matters, and another tool's call taken for the same."""
    found = count_calls(
        [
            message(("search", {"q": "highest airport of Rabat", "n": 5})),
            message(),
            message(("search", {"n": 5, "q": "highest airport of Rabat"}), ("delete_everything", {})),
            message(("open", "not JSON"), ("open", "not JSON")),
        ]
    )
    assert found == [CallCounts(1, 0, 0), CallCounts(0, 0, 0), CallCounts(2, 1, 1), CallCounts(2, 1, 1)]


def test_near_duplicates() -> None:
    """Catches a cosine that is not one: a small change of a long call is near, another question is not."""
    first = ("search", {"q": "which airport of the capital of Morocco lies highest above the sea"})
    near = ("search", {"q": "which airport of the capital of Morocco lies highest above sea"})
    far = ("search", {"q": "population of Iceland in 1990"})
    assert count_calls([message(first), message(near), message(far)]) == [CallCounts(1, 0, 0), CallCounts(1, 0, 1), CallCounts(1, 0, 0)]


def test_empty_call_is_no_error() -> None:
    """Catches a division by the length of nothing."""
    assert count_calls([message(("", ""), ("", ""))]) == [CallCounts(2, 1, 1)]
