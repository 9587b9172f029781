"""What a head is told about a session: its first turn, turns that its rule alone has seen, and nothing that makes a host wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from intentkv.aggregators.decayed_energy import DecayedEnergy
from intentkv.aggregators.learned import HeadFeatures, Learned, head_queries
from intentkv.head import EXTENDED, HeadConfig, ModelShape, ResidualHead
from intentkv.kernels.paged_keys import PagedKeys, PagedKV
from intentkv.protocols import Captured
from intentkv.sessions import SessionState
from intentkv.spans import Prompt, Span
from intentkv_sglang.keys import PoolKeys

pytestmark = pytest.mark.unit

DECAY, FLOOR = 0.5, 1e-6
SPANS = (Span("system", 0, 6), Span("user", 6, 20), Span("assistant", 20, 30), Span("tool", 30, 50), Span("assistant", 50, 58))


def prompt_of(*spans: Span) -> Prompt:
    end = spans[-1].end
    return Prompt(end + 3, spans, end, True)


def head_of(feature_set="layered", rule="assistant", layers=2, head_dim=8):
    shape = ModelShape(model_type="fake", layers=layers, query_heads=4, kv_heads=2, head_dim=head_dim)
    head = ResidualHead(HeadConfig(rule=rule, feature_set=feature_set, shape=shape)).eval().requires_grad_(False)
    torch.nn.init.normal_(head.output.weight)
    return head


@pytest.mark.parametrize("learned_turns", [0, 1])
@pytest.mark.parametrize("layered", [True, False])
def test_a_session_that_its_rule_began(fake_request, dense, layered, learned_turns):
    """Two assistant turns; the rule alone saw the first ones. Oracle: dense attention. Catches: a head that is told nothing was looked at,
    next to a rule score and a mark that say it was."""
    keys = fake_request(80)
    state, rule, features = SessionState("s"), DecayedEnergy(DECAY), HeadFeatures(DECAY, FLOOR, layered)
    turns, expected = [SPANS[2], SPANS[4]], torch.zeros(58, dtype=torch.float64)
    for number, span in enumerate(turns):
        aggregator = features if len(turns) - number <= learned_turns else rule
        aggregator.absorb(state, keys.turn(span.start, span.end), keys, prompt_of(*SPANS))
        at, seen = torch.arange(span.start, span.end), torch.arange(span.end)
        expected *= torch.exp(torch.tensor(-DECAY, dtype=torch.float64))
        for index in range(2):
            alpha = dense(keys.all_queries[index, at], keys.all_keys[index, seen], keys.scaling, at, seen)
            expected[: span.end] += alpha.square().mean(1).sum(0)
    history = torch.arange(6, 58)
    window = keys.capture(head_queries("assistant", "layered", 8, 3).requests(prompt_of(*SPANS))[-1])
    feature_set = "layered" if layered else "extended"
    extra = features.inputs("assistant", feature_set, state, history, [window], keys, prompt_of(*SPANS)).extra
    for name in ("decayed", "rule"):
        torch.testing.assert_close(extra[:, EXTENDED.index(name)].exp().double(), expected[history] + FLOOR, rtol=1e-3, atol=1e-7)
    assert extra[:, EXTENDED.index("seen")].all()
    last = extra[:, EXTENDED.index("last_turn")].exp()
    assert bool((last > 2 * FLOOR).any()) == bool(learned_turns), "a turn that the head's memory has not seen"


@pytest.mark.parametrize("rule", ["assistant", "intentkv"])
@pytest.mark.parametrize("feature_set", ["published", "extended", "layered"])
def test_before_the_first_answer(fake_request, rule, feature_set):
    """No assistant turn, no memory, and at last no candidate. Catches: a feature that expects what the first prompt cannot have."""
    keys, prompt = fake_request(23), prompt_of(*SPANS[:2])
    learned, state = Learned(rule, head_of(feature_set, rule), DECAY), SessionState("s")
    captured = [keys.capture(wanted) for wanted in head_queries(rule, feature_set, 8, 4).requests(prompt)]
    for some in (captured, []):
        scores = learned.score(state, torch.arange(6, 20), some, keys, prompt)
        assert scores.shape == (14,)
        assert scores.isfinite().all()
    assert learned.score(state, torch.arange(0), captured, keys, prompt).shape == (0,)
    for part in captured:
        learned.absorb(state, part, keys, prompt)
    state.truncate(0)
    learned.absorb(state, keys.turn(20, 23), keys, prompt)
    assert learned.score(state, torch.arange(6, 20), captured, keys, prompt).isfinite().all()


class NoWaits(TorchDispatchMode):
    """Refuses what makes a host wait for a GPU: a number read from a tensor, and shapes that depend on values."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount", "repeat_interleave.Tensor", "equal.default")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function).removeprefix("aten.")
        assert not name.startswith(self.WAITS), f"{name} waits for the device"
        if name.startswith("index"):
            masks = [i for i in args[1] if i is not None and i.dtype == torch.bool] if isinstance(args[1], (list, tuple)) else []
            assert not masks, f"{name} with a mask waits for the device"
        return function(*args, **(kwargs or {}))


class AllLive(PoolKeys):
    """The pool's reader, without its search in the live positions, which are on the host in a server, too."""

    def live_before(self, end: int) -> torch.Tensor:
        return self.live[:end]


@pytest.mark.parametrize("rule", ["assistant", "intentkv"])
@pytest.mark.parametrize("feature_set", ["published", "extended", "layered"])
def test_nothing_is_read_back(rule, feature_set):
    """Memory and scores of a served session. Catches: ``.item()``, ``if tensor``, a mask as an index."""
    generator = torch.Generator().manual_seed(0)
    buffers = [torch.randn(70, 2, 16, generator=generator) for _ in range(3)]
    keys = AllLive(PagedKV(PagedKeys(buffers), PagedKeys(buffers)), torch.arange(1, 62), torch.arange(61), range(3), 0.25)
    prompt, state = prompt_of(*SPANS), SessionState("s")
    learned = Learned(rule, head_of(feature_set, rule, 3, 16), DECAY)
    captured = []
    for wanted in head_queries(rule, feature_set, 8, 4).requests(prompt):
        at = torch.tensor([] if wanted.form == "mean" else wanted.sampled(wanted.span.start), dtype=torch.int64)
        queries = torch.randn(3, *([] if wanted.form == "mean" else [len(at)]), 4, 16, generator=generator)
        captured.append(Captured(wanted.span, wanted.form, at, queries))
    history = torch.arange(6, 50)
    with NoWaits():
        for _ in range(2):
            for part in captured:
                learned.absorb(state, part, keys, prompt)
            scores = learned.score(state, history, captured, keys, prompt)
    assert scores.std() > 0
