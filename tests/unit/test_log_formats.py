"""Other people's logs and our own: each format into the same model, and whatever is broken in them as one line that says where."""

from __future__ import annotations

import json

import pytest

from intentkv.recording import RequestRecord
from intentkv.trajectories import Broken, load_dataset, read_trajectories

pytestmark = pytest.mark.unit


def read(*files):
    items = list(read_trajectories(files))
    return [i for i in items if not isinstance(i, Broken)], [i for i in items if isinstance(i, Broken)]


# ---- mini-SWE-agent ----


def mini_swe(**changes):
    return {
        "trajectory_format": "mini-swe-agent-1",
        "info": {"exit_status": "Submitted"},
        "messages": [
            {"role": "system", "content": "You can run commands."},
            {"role": "user", "content": [{"type": "text", "text": "Fix it."}]},
            {"role": "assistant", "content": "I look.\n```bash\nls\n```", "extra": {"response": {}}},
            {"role": "user", "content": "a.py"},
            {"role": "exit", "content": "Submitted"},
        ],
    } | changes  # fmt: skip


def test_mini_swe(tmp_path):
    file = tmp_path / "task-7.traj.json"
    file.write_text(json.dumps(mini_swe(), indent=2))
    (run,), broken = read(file)
    assert broken == []
    assert (run.id, run.group, run.source) == ("task-7", "task-7", "mini-swe-agent")
    assert [m.role for m in run.messages] == ["system", "user", "assistant", "user"]
    assert run.messages[1].content == "Fix it."


def test_mini_swe_with_tool_calls(tmp_path):
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c1", "content": "a.py"}]
    file = tmp_path / "x.traj.json"
    file.write_text(json.dumps(mini_swe(instance_id="repo__42", messages=messages)))
    (run,), _ = read(file)
    assert run.id == "repo__42"
    assert run.messages[0].tool_calls[0].arguments == {"command": "ls"}


# ---- ATIF ----


def atif(**changes):
    call = {"tool_call_id": "c1", "function_name": "search", "arguments": {"query": "gold"}}
    return {
        "schema_version": "ATIF-v1.6",
        "session_id": "s-1",
        "agent": {"name": "scout", "version": "1", "tool_definitions": [{"type": "function", "function": {"name": "search"}}]},
        "steps": [
            {"step_id": 1, "source": "system", "message": "Be brief."},
            {"step_id": 2, "source": "user", "message": "Price of gold?"},
            {"step_id": 3, "source": "agent", "message": "I search.", "tool_calls": [call],
             "observation": {"results": [{"source_call_id": "c1", "content": [{"type": "text", "text": "2,650"}]}]}},
            {"step_id": 4, "source": "agent", "message": "2,650 dollars."},
        ],
    } | changes  # fmt: skip


def test_atif(tmp_path):
    file = tmp_path / "run.json"
    file.write_text(json.dumps(atif(), indent=1))
    (run,), broken = read(file)
    assert broken == []
    assert (run.id, run.source) == ("s-1", "atif:scout")
    assert [(m.role, m.content) for m in run.messages] == [
        ("system", "Be brief."), ("user", "Price of gold?"), ("assistant", "I search."), ("tool", "2,650"), ("assistant", "2,650 dollars."),
    ]  # fmt: skip
    assert run.messages[2].tool_calls[0].arguments == {"query": "gold"}
    assert run.tools[0]["function"]["name"] == "search"


def test_atif_lines(tmp_path):
    """Several documents, one a line, with a broken one between."""
    file = tmp_path / "runs.jsonl"
    bad = atif(steps=[{"step_id": 1, "source": "robot", "message": "?"}])
    file.write_text("\n".join(json.dumps(d) for d in (atif(session_id="a"), bad, atif(session_id="b"))))
    runs, broken = read(file)
    assert [run.id for run in runs] == ["a", "b"]
    assert [item.where for item in broken] == [f"{file}:2"]
    assert "source" in broken[0].reason


@pytest.mark.parametrize("document", [
    atif(steps=None), atif(steps=[7]), atif(steps=[{"source": "agent", "observation": {"results": [5]}}]), atif(steps=[]),
    mini_swe(messages=[]), mini_swe(messages=7), mini_swe(messages=[{"role": "robot", "content": "x"}]), {"messages": []}, [], 3, "x", None,
])  # fmt: skip
def test_broken_documents_are_named(tmp_path, document):
    """Catches: an exception of any kind that ends the reading."""
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(atif()))
    bad.write_text(json.dumps(document))
    runs, broken = read(bad, good)
    assert [run.id for run in runs] == ["s-1"]
    assert [item.where for item in broken] == [f"{bad}:1"]


def test_broken_json_says_the_line(tmp_path):
    file = tmp_path / "bad.traj.json"
    file.write_text('{\n"trajectory_format": "mini-swe-agent-1",\n"messages": [}\n')
    _, (item,) = read(file)
    assert item.where == f"{file}:3"


# ---- Our own request logs ----


def record(session, prompt, output, **fields):
    return RequestRecord(id=f"r{len(prompt)}", session=session, input_ids=prompt, output_ids=output, **fields)


def write_log(file, records):
    file.write_text("".join(r if isinstance(r, str) else r.model_dump_json() + "\n" for r in records))
    return file


def test_a_session_is_its_longest_request(tmp_path):
    """Turns interleave over two shards. Catches: a trajectory a request, a session cut at a shard's end, a foreign prefix dropped."""
    a1, b1, a2 = record("a", [1, 2, 3], [4]), record("b", [1, 2, 9], [5]), record("a", [1, 2, 3, 4, 6], [7])
    a3, b2 = record("a", [1, 2, 3, 4, 6, 7, 8], [10, 11]), record("b", [1, 2, 9, 5, 1], [2])
    files = [write_log(tmp_path / "requests-000000.jsonl", [a1, b1, a2]), write_log(tmp_path / "requests-000001.jsonl", [a3, b2])]
    runs, broken = read(*files)
    assert broken == []
    assert {run.id: run.token_ids for run in runs} == {"a": (*a3.input_ids, 10, 11), "b": (*b2.input_ids, 2)}


def test_sessions_without_a_name_and_forks(tmp_path):
    """Linked by their token ids alone; a fork is a trajectory of its own."""
    records = [record(None, [1, 2], [3]), record(None, [1, 2, 3, 4], [5]), record(None, [1, 2, 3, 8], [9])]
    runs, _ = read(write_log(tmp_path / "log.jsonl", records))
    assert sorted(run.token_ids for run in runs) == [(1, 2, 3, 4, 5), (1, 2, 3, 8, 9)]
    assert len({run.id for run in runs}) == 2


def test_messages_and_a_cut_line(tmp_path):
    """A server that was killed leaves half a line. The answer becomes the last message."""
    messages = [{"role": "user", "content": "hi"}]
    whole = record("s", [1, 2], [3], messages=messages, output_text="ho")
    file = write_log(tmp_path / "log.jsonl", [whole, whole.model_dump_json()[:40] + "\n", record("t", [7], [8])])
    runs, broken = read(file)
    assert [item.where for item in broken] == [f"{file}:2"]
    assert [(m.role, m.content) for m in runs[0].messages] == [("user", "hi"), ("assistant", "ho")]
    assert runs[1].messages == ()
    data = load_dataset([file])
    assert [run.id for run in data.trajectories] == ["s"], "who needs messages gets those that have them"
    assert any("token ids only" in text for text in data.broken)
