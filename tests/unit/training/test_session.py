"""Training sees what the server sees. Oracle: transformers' own eager attention probabilities, combined by the methods' formulas."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from intentkv.aggregators.learned import HeadFeatures
from intentkv.config import Config
from intentkv.head import EXTENDED
from intentkv.methods import build_method
from intentkv.spans import Span
from intentkv.trajectories import load_dataset
from intentkv_training.examples import candidates, example_settings, head_inputs, session_turns
from intentkv_training.session import Tokens, _decoded, pieces, tokenise, turns

pytestmark = pytest.mark.unit

DECAY = math.exp(-0.5)


@pytest.fixture(scope="module")
def tokens(agents, frozen):
    return tokenise(load_dataset([agents]).trajectories[0], frozen).until(900)


@pytest.fixture(scope="module")
def reading(tokens, frozen):
    return frozen.read(tokens.ids)


@pytest.fixture(scope="module")
def attention(tokens, tiny_model):
    """[L, H_q, n, n] float64, by another implementation of attention than the one under test."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return torch.stack(model(torch.tensor([tokens.ids]), output_attentions=True, use_cache=False).attentions)[:, 0].double()


def contents(tokens):
    """Positions of what the model generated of each assistant message: its words and the end marker."""
    return [
        range(span.start + len(tokens.generation_prompt), span.end - len(tokens.message_end) + 1)
        for span in tokens.messages
        if span.role == "assistant"
    ]


def energy(attention, positions, n):
    return attention[:, :, list(positions), :n].square().mean(2).sum((0, 1))


def scored(name, tokens, reading, frozen):
    method = build_method(name, Config())
    for turn in turns(tokens, reading, frozen.parser, method.queries, [method.aggregator]):
        history = torch.nonzero(~method.forced.mask(turn.prompt)).flatten()
        yield turn, history, method.aggregator.score(turn.state, history, turn.captured, turn.keys, turn.prompt)


def test_assistant_rule(tokens, reading, attention, frozen):
    """Catches: queries before RoPE or of markers, a turn absorbed too early or twice, a window that reaches into what was cached."""
    said = contents(tokens)
    seen = 0
    for turn, history, scores in scored("assistant", tokens, reading, frozen):
        n, cached = turn.prompt.length, said[turn.number - 1].stop if turn.number else 0
        expected = torch.zeros(n, dtype=torch.float64)
        for past in said[: turn.number]:
            expected *= DECAY
            expected[: past.stop] += energy(attention, past, past.stop)
        expected[cached:] = energy(attention, range(max(cached, n - 32), n), n)[cached:]
        torch.testing.assert_close(scores.double(), expected[history], rtol=1e-3, atol=1e-7)
        seen += 1
    assert seen == len(said) == 5


def test_intentkv_rule(tokens, reading, frozen):
    """QueryMemory over the spans, from the formula, on queries and keys checked by the other tests."""
    memory, queries, keys = None, torch.stack(reading.queries).double(), torch.stack(reading.all_keys).double()
    spans = [span for span in tokens.messages if span.role in ("user", "tool")]
    for turn, history, scores in scored("intentkv", tokens, reading, frozen):
        while spans and spans[0].end <= turn.prompt.length:
            mean = queries[:, spans[0].start : spans[0].end].mean(1)
            spans.pop(0)
            mixed = mean if memory is None else DECAY * memory + mean
            memory = mixed / mixed.norm(dim=-1, keepdim=True)
        if not history.numel():
            continue
        repeated = keys[:, history].repeat_interleave(memory.shape[1] // keys.shape[2], 2)
        logits = torch.einsum("lhd,lnhd->lhn", memory, repeated) * reading.scaling
        torch.testing.assert_close(scores.double(), logits.softmax(-1).sum((0, 1)), rtol=1e-3, atol=1e-7)


def test_features_are_the_rules_and_the_last_turn(tokens, reading, attention, frozen, agents):
    """Catches: columns in another order, a last turn that is not the last, ages counted from the wrong end, a role off by one."""
    settings = example_settings(frozen, [agents], test=0.2)
    said = contents(tokens)
    # not to the end: the state goes on when the next turn is asked for
    turn = next(t for t in session_turns(tokens, reading, frozen, settings) if t.number == len(said) - 1)
    history = candidates(turn.prompt)
    inputs = head_inputs(turn, history, "assistant", "layered", settings)
    column = {name: inputs.extra[:, i] for i, name in enumerate(EXTENDED)}
    last, first = said[turn.number - 1], said[0]
    expected = torch.zeros(turn.prompt.length, dtype=torch.float64)
    expected[: last.stop] = energy(attention, last, last.stop)
    torch.testing.assert_close(column["last_turn"].exp().double(), expected[history] + settings.floor, rtol=1e-3, atol=1e-7)
    by_layer = torch.zeros(2, turn.prompt.length, dtype=torch.float64)
    for past in said[: turn.number]:
        by_layer *= DECAY
        by_layer[:, : past.stop] += attention[:, :, list(past), : past.stop].square().mean(2).sum(1)
    n = turn.prompt.length
    window = attention[:, :, n - settings.window : n, :n].square().mean(2).sum(1)
    found = inputs.extra[:, len(EXTENDED) + 2 : -2].exp().double()
    torch.testing.assert_close(found, torch.cat([by_layer, window])[:, history].T.double() + settings.floor / 2, rtol=1e-3, atol=1e-7)
    norms = torch.stack([values[history].double().norm(dim=2).square().mean(1) for values in reading.all_values], 1)
    torch.testing.assert_close(inputs.extra[:, -2:].exp().double(), norms + settings.floor, rtol=1e-3, atol=1e-7)
    torch.testing.assert_close(column["rule"], torch.log(inputs.rule + settings.floor))
    assert (column["peak"] >= column["last_turn"] - 1e-5).all()
    before_first = history < first.start - len(tokens.generation_prompt)
    assert column["turn_age"][before_first].unique().tolist() == pytest.approx([math.log1p(len(said) - 1)])
    for span in tokens.messages:
        inside = (history >= span.start) & (history < span.end)
        if span.role in EXTENDED and inside.any():
            assert column[span.role][inside].all()
            assert column["offset"][inside][0] == 0
    assert torch.equal(column["seen"].bool(), history < last.stop)
    assert inputs.keys.shape == (history.shape[0], 16)
    torch.testing.assert_close(inputs.keys[5], torch.stack([k[history[5]] for k in reading.all_keys]).mean((0, 1)))


def test_both_rules_in_one_pass_are_each_rule_alone(tokens, reading, frozen, agents):
    """A head's rule score is its method's. Catches: captures of one rule mistaken for the other's."""
    settings = example_settings(frozen, [agents], test=0.2)
    for rule in ("assistant", "intentkv"):
        alone = list(scored(rule, tokens, reading, frozen))
        together = session_turns(tokens, reading, frozen, settings)
        for (_, history, scores), turn in zip(alone, together, strict=True):
            if history.numel():
                torch.testing.assert_close(head_inputs(turn, history, rule, "extended", settings).rule, scores)


def test_tools_are_listed_only_when_asked_for(agents, frozen):
    run = load_dataset([agents]).trajectories[0].model_copy(update={"tools": ({"function": {"name": "lookup_everything"}},)})
    plain, listed = (frozen.tokenizer.decode(tokenise(run, frozen, tools).until(900).ids) for tools in (False, True))
    assert "lookup_everything" not in plain
    assert "lookup_everything" in listed


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 129, 300])
def test_sampled_as_in_decode(length):
    """Oracle: the server's own lease, offered one token at a time."""
    from intentkv_sglang.capture import QueryBank, RowLease

    lease = RowLease(QueryBank([0], 64, 1, 1, torch.float32, "cpu"), 64)
    for position in range(10, 10 + length):
        lease.offer(position)
    assert _decoded(10, 10 + length, 64) == lease.positions


def test_memories_of_a_fork_are_cut(frozen, tokens, reading):
    """Catches: a per-position memory that a server carries whole when the session forks or a turn is replaced."""
    source = build_method("assistant", Config()).queries
    *_, turn = turns(tokens, reading, frozen.parser, source, [HeadFeatures(0.5, 1e-6, layered=True)])
    turn.state.truncate(30)
    assert turn.state.memory.keys() == {"assistant_energy", "turn_energies"}
    assert all(value.shape[0] == 30 for value in turn.state.memory.values())


def test_pieces_of_a_long_conversation(agents, frozen):
    """Each piece reads like an agent's own history: its text is parsed anew and must give the same messages.

    Catches: spans shifted by the wrong gap, a turn lost or twice, a piece that is too long, assistant turns miscounted.
    """
    whole = tokenise(load_dataset([agents]).trajectories[0], frozen)
    opening = next(span.start for span in whole.messages if span.role == "assistant")
    said = [whole.ids[s.start : s.end] for s in whole.messages if s.role == "assistant"]
    parts = list(pieces(whole, 250, 9))
    assert len(parts) > 2
    assert parts[0] == whole.until(250)
    found = []
    for part in parts:
        assert len(part.ids) <= 250
        assert part.ids[:opening] == whole.ids[:opening]
        assert frozen.parser.parse(part.ids, 0).messages == part.messages
        answers = [part.ids[s.start : s.end] for s in part.messages if s.role == "assistant"]
        assert part.skipped == len(found)
        assert part.messages[-1].end == len(part.ids)
        found += answers
    assert found == said
    assert list(pieces(whole, 250, 2)) == parts[:2]
    assert list(pieces(whole, 2 * opening - 1, 9)) == [whole.until(2 * opening - 1)], "no room behind the opening"
    assert list(pieces(whole, len(whole.ids), 9)) == [whole]


MESSAGES = st.lists(st.tuples(st.sampled_from(["user", "tool", "assistant", "assistant"]), st.integers(1, 9)), min_size=1, max_size=25)


@settings(max_examples=300)
@given(MESSAGES, st.integers(4, 30), st.integers(1, 6))
def test_pieces_of_any_conversation(messages, limit, most):
    """Ids count up, so each tells its place. Catches: a turn lost, twice or out of order where some are longer than a piece, come in a row,
    or begin the conversation; too many pieces, or fewer because of turns that are left out; a loop that never ends."""
    ends = list(accumulate(size for _, size in messages))
    spans = tuple(Span(role, end - size, end) for (role, size), end in zip(messages, ends, strict=True))
    whole = Tokens(list(range(ends[-1] if ends else 0)), spans, [], [])
    answers = [span for span in spans if span.role == "assistant"]
    opening = answers[0].start if answers else None
    first, *others = pieces(whole, limit, most)
    assert first == whole.until(limit)
    assert len(others) < most
    found = [span for span in first.messages if span.role == "assistant"]
    for part in others:
        assert opening is not None
        assert len(part.ids) == part.messages[-1].end <= limit
        start = part.ids[opening]
        assert part.ids == [*range(opening), *range(start, start + len(part.ids) - opening)]
        told = [Span(span.role, part.ids[span.start], part.ids[span.end - 1] + 1) for span in part.messages]
        assert [span for span in spans if span.end <= opening or start <= span.start <= part.ids[-1]] == told
        said = [span for span in told if span.role == "assistant"]
        assert said[0].start == start
        assert answers.index(said[0]) == part.skipped
        found += said
    assert found == sorted(set(found), key=lambda span: span.start)
    if opening is not None and 2 * opening <= limit:
        left = [span for span in answers if span not in found and len(span) <= limit - opening]
        assert not left or (len(others) == most - 1 and all(span.start < left[0].start for span in found))
    else:
        assert not others
