"""Server and training see the same: what the server evicts is what the scores computed for training say, with rules and with a head.

Catches features computed differently in the two places: other queries, another softmax, another turn, keys averaged over other heads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from intentkv.config import Config
from intentkv.methods import Method, build_method
from intentkv.trajectories import Trajectory, read_trajectories
from intentkv_training.model import FrozenModel
from intentkv_training.session import tokenise, turns

from .harness import Chat, Client

RATIO = 0.4
SAID = [("user", 60), ("tool", 130), ("tool", 50), ("user", 70), ("tool", 40)]


def whole_session(server: Client, chat: Chat, session: str, method: str) -> tuple[set[int], int]:
    """A closed loop in which only the last prompt evicts; returns what died and the last prompt's length."""
    for role, size in SAID[:-1]:
        answer = server.generate(chat.say(role, size).ask(), 20, {"method": method, "budget": 100_000}, session_id=session)
        chat.answered(answer.output_ids)
    prompt = chat.say(*SAID[-1]).ask()
    server.generate(prompt, 4, {"method": method, "budget_ratio": RATIO, "hysteresis": 0}, session_id=session)
    return server.dead(session), len(prompt)


def training_scores(chat: Chat, method: Method, frozen: FrozenModel, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(candidates, scores) at the last prompt, as examples are made."""
    chat = replace(chat, ids=list(chat.ids), spans=list(chat.spans)).answered(chat.words(5))
    tokens = tokenise(Trajectory(id="x", source="x", group="x", token_ids=tuple(chat.ids)), frozen)
    # The server was told to ignore the end: the end marker behind each answer is the client's and was not generated.
    tokens = replace(tokens, message_end=[*tokens.message_end, 0])
    assert method.aggregator is not None
    for turn in turns(tokens, frozen.read(tokens.ids), frozen.parser, method.queries, [method.aggregator]):
        if turn.prompt.length == length:
            history = torch.nonzero(~method.forced.mask(turn.prompt)).flatten()
            return history, method.aggregator.score(turn.state, history, turn.captured, turn.keys, turn.prompt)
    raise AssertionError("the last prompt is no turn")


def check(history: torch.Tensor, scores: torch.Tensor, dead: set[int]) -> None:
    """The dead are the lowest-scored candidates; scores within a thousandth of each other may have swapped."""
    assert dead <= set(history.tolist())
    assert len(dead) == history.shape[0] - max(1, round(RATIO * history.shape[0]))
    gone = torch.tensor([p in dead for p in history.tolist()])
    lost, kept = scores[gone].double(), scores[~gone].double()
    assert float(lost.max()) <= float(kept.min()) + 1e-3 * float(kept.min().abs())


@pytest.mark.parametrize("method", ["assistant", "intentkv", "snapkv"])
def test_rules(served: Client, new_chat: Callable[[], Chat], frozen: FrozenModel, method: str) -> None:
    chat = new_chat().say("system", 20)
    dead, length = whole_session(served, chat, f"training-{method}", method)
    check(*training_scores(chat, build_method(method, Config()), frozen, length), dead)


def test_head(learned: Client, new_chat: Callable[[], Chat], frozen: FrozenModel, head: Path) -> None:
    chat = new_chat().say("system", 20)
    dead, length = whole_session(learned, chat, "head", "assistant-learned")
    method = build_method("assistant-learned", Config(head=head))
    history, scores = training_scores(chat, method, frozen, length)
    check(history, scores, dead)
    rule = dict(zip(*(t.tolist() for t in training_scores(chat, build_method("assistant", Config()), frozen, length)), strict=True))
    least = sorted(rule, key=lambda p: rule[p])[: len(dead)]
    assert len(dead & set(least)) < 0.9 * len(dead), "the head changed nothing"


def test_a_learned_method_without_a_head_is_a_bad_request(served: Client, new_chat: Callable[[], Chat]) -> None:
    """Catches: a scheduler that dies of it."""
    body = {
        "input_ids": new_chat().say("user", 9).ask(),
        "sampling_params": {"custom_params": {"intentkv": {"method": "assistant-learned"}}},
    }
    response = served.post("/generate", body)
    assert response.status_code == 400
    assert "needs a trained head" in response.text


def test_recorded(learned: Client, new_chat: Callable[[], Chat], records: Path) -> None:
    """What clients sent and got is in the log, word for word and id for id; the key is not."""
    message = {"role": "user", "content": "Which airport lies highest?"}
    reply = learned.post("/v1/chat/completions", {"model": "m", "messages": [message], "max_tokens": 6, "session_id": "chat"}).json()
    prompt = new_chat().say("user", 30).ask()
    answer = learned.generate(prompt, 7, session_id="ids")
    streamed = new_chat().say("user", 25).ask()
    with learned.http.stream(
        "POST", "/generate", json={"input_ids": streamed, "stream": True, "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}}
    ) as stream:
        last = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")][-1]
    wanted = {"chat", "ids"}
    for _ in range(100):
        runs = [run for run in read_trajectories(sorted(records.glob("*.jsonl"))) if isinstance(run, Trajectory)]
        if wanted <= {run.id for run in runs} and any(run.token_ids[: len(streamed)] == tuple(streamed) for run in runs):
            break
        learned.http.get("/health")
    by_id = {run.id: run for run in runs}
    assert by_id["ids"].token_ids == (*prompt, *answer.output_ids)
    assert [m.content for m in by_id["chat"].messages] == [message["content"], reply["choices"][0]["message"]["content"]]
    (stream_run,) = [run for run in runs if run.token_ids[: len(streamed)] == tuple(streamed)]
    assert stream_run.token_ids == (*streamed, *last["output_ids"])
    text = "".join(file.read_text() for file in records.glob("*.jsonl"))
    assert "topsecret" not in text
    lines = [json.loads(line) for line in text.splitlines()]
    (line,) = [line for line in lines if line["session"] == "ids"]
    assert line["figures"]["prompt_tokens"] == len(prompt)
    assert line["figures"]["logical_tokens"] == len(prompt) + 7
    assert not [line for line in lines if line["id"].startswith("HEALTH")]
