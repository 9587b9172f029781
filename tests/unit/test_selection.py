"""Forced keep and top-k. Oracle: Python's own sort over (score, position), and sets of positions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from intentkv.selection import ForcedKeep, top_positions
from intentkv.spans import Prompt, Span

pytestmark = pytest.mark.unit

# Few distinct values: ties are the rule.
score_lists = st.lists(st.sampled_from([0.0, -1.0, 0.5, 1.0, 2.0]), max_size=80)


@given(scores=score_lists, count=st.integers(-3, 90))
def test_the_best_stay_and_ties_go_to_the_later(scores, count):
    """Catches: an unstable sort, ties to the earlier position, off-by-one counts, a negative or too large count."""
    ranked = sorted(range(len(scores)), key=lambda i: (scores[i], i), reverse=True)
    expected = set(ranked[: max(0, count)])
    kept = top_positions(torch.tensor(scores), count)
    assert kept.dtype == torch.bool
    assert set(kept.nonzero().flatten().tolist()) == expected


def test_large_ties_are_deterministic():
    """Sorts of other sizes use other algorithms. Catches: one that is not stable."""
    scores = torch.randint(0, 3, (50_000,), generator=torch.Generator().manual_seed(0)).float()
    kept = top_positions(scores, 20_000)
    expected = sorted(range(50_000), key=lambda i: (scores[i].item(), i), reverse=True)[:20_000]
    assert set(kept.nonzero().flatten().tolist()) == set(expected)


@st.composite
def prompts(draw):
    """Messages of any roles, then perhaps a generation prompt."""
    messages, end = [], 0
    for _ in range(draw(st.integers(0, 5))):
        size = draw(st.integers(1, 6))
        role = draw(st.sampled_from(["system", "user", "tool", "assistant", "unknown"]))
        messages.append(Span(role, end, end + size))
        end += size
    return Prompt(end + draw(st.integers(0, 3)), tuple(messages), end, True)


@given(
    prompt=prompts(),
    system=st.booleans(),
    actionable=st.booleans(),
    sinks=st.integers(0, 8),
    recent=st.integers(0, 50),
    protected=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60) | st.just(2**70)), max_size=2),
)
@example(Prompt(5, (Span("assistant", 0, 5),), 5, True), True, True, 0, 7, [])
def test_forced_keep(prompt, system, actionable, sinks, recent, protected):
    """Catches: a part of F missing, ``recent=0`` keeping everything, one beyond the prompt keeping less,
    an older user message kept, a span beyond the prompt raising."""
    expected = set(range(prompt.generation_start, prompt.length)) | set(range(sinks)) | set(range(prompt.length - recent, prompt.length))
    if system and prompt.messages and prompt.messages[0].role == "system":
        expected |= set(range(prompt.messages[0].end))
    asked = [span for span in prompt.messages if span.role in ("user", "tool", "unknown")]
    if actionable and asked:
        expected |= set(range(asked[-1].start, asked[-1].end))
    for start, end in protected:
        expected |= set(range(start, min(end, prompt.length)))
    forced = ForcedKeep(system, actionable, sinks, recent, tuple(protected)).mask(prompt)
    assert forced.shape == (prompt.length,)
    assert set(forced.nonzero().flatten().tolist()) == {p for p in expected if 0 <= p < prompt.length}
