"""Which session a request belongs to (decision D7), on a real radix cache."""

from __future__ import annotations

import pytest
import torch

from intentkv.sessions import SessionStore
from intentkv_sglang.identity import SessionResolver

pytestmark = pytest.mark.unit


class Conversation:
    """Turns against a cache: each resolves its session as the runtime does, then runs to its end."""

    def __init__(self, engine, capacity=8):
        self.engine = engine
        self.store = SessionStore(capacity)
        self.resolver = SessionResolver(engine.cache, self.store)
        self._count = 0

    def arrive(self, ids, output=(90,), session_id=None):
        """The request's first pass: its session and the request."""
        self._count += 1
        req = self.engine.request(f"r{self._count}", ids, output=output, session_id=session_id)
        assert self.engine.admit(req)
        matched = len(req.prefix_indices)
        state = self.resolver.resolve(session_id, req.last_node, matched)
        self.engine.cache.add_owner(req.last_node, state.key)
        state.truncate(matched)
        state.active.add(req.rid)
        return state, req

    def complete(self, state, req):
        """Prefill and generate; the finished path carries the session's name."""
        self.engine.extend_admitted(req)
        state.tip = len(req.origin_input_ids)
        self.engine.generate(req)
        self.engine.cache.add_owner(req.last_node, state.key)
        state.active.discard(req.rid)
        state.turns += 1

    def turn(self, ids, output=(90,), session_id=None):
        state, req = self.arrive(ids, output, session_id)
        self.complete(state, req)
        return state


@pytest.fixture
def conversation(engine):
    return Conversation(engine)


PROMPT = list(range(10))


def test_the_next_turn_continues(conversation):
    first = conversation.turn(PROMPT, output=(20, 21, 22))
    second = conversation.turn([*PROMPT, 20, 21, 22, 30, 31])
    assert second is first
    assert conversation.turn([*PROMPT, 20, 21, 22, 30, 31, 90, 40]) is first
    assert len(conversation.store) == 1


@pytest.mark.parametrize("generated", [[20, 99, 22], [99, 21, 22], [20], []])
def test_retokenised_answer_continues(conversation, generated):
    """The client sends the answer back as text: its tokens may differ from those that were sampled, from the very first on."""
    first = conversation.turn(PROMPT, output=(20, 21, 22))
    assert conversation.turn([*PROMPT, *generated, 30, 31]) is first


def test_the_prompt_again_continues(conversation):
    """SGLang matches at most all but the last token."""
    first = conversation.turn(PROMPT, output=(20,))
    assert conversation.turn(PROMPT) is first


@pytest.mark.parametrize("kept", [1, 5, 8])
def test_earlier_divergence_forks(conversation, kept):
    """An edited history is another session; it takes along what belongs to the shared part only."""
    first = conversation.turn(PROMPT, output=(20, 21))
    first.memory = {"scores": torch.arange(11.0), "heads": torch.ones(2, 3, 4)}
    first.scored_length = 11
    fork = conversation.turn([*PROMPT[:kept], 50, 51, 52])
    assert fork is not first
    assert fork.memory.keys() == {"scores"}
    assert fork.memory["scores"].tolist() == list(range(kept))
    assert fork.scored_length == kept
    assert fork.turns == 1
    assert first.memory["scores"].numel() == 11
    # Each of the two goes on as itself.
    assert conversation.turn([*PROMPT, 20, 21, 60]) is first
    assert conversation.turn([*PROMPT[:kept], 50, 51, 52, 90, 61]) is fork


def test_continuing_a_running_session_forks(conversation):
    """Two branches of one conversation at the same time: each its own memory from there on, and the whole of the past."""
    first = conversation.turn(PROMPT, output=(20, 21, 22))
    first.memory = {"scores": torch.arange(13.0), "heads": torch.ones(2, 3, 4)}
    branch = [*PROMPT, 20, 21, 22]
    state, req = conversation.arrive([*branch, 30, 31])
    assert state is first
    other, other_req = conversation.arrive([*branch, 40, 41])
    assert other is not first
    assert other.memory.keys() == {"scores", "heads"}
    assert other.memory["scores"].numel() == 12
    other.memory["heads"] += 1
    assert torch.equal(first.memory["heads"], torch.ones(2, 3, 4)), "the branches share a tensor"
    conversation.complete(state, req)
    conversation.complete(other, other_req)


def test_a_stem_of_two_sessions_belongs_to_neither(conversation):
    """A third conversation with the same system prompt is not a continuation of one of them."""
    first = conversation.turn([*PROMPT, 20, 21])
    second = conversation.turn([*PROMPT, 30, 31])
    third = conversation.turn([*PROMPT, 40, 41])
    assert len({first.key, second.key, third.key}) == 3


def test_a_prompt_shared_with_an_explicit_session(conversation):
    """Its end is the tip of a chain and of an explicit session: whoever branches off there is new."""
    conversation.turn(PROMPT, output=(20, 21), session_id="x")
    chain = conversation.turn(PROMPT, output=(30, 31))
    assert conversation.turn([*PROMPT, 40, 41]) is not chain
    # Behind the stem the chain is alone.
    assert conversation.turn([*PROMPT, 30, 31, 50]) is chain


def test_unrelated_requests_are_strangers(conversation):
    first = conversation.turn(PROMPT)
    other = conversation.turn(range(50, 60))
    assert other is not first
    assert (other.memory, other.turns, other.scored_length) == ({}, 1, 0)


def test_a_dropped_session_goes_on_under_its_name(engine):
    """Losing a state loses scores only: the nodes carry its name, so a new name would make them look shared for ever."""
    conversation = Conversation(engine, capacity=1)
    first = conversation.turn(PROMPT, output=(20, 21))
    conversation.turn(range(50, 60))
    assert conversation.store.get(first.key) is None
    again = conversation.turn([*PROMPT, 20, 21, 30])
    assert again is not first
    assert again.key == first.key
    for path, entry in engine.tree().items():
        if path[1][:10] == tuple(PROMPT):
            assert engine.cache.owners(entry.node.id) == {first.key}


def test_explicit_ids(conversation):
    """``session_id`` decides, whatever the tokens; ids and chains never meet."""
    first = conversation.turn(PROMPT, session_id="x")
    assert conversation.turn(range(50, 60), session_id="x") is first
    assert conversation.turn([*PROMPT, 90, 30], session_id="y") is not first
    chain = conversation.turn([*PROMPT, 90, 40])
    assert chain not in (first, conversation.store.get("id:y"))
    assert chain.key.startswith("chain:")
    assert conversation.turn([*PROMPT, 90, 40, 90, 41], session_id=chain.key) is not chain


def test_a_chain_does_not_inherit_from_an_explicit_session(conversation):
    """Decision D12: what an explicit session remembers is private to whoever knows its id."""
    first = conversation.turn(PROMPT, output=(20, 21), session_id="x")
    first.memory = {"scores": torch.arange(11.0)}
    assert conversation.turn([*PROMPT, 20, 21, 30]).memory == {}


def test_names_are_not_reused(engine):
    """After a flush the tree is gone, and with it all owners; a state that is left over must not be found by a newcomer."""
    conversation = Conversation(engine)
    keys = {conversation.turn(PROMPT).key}
    engine.flush()
    conversation.store.clear()
    keys.add(conversation.turn(PROMPT).key)
    assert len(keys) == 2
