"""What every method must do, whatever it scores by: one matrix over all of them."""

from __future__ import annotations

import pytest
import torch

from intentkv.config import Config
from intentkv.head import HeadConfig, ModelShape, ResidualHead, save_head
from intentkv.methods import build_method, method_info, method_names
from intentkv.selection import top_positions
from intentkv.sessions import SessionState
from intentkv.spans import Prompt, Span

pytestmark = pytest.mark.unit

SCORING = [name for name in method_names() if name != "full"]
CONVERSATION = [
    ("system", 6), ("user", 5), ("assistant", 9), ("tool", 40), ("assistant", 7), ("tool", 12), ("tool", 5), ("assistant", 3),
    ("user", 8),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def heads(tmp_path_factory):
    """A random head for each learned method, shaped for the fake request."""
    shape = ModelShape(model_type="fake", layers=2, query_heads=4, kv_heads=2, head_dim=8)
    folder = tmp_path_factory.mktemp("heads")
    for rule, feature_set, residual in (("intentkv", "published", "additive"), ("assistant", "layered", "log")):
        head = ResidualHead(HeadConfig(rule=rule, feature_set=feature_set, residual=residual, shape=shape))
        torch.nn.init.normal_(head.output.weight, generator=torch.Generator().manual_seed(1))
        save_head(head, folder / f"{rule}-learned")
    HEADS["folder"] = folder
    return folder


HEADS = {}


def method_of(name, **options):
    """The method, with the head made for it."""
    head = HEADS["folder"] / name if method_info(name).needs_head else None
    return build_method(name, Config(head=head, **options))


def prompt_of(conversation, generation=3):
    spans, end = [], 0
    for role, size in conversation:
        spans.append(Span(role, end, end + size))
        end += size
    return Prompt(end + generation, tuple(spans), end, True)


def turn(name, request, prompt, capture, state=None, forced=True):
    """One request as an engine serves it: capture, absorb, score, select. Returns (scores, history, dead)."""
    method = method_of(name, window=8, pool=3, turn_queries=4)
    state = SessionState("session") if state is None else state
    captured = [capture(wanted) for wanted in method.queries.requests(prompt)]
    for part in captured:
        method.aggregator.absorb(state, part, request, prompt)
    mask = method.forced.mask(prompt) if forced else torch.zeros(prompt.length, dtype=torch.bool)
    history = torch.tensor([p for p in request.live.tolist() if p < prompt.length and not mask[p]], dtype=torch.int64)
    scores = method.aggregator.score(state, history, captured, request, prompt)
    return scores, history, history[~top_positions(scores, history.numel() // 3)]


def check(scores, history):
    assert scores.shape == history.shape
    assert scores.dtype == torch.float32
    assert torch.isfinite(scores).all()


@pytest.mark.parametrize("name", SCORING)
def test_a_whole_conversation(fake_request, name):
    """Catches: scores of the wrong shape or type, NaN, an evicted system prefix, user question or generation prompt."""
    prompt = prompt_of(CONVERSATION)
    request = fake_request(prompt.length)
    scores, history, dead = turn(name, request, prompt, request.capture)
    check(scores, history)
    assert dead.numel() == history.numel() - history.numel() // 3
    kept = set(range(6)) | set(range(prompt.actionable.start, prompt.length))
    assert not kept & set(dead.tolist())


@pytest.mark.parametrize("name", SCORING)
def test_a_session_with_evictions(fake_request, name):
    """The conversation grows turn by turn and loses positions each time. Catches: keys of evicted positions read (the fake refuses)."""
    full = prompt_of(CONVERSATION)
    request, state = fake_request(full.length), SessionState("session")
    for count in (2, 4, 6, 9):
        prompt = prompt_of(CONVERSATION[:count])
        scores, history, dead = turn(name, request, prompt, request.capture, state)
        check(scores, history)
        request.dead |= set(dead.tolist())
    assert request.dead


@pytest.mark.parametrize("name", SCORING)
def test_deterministic(fake_request, name):
    """Ranks must agree. Catches: scores from a global random state, from hash(), or from the order of a set."""
    prompt = prompt_of(CONVERSATION)
    results = []
    for _ in range(2):
        request = fake_request(prompt.length)
        results.append(turn(name, request, prompt, request.capture))
        torch.rand(7)  # someone else draws from the global generator
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("name", SCORING)
@pytest.mark.parametrize("captured", ["empty", "none"])
def test_without_queries(fake_request, name, captured):
    """Everything cached: an engine hands over empty captures or none. Catches: a crash, or NaN from a mean of nothing."""
    prompt = prompt_of(CONVERSATION)
    request = fake_request(prompt.length)
    if captured == "empty":
        scores, history, _ = turn(name, request, prompt, request.no_queries)
    else:
        history = torch.arange(6, 40)
        scores = method_of(name).aggregator.score(SessionState("s"), history, [], request, prompt)
    check(scores, history)


@pytest.mark.parametrize("name", SCORING)
def test_empty_history(fake_request, name):
    """Everything is forced keep. Catches: pooling or softmax over nothing."""
    prompt = prompt_of([("system", 4), ("user", 6)])
    request = fake_request(prompt.length)
    scores, history, dead = turn(name, request, prompt, request.capture)
    assert history.numel() == 0
    check(scores, history)
    assert dead.numel() == 0


@pytest.mark.parametrize("name", SCORING)
def test_one_token(fake_request, name):
    request = fake_request(1)
    prompt = Prompt(1, (Span("unknown", 0, 1),), 1, False)
    scores, history, _ = turn(name, request, prompt, request.capture, forced=False)
    assert history.tolist() == [0]
    check(scores, history)


@pytest.mark.parametrize("name", SCORING)
def test_unrecognised_template(fake_request, name):
    """Only the uncached suffix is known. Catches: a method that needs roles."""
    prompt = Prompt(40, (Span("unknown", 30, 40),), 40, False)
    request = fake_request(40)
    scores, history, dead = turn(name, request, prompt, request.capture)
    check(scores, history)
    assert history.tolist() == [p for p in range(30) if name != "streamingllm" or p >= 4]
    assert dead.numel()


@pytest.mark.parametrize("name", SCORING)
def test_protected_and_recent_are_honoured(fake_request, name):
    """Catches: a preset that drops the configuration's sinks and recent window."""
    prompt = prompt_of([("user", 30), ("assistant", 30)], generation=0)
    forced = method_of(name, sinks=5, recent=7).forced.mask(prompt)
    assert forced[:5].all()
    assert forced[-7:].all()


def test_full_never_scores():
    assert build_method("full", Config()).aggregator is None
    assert all(method_of(name).aggregator is not None for name in SCORING)


@pytest.mark.parametrize("name", method_names())
def test_every_method_says_what_it_is(name):
    info = method_info(name)
    assert info.name == name
    assert info.summary
    assert info.source


def test_unknown_method():
    for call in (lambda: method_info("magic"), lambda: build_method("magic", Config()), lambda: method_info("../full")):
        with pytest.raises(KeyError):
            call()


def test_streamingllm_keeps_the_newest(fake_request):
    """Oracle: the last third of the history, by position."""
    prompt = prompt_of(CONVERSATION)
    request = fake_request(prompt.length)
    _, history, dead = turn("streamingllm", request, prompt, request.capture)
    assert dead.tolist() == history.tolist()[: history.numel() - history.numel() // 3]


def test_random_depends_on_seed_session_and_length(fake_request):
    """Catches: one permutation for all requests, which would always evict the same positions."""

    def scores(seed, key, length):
        prompt = Prompt(length, (), length, True)
        aggregator = build_method("random", Config(seed=seed)).aggregator
        return aggregator.score(SessionState(key), torch.arange(30), [], fake_request(length), prompt)

    base = scores(0, "a", 40)
    for other in (scores(1, "a", 40), scores(0, "b", 40), scores(0, "a", 41)):
        assert not torch.equal(base, other)
    spread = torch.stack([scores(0, str(i), 40) for i in range(200)]).mean(0)
    assert ((spread > 0.4) & (spread < 0.6)).all()
