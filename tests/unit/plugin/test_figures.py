"""The figures in a response: SGLang slices them as if they were one value a token, and concatenates what it gets."""

from __future__ import annotations

import json
import pickle
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intentkv_sglang.figures import KEY, Figures

pytestmark = pytest.mark.unit


def make_req(prompt=5):
    req = SimpleNamespace(origin_input_ids=[0] * prompt, output_ids=[], customized_info=None, done=False)
    req.finished = lambda: req.done
    return req


@given(sent=st.lists(st.integers(0, 4), max_size=6), last=st.integers(0, 3))
def test_exactly_one_dictionary_at_the_end(sent, last):
    """Whatever pieces SGLang streams: nothing before the end, then one dictionary with the state at the end.

    A response that is not streamed is the case of one piece.
    """
    req = make_req()
    figures = Figures.of(req)
    figures.admitted(3, 1)
    received, offset = [], 0
    for tokens in sent:
        req.output_ids += [7] * tokens
        # As output_streamer does; the pieces travel pickled.
        received += pickle.loads(pickle.dumps(req.customized_info[KEY][offset : len(req.output_ids)]))
        offset = len(req.output_ids)
        assert received == []
    req.output_ids += [7] * last
    figures.evicted(2, 1, 4)
    figures.now(3)
    req.done = True
    received += pickle.loads(pickle.dumps(req.customized_info[KEY][offset : len(req.output_ids)]))
    (answer,) = received
    logical = 5 + len(req.output_ids)
    assert (answer["logical_tokens"], answer["live_tokens"], answer["dead_tokens"]) == (logical, logical - 3, 3)
    assert json.loads(json.dumps(answer)) == answer


def test_numbers():
    req = make_req(prompt=100)
    figures = Figures.of(req)
    assert figures.admitted(60, 20)
    figures.evicted(30, 25, 50)
    figures.now(50)
    req.output_ids += [1] * 10
    figures.now(50)
    figures.evicted(5, 26, 40)
    figures.now(55)
    assert figures.as_dict() == {
        "logical_tokens": 110,
        "live_tokens": 55,
        "dead_tokens": 55,
        "pruned_tokens": 35,
        "forced_tokens": 26,
        "target_tokens": 40,
        "live_cached_tokens": 40,
        # At admission: the 100 tokens of the prompt, 20 of them dead.
        "peak_live_tokens": 80,
    }


def test_peak_grows_while_tokens_are_generated():
    req = make_req(prompt=10)
    figures = Figures.of(req)
    figures.admitted(0, 0)
    req.output_ids += [1] * 7
    assert figures.as_dict()["peak_live_tokens"] == 17


def test_retraction_keeps_the_first_admission():
    """Figures hang on the request, which outlives its retraction."""
    req = make_req()
    assert Figures.of(req).admitted(3, 1)
    Figures.of(req).session_key = "id:x"
    assert not Figures.of(req).admitted(0, 0)
    figures = Figures.of(req)
    assert (figures.cached_tokens, figures.live_cached_tokens, figures.session_key) == (3, 2, "id:x")


def test_other_customised_values_stay():
    req = make_req()
    req.customized_info = {"hidden": [1, 2]}
    Figures.of(req)
    assert req.customized_info["hidden"] == [1, 2]
