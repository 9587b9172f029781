"""A conversation of four turns in seven lanes on one server, and how far each of its log-probabilities is from the dense model's."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial

import torch
from transformers import PreTrainedTokenizerBase

from ..server.harness import Answer, Chat, Client, at_once
from ..server.oracle import DenseModel

PRUNED, WHOLE = 4, 2
BUDGET = 200
FULL = {"method": "full"}
LATEST_STEP = 6
"""An eviction is committed while decoding goes on: with overlap scheduling, and scores that reach the host a pass later, this many decode
steps behind the prompt have been launched at the most."""


@dataclass
class Sequence:
    """Tokens a server computed, and what it said of the last of them."""

    ids: list[int]
    logprobs: torch.Tensor
    """Of the last ``len(logprobs)`` tokens."""

    @classmethod
    def of(cls, prompt: list[int], answer: Answer) -> Sequence:
        measured = [answer.output_logprobs]
        if "input_token_logprobs" in answer.meta:
            measured.insert(0, answer.input_logprobs)
        return cls(prompt + answer.output_ids, torch.cat(measured))

    def error(self, dense: DenseModel, hidden_from: dict[int, int]) -> float:
        """Mean distance to the dense model with ``hidden_from`` masked, in log-probability."""
        start = len(self.ids) - len(self.logprobs)
        expected = dense.forward(self.ids, hidden_from, first=start - 1).of_tokens(self.ids, start)
        return float((self.logprobs - expected).abs().mean())


@dataclass
class LaneRecord:
    """One lane through all turns."""

    name: str
    chat: Chat
    dead: set[int] = field(default_factory=set)
    prompt_end: int = 0
    """Length of the prompt whose prefill was pruned."""
    decoded: Sequence | None = None
    """The turn in which it was pruned: its decode steps."""
    extended: Sequence | None = None
    """The last turn: new tokens over the pruned prefix, then decode steps."""
    cached: int = 0
    known: int = 0

    def hidden_from(self, step: int) -> dict[int, int]:
        return dict.fromkeys(self.dead, self.prompt_end + step)

    def commit_step(self, dense: DenseModel) -> int:
        """The decode step from which on the evicted positions were hidden: the one that explains the pruned turn best."""
        assert self.decoded is not None
        errors = [self.decoded.error(dense, self.hidden_from(step)) for step in range(LATEST_STEP + 1)]
        return errors.index(min(errors))


def play(client: Client, tokenizer: PreTrainedTokenizerBase) -> list[LaneRecord]:
    """Four sessions that are pruned and two that are not, all at once, then all of them and a new one in one batch, twice."""
    lanes = [LaneRecord(f"pruned-{i}", Chat(tokenizer, f"pruned-{i}")) for i in range(PRUNED)]
    lanes += [LaneRecord(f"whole-{i}", Chat(tokenizer, f"whole-{i}")) for i in range(WHOLE)]

    for lane, answer in zip(lanes, at_once([partial(_first, client, lane) for lane in lanes]), strict=True):
        lane.chat.answered(answer.output_ids)

    # Pruned in the middle of the others' decoding; each decodes on over what is left.
    for lane, answer in zip(lanes, at_once([partial(_second, client, lane) for lane in lanes]), strict=True):
        prompt = list(lane.chat.ids)
        lane.prompt_end, lane.decoded = len(prompt), Sequence.of(prompt, answer)
        lane.chat.answered(answer.output_ids)
        if lane.name.startswith("pruned"):
            lane.dead = client.dead(lane.name)
            assert len(lane.dead) == answer.figures["dead_tokens"] > BUDGET / 2

    # Pruned and whole prefixes of different lengths, and none, in one prefill; nobody asks for log-probabilities, so that its graph may
    # run. Wrong keys or values of this turn are read by the next.
    lanes.append(LaneRecord("new", Chat(tokenizer, "new").say("system", 5)))
    prompts = [lane.chat.say("tool", 30 + 10 * i).ask() for i, lane in enumerate(lanes)]
    for lane, answer in zip(lanes, client.generate_batch(prompts, 4, FULL), strict=True):
        assert answer.figures["dead_tokens"] == len(lane.dead)
        # All but the newest token, which nobody has read yet.
        lane.known = len(lane.chat.ids) + 3
        lane.chat.answered(answer.output_ids)

    prompts = [lane.chat.say("user", 90 - 10 * i).ask() for i, lane in enumerate(lanes)]
    answers = client.generate_batch(prompts, 24, FULL, return_logprob=True, logprob_start_len=[lane.known for lane in lanes])
    for lane, prompt, answer in zip(lanes, prompts, answers, strict=True):
        lane.cached, lane.extended = answer.cached_tokens, Sequence.of(prompt, answer)
        assert len(lane.extended.logprobs) == len(prompt) - lane.known - 1 + 24
    return lanes


def _first(client: Client, lane: LaneRecord) -> Answer:
    return client.generate(lane.chat.say("system", 20).say("user", 300).ask(), 8, FULL, session_id=lane.name)


def _second(client: Client, lane: LaneRecord) -> Answer:
    options = {"budget": BUDGET, "hysteresis": 0} if lane.name.startswith("pruned") else FULL
    return client.generate(lane.chat.say("tool", 60).ask(), 32, options, session_id=lane.name, return_logprob=True, logprob_start_len=-1)


def five_percent_off(lane: LaneRecord, step: int) -> list[dict[int, int]]:
    """Two masks that are wrong by 5 % of the live positions: as many dead ones seen, as many live ones hidden."""
    chooser = random.Random(lane.name)
    live = sorted(set(range(lane.prompt_end)) - lane.dead)
    count = len(live) // 20
    seen = lane.hidden_from(step)
    for position in chooser.sample(sorted(lane.dead), count):
        del seen[position]
    hidden = lane.hidden_from(step) | dict.fromkeys(chooser.sample(live, count), lane.prompt_end + step)
    return [seen, hidden]
