"""The made-up research session: deterministic, true to its data, of the promised size, with the answer where the needle says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import airportsdata
import pytest

from intentkv.trajectories import load_dataset
from intentkv_eval.world import Session, research_session

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module", params=[0, 1, 7])
def session(request: pytest.FixtureRequest) -> Session:
    return research_session(request.param)


def messages_of(session: Session, role: str) -> list[dict[str, Any]]:
    return [message for message in session.record["messages"] if message["role"] == role]


def test_a_seed_gives_one_session() -> None:
    """Two arms of a comparison must read the same words; an unordered set or a global random state would show here."""
    assert research_session(3) == research_session(3)
    assert research_session(3).record["messages"] != research_session(4).record["messages"]


def test_needle_stands_in_one_early_tool_result_only(session: Session) -> None:
    """The answer in a second place, or in an assistant's words, would make its liveness say nothing."""
    messages = session.record["messages"]
    holders = [index for index, message in enumerate(messages) if session.needle.text in message["content"]]
    assert holders == [session.needle.message]
    assert messages[session.needle.message]["content"].count(session.needle.text) == 1
    assert messages[session.needle.message] is messages_of(session, "tool")[0]


def test_question_comes_first_and_last(session: Session) -> None:
    first, last = messages_of(session, "user")
    question = session.record["task"]
    assert question in first["content"]
    assert question in last["content"]
    assert session.record["messages"][-2] is last


def test_answer_is_true(session: Session) -> None:
    """Against the data package itself: a mix-up of columns or rows would show."""
    code, city, name, elevation, latitude, longitude = session.needle.text.split(" | ")
    airport = airportsdata.load("IATA")[code]
    assert (city, name) == (airport["city"], airport["name"])
    assert abs(int(elevation) - airport["elevation"]) <= 0.5
    assert math.isclose(float(latitude), airport["lat"], abs_tol=0.006)
    assert math.isclose(float(longitude), airport["lon"], abs_tol=0.006)
    assert f"{name} of {city}" in session.record["task"]
    assert elevation in session.record["messages"][-1]["content"]


def test_tool_results_answer_their_calls(session: Session) -> None:
    """Every call is answered by the next message, with the same id and tool, about the country asked for."""
    messages = session.record["messages"]
    declared = {tool["function"]["name"]: tool["function"]["parameters"]["required"] for tool in session.record["tools"]}
    calls = [(index, call) for index, message in enumerate(messages) for call in message.get("tool_calls", ())]
    assert len(calls) >= 8
    for index, call in calls:
        answer = messages[index + 1]
        assert (answer["role"], answer["tool_call_id"], answer["name"]) == ("tool", call["id"], call["name"])
        assert list(call["arguments"]) == declared[call["name"]]
        if call["name"] == "country":
            assert json.loads(answer["content"])["name"] == call["arguments"]["name"]
    assert len({call["id"] for _, call in calls}) == len(calls)


def test_readable_as_a_trajectory_file(session: Session, tmp_path: Path) -> None:
    file = tmp_path / "session.jsonl"
    file.write_text(json.dumps(session.record) + "\n")
    dataset = load_dataset([file])
    assert dataset.broken == []
    assert [message.role for message in dataset.trajectories[0].messages] == [message["role"] for message in session.record["messages"]]


@pytest.mark.parametrize("countries", [1, 3])
def test_turns_follow_the_number_of_countries(countries: int) -> None:
    assert len(messages_of(research_session(0, countries), "assistant")) == 2 * countries + 2
