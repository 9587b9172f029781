"""Labels: the future's attention, and substrings of later arguments."""

from __future__ import annotations

import pytest
import torch

from intentkv.spans import Span
from intentkv.trajectories import Message, load_dataset
from intentkv_training.labels import argument_texts, future_attention, future_queries, matched_tokens
from intentkv_training.session import tokenise

pytestmark = pytest.mark.unit


def test_future_attention(agents, frozen, tiny_model):
    """Oracle: transformers' eager attention and its values. Catches: a softmax over the history only, norms of the wrong head."""
    from transformers import AutoModelForCausalLM

    tokens = tokenise(load_dataset([agents]).trajectories[1], frozen).until(500)
    reading = frozen.read(tokens.ids)
    n, positions = 200, [210, 230, 300]
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        alpha = torch.stack(model(torch.tensor([tokens.ids]), output_attentions=True, use_cache=False).attentions)[:, 0]
    alpha = alpha[:, :, positions, :n].double()
    found = future_attention(reading, n, positions)
    torch.testing.assert_close(found.mass.double(), alpha.mean(2).sum((0, 1)), rtol=1e-3, atol=1e-7)
    torch.testing.assert_close(found.energy.double(), alpha.square().mean(2).sum((0, 1)), rtol=1e-3, atol=1e-8)
    norms = torch.stack(reading.all_values)[:, :n].double().norm(dim=-1).square().permute(0, 2, 1).repeat_interleave(2, 1)
    torch.testing.assert_close(found.value_energy.double(), (alpha.square().mean(2) * norms).sum((0, 1)), rtol=1e-3, atol=1e-8)


def test_future_queries_are_spread():
    spans = [Span("assistant", 10, 30), Span("assistant", 50, 60)]
    assert future_queries(spans, 100) == [*range(10, 30), *range(50, 60)]
    assert len(future_queries(spans, 10)) == 10
    assert future_queries(spans, 10)[-1] >= 50


def test_argument_texts():
    """The next calls only, nested values, whole values and their words, short words left out."""
    calls = [
        {"name": "f", "arguments": a} for a in ({"q": "red apple pie"}, {"n": [12345, {"k": "deep-value"}], "b": True}, {"x": "later"})
    ]
    messages = [Message(role="assistant", tool_calls=calls[:1]), Message(role="tool"), Message(role="assistant", tool_calls=calls[1:])]
    assert argument_texts(messages, 2) == ["red apple pie", "apple", "12345", "deep-value"]


def test_matched_tokens():
    """Catches: an occurrence that begins or ends within a token, a second occurrence missed, neighbours marked, empty pieces marked."""
    pieces = ["the ", "tic", "ket", "42", "", " and", " xtick", "et42y", "."]
    assert matched_tokens(pieces, ["ticket42"]).tolist() == [False, True, True, True, False, False, True, True, False]
    assert not matched_tokens(pieces, ["ticket43"]).any()
