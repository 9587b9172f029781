"""The recorder in the HTTP process: what it notes, what it never notes, and that nothing it does holds up or fails a request."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import pytest

from intentkv.config import Config
from intentkv.recording import RequestRecord, shards
from intentkv_sglang.recorder import Recorder, record_of, tool_calls

pytestmark = pytest.mark.unit


def generation(rid="r1", **fields):
    return SimpleNamespace(rid=rid, session_id="s1", input_ids=[1], headers={"authorization": "Bearer topsecret"}, **fields)


OUT = {
    "text": 'Look.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
    "output_ids": [7, 8],
    "meta_info": {
        "prompt_tokens": 3, "cached_tokens": 1, "completion_tokens": 2, "e2e_latency": 0.5, "id": "r1",
        "intentkv": [{"logical_tokens": 5, "live_tokens": 4, "dead_tokens": 1}],
    },
}  # fmt: skip


@pytest.fixture
def recorder(tmp_path):
    made = Recorder(Config(record=tmp_path / "logs"))
    yield made
    made.close()


def lines(recorder):
    recorder.close()
    return [json.loads(line) for shard in shards(recorder._config.record) for line in shard.read_text().splitlines()]


def test_a_chat_request(recorder):
    """As SGLang calls: conversion, validation, end. Catches: a header or key in the log, figures or messages lost."""
    obj = generation()
    chat = SimpleNamespace(
        model="m", messages=[SimpleNamespace(model_dump=lambda **_: {"role": "user", "content": "hi"})], tools=None, api_key="topsecret"
    )
    request = SimpleNamespace(headers={"authorization": "Bearer topsecret"})
    recorder.note_chat((obj, chat), None, chat, request)
    recorder.note_prompt(None, obj, [1, 2, 3])
    recorder.note_finished(None, obj, OUT, request=request)
    (line,) = lines(recorder)
    assert "topsecret" not in json.dumps(line)
    record = RequestRecord.model_validate(line)
    assert (record.id, record.session, record.model) == ("r1", "s1", "m")
    assert (record.input_ids, record.output_ids) == ([1, 2, 3], [7, 8])
    assert record.messages == [{"role": "user", "content": "hi"}]
    assert record.tool_calls == [{"name": "f", "arguments": {"x": 1}}]
    assert record.figures == {
        "prompt_tokens": 3, "cached_tokens": 1, "completion_tokens": 2, "e2e_latency": 0.5, "logical_tokens": 5, "live_tokens": 4,
        "dead_tokens": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    "obj", [SimpleNamespace(), SimpleNamespace(rid=None), SimpleNamespace(rid=["a", "b"]), generation("HEALTH_CHECK_1")]
)
def test_what_is_no_single_request_is_not_noted(recorder, obj):
    recorder.note_finished(None, obj, OUT)
    assert lines(recorder) == []
    assert recorder.dropped == 0


@pytest.mark.parametrize("out", [{}, {"meta_info": None}, {"meta_info": {"intentkv": [7]}}, {"meta_info": {}, "output_ids": ["x"]}])
def test_a_bad_output_is_dropped_and_the_next_is_written(recorder, out):
    """Catches: a writing thread that dies of one request."""
    for result in (out, OUT):
        obj = generation()
        recorder.note_prompt(None, obj, [1])
        recorder.note_finished(None, obj, result)
    assert len(lines(recorder)) == 1
    assert recorder.dropped == 1


def test_a_slow_disk_holds_up_nobody(recorder, monkeypatch):
    """The writer is stuck: notes are dropped, hooks return. Catches: a put that waits."""
    stuck = threading.Event()
    monkeypatch.setattr(recorder._writer, "write", lambda line: stuck.wait())
    obj = generation()
    recorder.note_prompt(None, obj, [1])
    for _ in range(1500):
        recorder.note_finished(None, obj, OUT)
    assert recorder.dropped > 0
    stuck.set()


def test_a_full_disk(recorder, monkeypatch):
    def fail(line):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorder._writer, "write", fail)
    obj = generation()
    recorder.note_prompt(None, obj, [1])
    for _ in range(3):
        recorder.note_finished(None, obj, OUT)
    assert lines(recorder) == []
    assert recorder.dropped == 3


def test_token_ids_of_the_request_itself():
    """Without a note from validation. Catches: a record without its prompt."""
    obj = generation()
    obj.input_ids = [4, 5]
    assert record_of(obj, OUT, 1.0, Config()).input_ids == [4, 5]


@pytest.mark.parametrize(
    ("server", "request_", "expected"),
    [
        ({}, None, ("assistant", 8192, None)),
        ({"budget_ratio": 0.5}, None, ("assistant", None, 0.5)),
        ({"budget_ratio": 0.5}, {"budget": 64, "method": "snapkv"}, ("snapkv", 64, None)),
        ({"budget": 64}, {"budget_ratio": 0.25}, ("assistant", None, 0.25)),
    ],
)
def test_what_served_it(server, request_, expected):
    """Catches: the server's settings where the request had its own, in either of the forms that options have on their way."""
    for options in (request_, json.dumps(request_)) if request_ else (None,):
        obj = generation(sampling_params={"custom_params": {"intentkv": options}})
        record = record_of(obj, OUT, 1.0, Config(**server))
        assert (record.method, record.budget, record.budget_ratio) == expected


def test_first_token_and_end():
    """SGLang's own times. Catches: a first token measured where a reply that does not stream arrives, an abort taken for an answer."""
    meta = OUT["meta_info"] | {
        "finish_reason": {"type": "abort"}, "request_received_ts": 100.5, "prefill_finished_time": 101.75, "decode_throughput": 1e7,
    }  # fmt: skip
    record = record_of(generation(), OUT | {"meta_info": meta}, 1.0, Config())
    assert record.figures["ttft"] == 1.25
    assert record.finish == "abort"
    assert "ttft" not in record_of(generation(), OUT, 1.0, Config()).figures


def test_tool_calls():
    text = '<tool_call>{"name": "a"}</tool_call> <tool_call>{broken}</tool_call><tool_call>{"name": 3}</tool_call>'
    assert list(tool_calls(text)) == [{"name": "a", "arguments": {}}]
