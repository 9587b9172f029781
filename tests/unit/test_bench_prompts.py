"""Prompts of the benchmarks, read back by the plugin's own parser and compared with the replay's own planning."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from intentkv.config import ConfigError
from intentkv.spans import PromptParser
from intentkv.templates import TEMPLATES, Template
from intentkv.trajectories import Message, Trajectory
from intentkv_eval.bench_prompts import Dialogue, Frames, Session, joined_sessions, make_frames, recorded_sessions
from intentkv_eval.conversation import Tokenize, encode
from intentkv_eval.replay import plan_turns

pytestmark = pytest.mark.unit


def tokenize_with(tokenizer: Any) -> Tokenize:
    async def tokenize(texts: Sequence[str]) -> list[list[int]]:
        return [tokenizer.encode(text, add_special_tokens=False) for text in texts]

    return tokenize


@pytest.fixture(params=sorted(TEMPLATES))
def template(request: pytest.FixtureRequest) -> Template:
    return TEMPLATES[request.param]


@pytest.fixture
def tokenizer(tokenizers: dict[str, Any], template: Template) -> Any:
    return tokenizers[template.name]


@pytest.fixture
def frames(tokenizer: Any, template: Template) -> Frames:
    return asyncio.run(make_frames(template, tokenize_with(tokenizer)))


def common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_parser_finds_every_message_where_it_was_put(frames: Frames, tokenizer: Any) -> None:
    """Catches a marker at the wrong place, a frame that the plugin does not recognise, and content that reads as a marker."""
    sizes = [("system", 70), ("user", 90), ("assistant", 80), ("tool", 300), ("assistant", 64), ("tool", 61)]
    dialogue = Dialogue(frames, "seed")
    for role, tokens in sizes:
        dialogue.add(role, tokens)
    end = len(dialogue.ids)
    prompt = PromptParser(tokenizer).parse(dialogue.ask(), 0)
    assert prompt.recognised
    assert [span.role for span in prompt.messages] == [role for role, _ in sizes]
    lengths = [len(span) for span in prompt.messages]
    lengths[0] -= len(frames.opening)
    assert lengths == [tokens for _, tokens in sizes]
    assert prompt.generation_start == end


def test_answer_is_an_assistant_message(frames: Frames, tokenizer: Any) -> None:
    """Catches an answer that is not closed, or closed twice where the server wrote the end marker itself."""
    dialogues = [Dialogue(frames, "seed") for _ in range(2)]
    words = frames.words[:5]
    for dialogue, output in zip(dialogues, (words, [*words, frames.markers.message_end[0]]), strict=True):
        dialogue.add("user", 60)
        dialogue.ask()
        dialogue.answer(output)
        dialogue.add("tool", 60)
    assert dialogues[0].ids == dialogues[1].ids
    roles = [span.role for span in PromptParser(tokenizer).parse(dialogues[0].ask(), 0).messages]
    assert roles == ["user", "assistant", "tool"]


def test_same_seed_same_prompt_and_different_seeds_share_the_system_prompt_only(frames: Frames) -> None:
    """Catches arms that get different work, and sessions that hit each other's cache by accident."""

    def made(seed: str) -> Dialogue:
        dialogue = Dialogue(frames, seed)
        dialogue.add("system", 100)
        dialogue.add("user", 200)
        return dialogue

    first, again, other = made("a"), made("a"), made("b")
    assert first.ids == again.ids
    head, _ = frames.around["user"]
    shared = len(frames.opening) + 100 + len(head)
    assert shared <= common(first.ids, other.ids) <= shared + 2  # two contents may start alike by chance
    assert first.ids != other.ids


@pytest.mark.parametrize("length", [400, 1000, 5000])
def test_prompt_has_exactly_the_length_asked_for(frames: Frames, length: int) -> None:
    """Catches a length that is off by the generation prompt, and growth past the goal."""
    dialogue = Dialogue(frames, "seed")
    dialogue.add("system", 60)
    dialogue.grow(length - 128, message=256, answer=16)
    assert len(dialogue.ids) < length - 128
    assert len(dialogue.ask_at(length)) == length
    with pytest.raises(ValueError, match="no room"):
        dialogue.ask_at(length + 3)


def agent(seed: int, turns: int) -> Trajectory:
    draw = random.Random(seed)
    messages = [Message(role="system", content="you are " + "x" * 20), Message(role="user", content="u" * draw.randint(5, 60))]
    for _ in range(turns):
        messages.append(Message(role="assistant", content="say " * draw.randint(1, 15)))
        messages.append(Message(role="tool", content="get " * draw.randint(1, 40)))
    return Trajectory(id=f"agent {seed}", source="made", group="g", messages=tuple(messages))


def sessions_of(
    tokenizer: Any, template: Template, agents: Sequence[Trajectory], max_turns: int = 100, max_tokens: int = 40, max_context: int = 3000
) -> list[Session]:
    return asyncio.run(recorded_sessions(agents, template, tokenize_with(tokenizer), max_turns, max_tokens, max_context))


@pytest.mark.parametrize("max_context", [300, 500, 10_000])
def test_sizes_are_those_of_a_replay(tokenizer: Any, template: Template, max_context: int) -> None:
    """Catches sizes that differ from what replaying the same recordings would send. Oracle: the replay's own plan."""
    agents = [agent(seed, 6) for seed in range(4)]
    sessions = sessions_of(tokenizer, template, agents, max_context=max_context)
    for trajectory, session in zip(agents, sessions, strict=True):
        plan = plan_turns(trajectory, asyncio.run(encode(trajectory, template, tokenize_with(tokenizer))), max_context, max_tokens=40)
        assert session.final_tokens == plan.final_tokens
        assert [turn.completion_tokens for turn in session.turns] == [turn.completion_tokens for turn in plan.turns]
        assert [sum(m.tokens for m in turn.added) for turn in session.turns] == [len(turn.added) for turn in plan.turns]


def test_played_session_ends_at_its_final_tokens(tokenizer: Any, template: Template, frames: Frames) -> None:
    """Catches a working set that is not what the sessions really grow to."""
    (session,) = sessions_of(tokenizer, template, [agent(1, 5)])
    dialogue = Dialogue(frames, "seed")
    length = 0
    for turn in session.turns:
        for message in turn.added:
            dialogue.add(message.role, message.tokens)
        length = len(dialogue.ask()) + turn.completion_tokens
        dialogue.pretend(turn.completion_tokens)
    # a recorded first message includes what opens the conversation
    assert length - len(frames.opening) == session.final_tokens


def test_turn_limit_and_empty_recordings(tokenizer: Any, template: Template) -> None:
    """Catches a limit that is not applied, and a session without turns, which would be played forever."""
    assert [len(s.turns) for s in sessions_of(tokenizer, template, [agent(1, 6), agent(2, 2)], max_turns=3)] == [3, 2]
    with pytest.raises(ConfigError, match="no turn within 20 tokens"):
        sessions_of(tokenizer, template, [agent(1, 6)], max_context=20)


def test_joined_sessions_are_as_long_as_promised(tokenizer: Any, template: Template, frames: Frames) -> None:
    """Catches joined sessions outside the range, with a second system message, or different from run to run."""
    parts = sessions_of(tokenizer, template, [agent(seed, 6) for seed in range(5)])
    joined = joined_sessions(parts, frames.markers, 2000, 3000, seed=7)
    assert joined == joined_sessions(parts, frames.markers, 2000, 3000, seed=7)
    assert len(joined) == 5
    assert all(2000 <= session.final_tokens <= 3000 for session in joined)
    assert len({session.final_tokens for session in joined}) > 1
    for session in joined:
        roles = [message.role for turn in session.turns for message in turn.added]
        assert roles.count("system") == 1
        assert roles[0] == "system"
        # what the range counts is what a client that plays the session sends
        ends, markers = len(frames.markers.message_end), len(frames.markers.generation_prompt)
        sizes = [sum(m.tokens for m in turn.added) + markers + turn.completion_tokens + ends for turn in session.turns]
        assert sum(sizes) - ends == session.final_tokens
    with pytest.raises(ConfigError, match="cannot be joined"):
        joined_sessions(parts, frames.markers, 2990, 2991, seed=7)
