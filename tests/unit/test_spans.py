"""Message boundaries and roles read off token ids.

Oracle: the tokenizer's own chat template, applied to ever longer conversations: where the token ids of i messages end, message i ends.
"""

from __future__ import annotations

import logging
import time
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from intentkv.spans import Prompt, PromptParser, Span
from intentkv.templates import TEMPLATES

pytestmark = pytest.mark.unit

NAMES = sorted(TEMPLATES)
ROLES = ["system", "user", "assistant", "tool"]

# Pieces that meet the markers in every way: newlines next to a header, marker look-alikes, text in several bytes a character.
# No mix of them is a marker.
contents = st.lists(
    st.sampled_from(
        ["", "\n", "\n\n", " ", "user\n", "assistant", "the tool said", "<|im_", "|start|>", "</tool_response>", "é漢🙂", "data"]
    ),
    max_size=6,
).map("".join)
conversations = st.lists(st.tuples(st.sampled_from(ROLES), contents), min_size=1, max_size=8)


def as_messages(conversation):
    return [{"role": role, "content": content} for role, content in conversation]


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def chat_ids(tokenizer, conversation, generation):
    text = tokenizer.apply_chat_template(as_messages(conversation), tokenize=False, add_generation_prompt=generation)
    return encode(tokenizer, text)


def boundaries(name, tokenizer, conversation):
    """[(role, end)] of the spans the conversation must give, by tokenising its beginnings."""
    roles = [role for role, _ in conversation]
    # Qwen joins neighbouring tool results into one message.
    joined = [name == "qwen" and roles[i : i + 2] == ["tool", "tool"] for i in range(len(roles))]
    return [(role, len(chat_ids(tokenizer, conversation[: i + 1], False))) for i, role in enumerate(roles) if not joined[i]]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(conversation=conversations, generation=st.booleans())
def test_random_conversations(tokenizers, name, conversation, generation):
    """Catches: shifted boundaries, a lost separator or BOS, roles misread when a header's newline merges with the content."""
    tokenizer = tokenizers[name]
    ids = chat_ids(tokenizer, conversation, generation)
    prompt = PromptParser(tokenizer).parse(ids, 0)
    expected = boundaries(name, tokenizer, conversation)
    assert prompt.recognised
    assert [(span.role, span.end) for span in prompt.messages] == expected
    assert [span.start for span in prompt.messages] == [0, *(end for _, end in expected[:-1])]
    assert prompt.generation_start == expected[-1][1]
    assert prompt.length == len(ids)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(conversation=conversations)
def test_render_agrees_with_the_chat_template(tokenizers, name, conversation):
    """Catches: a renderer that writes other markers or separators than the model was trained on."""
    if name == "qwen":  # message by message, neighbouring tool results cannot be joined
        conversation = [m for i, m in enumerate(conversation) if i == 0 or m[0] != "tool" or conversation[i - 1][0] != "tool"]
    template, tokenizer = TEMPLATES[name], tokenizers[name]
    text = template.bos + "".join(template.render(role, content) for role, content in conversation) + template.generation_prompt()
    assert text == tokenizer.apply_chat_template(as_messages(conversation), tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("name", NAMES)
def test_template_is_detected(tokenizers, name):
    assert PromptParser(tokenizers[name]).template is TEMPLATES[name]


@pytest.mark.parametrize(
    ("role", "meaning"),
    [("developer", "system"), ("function", "tool"), ("ipython", "tool"), ("tool", "tool"), ("critic", "unknown"), ("userdata", "unknown")],
)
@pytest.mark.parametrize("name", NAMES)
def test_other_role_names(tokenizers, name, role, meaning):
    """Catches: a name that only starts like a role ("userdata") taken for it; roles of other APIs lost."""
    template, tokenizer = TEMPLATES[name], tokenizers[name]
    first = template.render("user", "hi")
    ids = encode(tokenizer, first + template.render(role, "{x}") + template.render("assistant", "yes"))
    middle = PromptParser(tokenizer).parse(ids, 0).messages[1]
    assert middle.role == meaning
    assert middle.start == len(encode(tokenizer, first))


def test_role_names_as_other_clients_write_them(tokenizers):
    """A client that writes the API's role name into the header itself."""
    parser = PromptParser(tokenizers["chatml"])
    for name, role in {"developer": "system", "function": "tool", "ipython": "tool"}.items():
        assert parser.parse(encode(tokenizers["chatml"], f"<|im_start|>{name}\nx<|im_end|>\n"), 0).messages == (
            Span(role, 0, len(encode(tokenizers["chatml"], f"<|im_start|>{name}\nx<|im_end|>\n"))),
        )


@pytest.mark.parametrize("opening", ["", "<think>\n", "<think>\n\n</think>\n\n", None])
def test_generation_prompts(tokenizers, opening):
    """Catches: a generation prompt that opens or skips reasoning taken for a prefilled answer, so that its own tokens may be evicted."""
    tokenizer = tokenizers["qwen"]
    body = encode(tokenizer, "<|im_start|>user\nhi<|im_end|>\n")
    header = "<|im_start|>assistant" if opening is None else f"<|im_start|>assistant\n{opening}"
    prompt = PromptParser(tokenizer).parse(body + encode(tokenizer, header), 0)
    assert prompt.generation_start == len(body)
    assert prompt.messages == (Span("user", 0, len(body)),)


@pytest.mark.parametrize("text", ["The answer", "\n", "<think>\nI wonder"])
def test_unfinished_assistant_message(tokenizers, text):
    """Catches: the text of a prefilled or retracted answer taken for the generation prompt and so never evictable."""
    tokenizer = tokenizers["qwen"]
    body = encode(tokenizer, "<|im_start|>user\nhi<|im_end|>\n")
    ids = body + encode(tokenizer, f"<|im_start|>assistant\n{text}")
    prompt = PromptParser(tokenizer).parse(ids, 0)
    assert prompt.messages[1:] == (Span("assistant", len(body), len(ids)),)
    assert prompt.generation_start == prompt.length == len(ids)


def roles_and_texts(tokenizer, text):
    ids = encode(tokenizer, text)
    prompt = PromptParser(tokenizer).parse(ids, 0)
    return [(span.role, tokenizer.decode(ids[span.start : span.end])) for span in prompt.messages]


def test_markers_in_content(tokenizers):
    """A user quotes markers and the tokenizer makes real ones of them. Catches: the message falls apart, its question is not kept."""
    system = "<|im_start|>system\nBe brief.<|im_end|>\n"
    user = "<|im_start|>user\nWhat do <|im_end|> and <|im_start|> and <|im_start|>foo mean?<|im_end|>\n"
    reply = "<|im_start|>assistant\nThey delimit.<|im_end|>\n"
    assert roles_and_texts(tokenizers["chatml"], system + user + reply) == [("system", system), ("user", user), ("assistant", reply)]
    only = "<|im_start|><|im_start|><|im_start|>?<|im_start|>!"
    assert roles_and_texts(tokenizers["chatml"], only) == [("unknown", only)]


def test_truncated_messages(tokenizers):
    """Turns cut off by a token limit have no end marker. Catches: the next tool result swallowed by the assistant's turn."""
    parts = [
        ("user", "<|im_start|>user\nhi<|im_end|>\n"),
        ("assistant", "<|im_start|>assistant\nI will"),
        ("assistant", "<|im_start|>assistant\nagain"),
        ("tool", "<|im_start|>tool\n42"),
        ("tool", "<|im_start|>user\n<tool_response>\n42"),
        ("user", "<|im_start|>user\n"),
    ]
    assert roles_and_texts(tokenizers["chatml"], "".join(text for _, text in parts)) == parts


def test_eom_closes_a_llama_message(tokenizers):
    text = "<|start_header_id|>assistant<|end_header_id|>\n\ncall<|eom_id|>"
    odd = "<|start_header_id|>critic<|end_header_id|>\n\nno<|eot_id|>"
    assert roles_and_texts(tokenizers["llama-3"], text + odd) == [("assistant", text), ("unknown", odd)]


def test_beginning_cut_off(tokenizers):
    """Text in front of the first marker belongs to the first message; alone with a generation prompt it is a message of its own."""
    lost = "of the system prompt<|im_end|>\n"
    user = "<|im_start|>user\nhi<|im_end|>\n"
    assert roles_and_texts(tokenizers["chatml"], lost + user) == [("user", lost + user)]
    assert roles_and_texts(tokenizers["chatml"], "a story" + "<|im_start|>assistant\n") == [("unknown", "a story")]


@pytest.mark.parametrize("name", NAMES)
def test_every_cut_of_a_conversation(tokenizers, name):
    """Catches: an exception, overlapping spans or uncovered positions for a prompt that starts or stops in mid-marker."""
    tokenizer = tokenizers[name]
    parser = PromptParser(tokenizer)
    ids = chat_ids(tokenizer, [("system", "Be brief."), ("user", "hi"), ("tool", "1\n2"), ("assistant", "ok")], True)
    for start in range(len(ids)):
        for stop in range(start, len(ids) + 1):
            prompt = parser.parse(ids[start:stop], 0)
            covered = [p for span in prompt.messages for p in range(span.start, span.end)]
            assert covered == list(range(prompt.generation_start))
            assert prompt.generation_start <= prompt.length == stop - start


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_arbitrary_ids(tokenizers, name, data):
    """Any ids, among them hashes that SGLang writes over image tokens. Catches: an exception in the scheduler."""
    tokenizer = tokenizers[name]
    marks = tokenizer.convert_tokens_to_ids([TEMPLATES[name].start, TEMPLATES[name].end])
    names = [i for role in ROLES for i in encode(tokenizer, role)]
    ids = st.one_of(st.sampled_from(marks), st.sampled_from(names), st.integers(0, 400), st.sampled_from([-1, 2**31, 2**40]))
    prompt = PromptParser(tokenizer).parse(data.draw(st.lists(ids, max_size=40)), 0)
    covered = [p for span in prompt.messages for p in range(span.start, span.end)]
    assert covered == list(range(prompt.generation_start))


@pytest.mark.parametrize("container", [list, tuple, lambda ids: array("q", ids), np.array])
def test_containers(tokenizers, container):
    """SGLang holds token ids in an ``array``."""
    ids = chat_ids(tokenizers["chatml"], [("user", "hi"), ("assistant", "ok")], True)
    parser = PromptParser(tokenizers["chatml"])
    assert parser.parse(container(ids), 0) == parser.parse(ids, 0)


@pytest.mark.parametrize("cached", [-1, 0, 3, 5, 9])
def test_fallback_is_the_uncached_suffix(tokenizers, cached):
    """Catches: a fallback that names a system prefix, or a span outside the prompt."""
    start = min(max(cached, 0), 5)
    expected = Prompt(5, (Span("unknown", start, 5),) if start < 5 else (), 5, recognised=False)
    no_marker = encode(tokenizers["chatml"], "hello")[:1] * 5
    for parser in (PromptParser(None), PromptParser(tokenizers["chatml"])):
        prompt = parser.parse(no_marker, cached)
        assert prompt == expected
        assert prompt.system_end == 0
        assert prompt.actionable == (expected.messages[0] if expected.messages else None)


def test_empty_prompt(tokenizers):
    for parser in (PromptParser(None), PromptParser(tokenizers["qwen"])):
        assert parser.parse([], 0) == Prompt(0, (), 0, recognised=False)


def test_unknown_template_is_said_once(make_tokenizer, caplog):
    """Catches: a warning a request, or silence about lost roles."""
    with caplog.at_level(logging.WARNING):
        parser = PromptParser(make_tokenizer(["<|turn|>"]))
        for _ in range(3):
            assert not parser.parse([1, 2, 3], 0).recognised
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert parser.template is None


def test_nothing_to_say_with_a_template_or_without_a_tokenizer(tokenizers, caplog):
    with caplog.at_level(logging.WARNING):
        PromptParser(None).parse([1], 0)
        PromptParser(tokenizers["chatml"]).parse([1], 0)
    assert not caplog.records


def test_half_of_the_markers_is_no_template(make_tokenizer):
    assert PromptParser(make_tokenizer(["<|im_start|>"])).template is None


class _UnknownForAll:
    """A tokenizer that makes one unknown token of whatever it does not know."""

    def encode(self, text, add_special_tokens=True):
        return [0]

    def decode(self, token_ids):
        return "<unk>"


def test_unknown_token_is_no_marker():
    """Catches: any template recognised because all its markers map to one id."""
    assert PromptParser(_UnknownForAll()).template is None


def test_no_work_per_token(tokenizers):
    """Catches: a Python loop over the text. Compares with one such loop over the same prompt, best of five each."""
    ids = chat_ids(tokenizers["chatml"], [("system", "x"), ("user", "hi"), ("assistant", "ok")], True)
    ids = array("q", ids[:5] + [7] * 200_000 + ids[5:])
    parser = PromptParser(tokenizers["chatml"])

    def best(run):
        times = []
        for _ in range(5):
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
        return min(times)

    assert best(lambda: parser.parse(ids, 0)) < best(lambda: [i for i in ids if i == -1]) / 2


def test_actionable_and_system_of_a_prompt():
    spans = (Span("system", 0, 4), Span("user", 4, 8), Span("assistant", 8, 9), Span("tool", 9, 12), Span("assistant", 12, 14))
    prompt = Prompt(14, spans, 14, True)
    assert prompt.system_end == 4
    assert prompt.actionable == spans[3]
    assert prompt.of_role("user", "tool") == [spans[1], spans[3]]
    assert Prompt(5, (spans[4],), 5, True).actionable is None
