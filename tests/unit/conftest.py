"""A made-up request (keys and queries by position) and small Hugging Face tokenizers with real chat templates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
import torch

from intentkv.protocols import Captured, CaptureRequest
from intentkv.scoring import LayerwiseKeys
from intentkv.spans import Span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Layer ids that differ from their index: a mix-up of the two shows.
LAYERS = (1, 3)


@dataclass
class FakeRequest(LayerwiseKeys):
    """Post-RoPE keys and queries of ``length`` positions; a ``KeyReader`` that refuses to read evicted ones."""

    length: int
    q_heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    seed: int = 0
    dead: set[int] = field(default_factory=set)
    layers: tuple[int, ...] = LAYERS

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.scaling = self.dim**-0.5
        # Scaled up so that attention is peaked, as it is in a trained model.
        self.all_queries = 2 * torch.randn(len(self.layers), self.length, self.q_heads, self.dim, generator=generator)
        self.all_keys = 2 * torch.randn(len(self.layers), self.length, self.kv_heads, self.dim, generator=generator)

    def keys(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        evicted = self.dead.intersection(positions.tolist())
        assert not evicted, f"keys of evicted positions were read: {sorted(evicted)}"
        return self.all_keys[self.layers.index(layer), positions]

    def values(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        return 2 * self.keys(layer, positions)

    @property
    def live(self) -> torch.Tensor:
        return torch.tensor([p for p in range(self.length) if p not in self.dead], dtype=torch.int64)

    def live_before(self, end: int) -> torch.Tensor:
        return self.live[self.live < end]

    def capture(self, wanted: CaptureRequest) -> Captured:
        """The queries an engine would hand over for ``wanted``."""
        span = wanted.span
        if wanted.form == "mean":
            mean = self.all_queries[:, span.start : span.end].mean(1)
            return Captured(span, "mean", torch.empty(0, dtype=torch.int64), mean)
        stride = max(1, -(-len(span) // wanted.limit)) if wanted.limit else 1
        positions = torch.arange(span.start, span.end, stride)
        return Captured(span, "raw", positions, self.all_queries[:, positions])

    def no_queries(self, wanted: CaptureRequest) -> Captured:
        """The same when the whole span was cached: nothing was computed."""
        empty = torch.empty(0, dtype=torch.int64)
        return Captured(wanted.span, "raw", empty, torch.empty(len(self.layers), 0, self.q_heads, self.dim))

    def turn(self, start: int, end: int) -> Captured:
        """Every query of an assistant turn."""
        return self.capture(CaptureRequest(Span("assistant", start, end), "raw"))


@pytest.fixture(scope="session")
def fake_request() -> type[FakeRequest]:
    return FakeRequest


def dense_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scaling: float,
    query_positions: torch.Tensor | None = None,
    key_positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """The textbook: [n_q, H_q, D] and [n, H_kv, D] to attention probabilities [H_q, n_q, n] in float64, all at once."""
    repeated = keys.double().repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    weights = torch.exp(torch.einsum("ihd,jhd->hij", queries.double(), repeated) * scaling)
    if query_positions is not None and key_positions is not None:
        weights = weights * (key_positions[None, :] <= query_positions[:, None])
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total, torch.zeros_like(weights))


@pytest.fixture(scope="session")
def dense() -> Callable[..., torch.Tensor]:
    return dense_attention


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Qwen joins neighbouring tool results into one user message.
QWEN = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{% set name = 'ipython' if m.role == 'tool' else m.role %}"
    "{{ '<|start_header_id|>' + name + '<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

# Byte-level pieces as GPT-4 and Qwen cut them: newlines merge with newlines, so a header's last token depends on the content.
PIECES = r"""[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""


def build_tokenizer(markers: list[str], template: str | None = None) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on a few lines, with ``markers`` as single special tokens."""
    # Imported here: they take seconds, and only the tests of spans need them.
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PIECES), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    roles = ["system", "user", "assistant", "tool"]
    # "userdata" is learnt as "user" + more, so a role name is a prefix of other headers in token ids, too
    corpus = [f"{role}\n\n\n{role}\nthe tool said hello\n\n" for role in roles] * 20 + ["userdata\n<tool_response>\nsystematic\n"] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=340, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|unk|>"]
    )
    core.train_from_iterator(corpus, trainer)
    core.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in markers])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    return build_tokenizer


@pytest.fixture(scope="session")
def tokenizers() -> dict[str, PreTrainedTokenizerFast]:
    """One tokenizer a known template, by the template's name."""
    return {
        "chatml": build_tokenizer(["<|im_start|>", "<|im_end|>"], CHATML),
        "qwen": build_tokenizer(["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"], QWEN),
        "llama-3": build_tokenizer(["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"], LLAMA3),
    }
