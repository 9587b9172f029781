"""The learned residual on a rule score (IntentKV, section 3, phase 2): module, inputs, and its folder on disk.

A head's folder holds ``head.safetensors`` and ``config.json``; nothing is unpickled.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from intentkv.config import ConfigError

WEIGHTS_FILE = "head.safetensors"
CONFIG_FILE = "config.json"
SCHEMA: Final = "intentkv-head/1"

RuleName = Literal["intentkv", "assistant"]
FeatureSet = Literal["published", "extended", "layered"]
Residual = Literal["additive", "log"]

EXTENDED: tuple[str, ...] = (
    "rule",
    "last_turn",
    "decayed",
    "peak",
    "window",
    "memory_mass",
    "neighbourhood",
    "token_age",
    "turn_age",
    "seen",
    "offset",
    "message_length",
    "system",
    "user",
    "tool",
    "assistant",
    "unknown",
)
"""Columns of :attr:`HeadInputs.extra` of the ``extended`` feature set, in order. The first seven are logarithms of scores.
``layered`` has, behind them, the logarithms of energies layer by layer: of the last turn, decayed, and of the observation window; then the
logarithms of the squared norms of its values, layer by layer."""

QUERY_KEYS = 256
"""Key vectors of the current query that the cross-attention reads at most, evenly spaced."""
_HEADS = 4
Width = Annotated[int, Field(ge=_HEADS, multiple_of=_HEADS)]
"""Of a head's cross-attention and hidden layer."""
_LIMIT = 20.0
"""Residuals are clamped to this many nats where they are exponentiated."""


class ModelShape(BaseModel):
    """What a head must agree on with the model it is served with."""

    model_config = ConfigDict(frozen=True)

    model_type: str
    """Family, as in the model's ``config.json``."""
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """The shape in a Hugging Face ``config`` object."""
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        heads = int(text.num_attention_heads)
        return cls(
            model_type=text.model_type,
            layers=text.num_hidden_layers,
            query_heads=heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        )


class HeadConfig(BaseModel):
    """``config.json`` of a head."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal["intentkv-head/1"] = SCHEMA
    rule: RuleName
    """The rule score that the residual was trained on."""
    feature_set: FeatureSet = "layered"
    residual: Residual = "log"
    """``additive``: s = rule + r, as published. ``log``: s + floor = (rule + floor) e^r. Both give s = rule at r = 0."""
    floor: float = Field(default=1e-6, gt=0)
    """What a score of zero counts as where logarithms are taken."""
    shape: ModelShape
    layer_stride: int = 1
    width: Width = 128
    """The published one."""
    label: str = ""
    """What the head was trained to predict."""
    data_sha256: str = ""
    """Of the log files that the examples were made from."""
    metrics: dict[str, float] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)

    @property
    def extra_features(self) -> int:
        """Columns that the feature set adds to the published features."""
        return extra_features(self.feature_set, len(range(0, self.shape.layers, self.layer_stride)))

    @property
    def method(self) -> str:
        """The method that the head belongs to."""
        return f"{self.rule}-learned"

    def problem(self, shape: ModelShape, layer_stride: int) -> str | None:
        """One sentence when the head must not be used on a model of ``shape``, else None."""
        if self.layer_stride != layer_stride:
            return f"The head was trained with layer_stride {self.layer_stride}; serve it with the same, not {layer_stride}."
        wrong = [
            f"{name} {getattr(self.shape, name)} (the model has {getattr(shape, name)})"
            for name in ModelShape.model_fields
            if getattr(self.shape, name) != getattr(shape, name)
        ]
        return f"The head was trained for {', '.join(wrong)}; give a head trained for this model." if wrong else None


@dataclass(frozen=True)
class HeadInputs:
    """Features of ``n`` candidate positions at one eviction, optionally of a batch of B evictions (leading dimension)."""

    keys: torch.Tensor
    """[B?, n, D] float32: post-RoPE keys averaged over layers and KV heads."""
    memory: torch.Tensor
    """[B?, D]: QueryMemory averaged over layers and heads; zeros where there is none."""
    query_keys: torch.Tensor
    """[B?, n_q, D]: like ``keys``, of the current query's tokens."""
    rule: torch.Tensor
    """[B?, n]: the rule score."""
    extra: torch.Tensor
    """[B?, n, E]: columns of the feature set (E = 0 for ``published``)."""
    query_padding: torch.Tensor | None = None
    """[B, n_q] bool, True where a batch's query key is padding."""

    def batched(self) -> HeadInputs:
        """The same as a batch of one."""
        return HeadInputs(self.keys[None], self.memory[None], self.query_keys[None], self.rule[None], self.extra[None])

    def beside(self, rule: torch.Tensor, floor: float) -> HeadInputs:
        """The same candidates and features with another rule's scores ([n]); ``floor`` is the head's."""
        extra = self.extra.clone()
        if extra.shape[1]:
            extra[:, EXTENDED.index("rule")] = torch.log(rule.clamp_min(0) + floor)
        return replace(self, rule=rule, extra=extra)

    def to(self, device: torch.device | str) -> HeadInputs:
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return replace(self, **moved)


def extra_features(feature_set: FeatureSet, layers: int) -> int:
    """Columns that ``feature_set`` adds to the published features, with ``layers`` scored layers."""
    if feature_set == "published":
        return 0
    return len(EXTENDED) + (4 * layers if feature_set == "layered" else 0)


class ResidualHead(nn.Module):
    """r_j = alpha MLP(phi_j + c_j), phi_j = [K_j; M; K_j M; rule_j; extra], c_j = cross-attention of phi_j over the current query's keys.

    The output layer starts at zero, so the first score is the rule's, to the bit, and gradients still flow. With D = 128 and the published
    features there are 214,274 parameters. Features are standardised with statistics of the training data (buffers, not parameters).
    """

    shift: torch.Tensor
    scale: torch.Tensor

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.shape.head_dim
        features = 3 * dim + 1 + config.extra_features
        self.features = features
        width = config.width
        self.candidate = nn.Linear(features, width, bias=False)
        self.key = nn.Linear(dim, width)
        self.value = nn.Linear(dim, width)
        # The added zero key (no parameter) gives attention a place to go where the current query has no tokens.
        self.attention = nn.MultiheadAttention(width, _HEADS, batch_first=True, add_zero_attn=True)
        self.hidden = nn.Linear(features + width, width)
        self.output = nn.Linear(width, 1)
        self.alpha = nn.Parameter(torch.ones(()))
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)
        self.register_buffer("shift", torch.zeros(features))
        self.register_buffer("scale", torch.ones(features))

    def phi(self, inputs: HeadInputs) -> torch.Tensor:
        """[B, n, features] float32, not standardised."""
        memory = inputs.memory[:, None].expand_as(inputs.keys)
        return torch.cat([inputs.keys, memory, inputs.keys * memory, inputs.rule[..., None], inputs.extra], -1)

    def read_out(self, inputs: HeadInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual [B, n] and the cross-attention read-out c [B, n, width] of a batch."""
        phi = (self.phi(inputs) - self.shift).mul_(self.scale)
        keys, values = self.key(inputs.query_keys), self.value(inputs.query_keys)
        read, _ = self.attention(self.candidate(phi), keys, values, key_padding_mask=inputs.query_padding, need_weights=False)
        hidden = nn.functional.gelu(self.hidden(torch.cat([phi, read], -1)))
        return self.alpha * self.output(hidden)[..., 0], read

    def logits(self, inputs: HeadInputs, residual: torch.Tensor) -> torch.Tensor:
        """What a loss compares, in the order of the scores: [B, n]. Additive: the score; log: log(score + floor)."""
        if self.config.residual == "additive":
            return inputs.rule + residual
        return torch.log(inputs.rule.clamp_min(0) + self.config.floor) + residual

    @torch.no_grad()
    def scores(self, inputs: HeadInputs) -> torch.Tensor:
        """Scores of one eviction's candidates (no batch dimension): [n] float32."""
        if inputs.rule.shape[0] == 0:
            return inputs.rule
        residual = self.read_out(inputs.batched())[0][0]
        if self.config.residual == "additive":
            return inputs.rule + residual
        return inputs.rule + (inputs.rule + self.config.floor) * torch.expm1(residual.clamp(-_LIMIT, _LIMIT))


def save_head(head: ResidualHead, folder: Path) -> None:
    """Write ``folder`` (made when missing)."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().cpu().float().contiguous() for name, value in head.state_dict().items()}
    save_file(weights, str(folder / WEIGHTS_FILE))
    (folder / CONFIG_FILE).write_text(head.config.model_dump_json(indent=2) + "\n", encoding="utf-8")


def load_head_config(folder: Path) -> HeadConfig:
    """``config.json`` of the head in ``folder``.

    Raises:
        ConfigError: missing or not a head's.
    """
    file = folder / CONFIG_FILE
    try:
        return HeadConfig.model_validate(json.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"Head {str(folder)!r} has no readable {CONFIG_FILE}; give a folder that 'intentkv train fit' wrote.") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{str(file)!r} is not a head's configuration: {where}: {first['msg']}; train the head again.") from error
    except ValueError as error:
        raise ConfigError(f"{str(file)!r} is not valid JSON; give a folder that 'intentkv train fit' wrote.") from error


@lru_cache(maxsize=8)
def load_head(folder: Path) -> ResidualHead:
    """The head in ``folder``, in evaluation mode on the CPU; loaded once a process.

    Raises:
        ConfigError: a file is missing or damaged, or the weights do not fit the configuration.
    """
    head = ResidualHead(load_head_config(folder))
    try:
        weights = load_file(str(folder / WEIGHTS_FILE))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"Head {str(folder)!r} has no readable {WEIGHTS_FILE}; give a folder that 'intentkv train fit' wrote.") from error
    expected = head.state_dict()
    wrong = [name for name in sorted({*expected, *weights}) if _shape(expected, name) != _shape(weights, name)]
    if wrong:
        raise ConfigError(f"{WEIGHTS_FILE} of head {str(folder)!r} does not fit its {CONFIG_FILE} ({wrong[0]}); train the head again.")
    head.load_state_dict(weights)
    return head.eval().requires_grad_(False)


PACKAGED = Path(__file__).parent / "heads"
"""Heads for the default model (SmolLM2-135M), one folder a learned method, named after it."""


def packaged_head(method: str) -> Path | None:
    """The head that comes with the package for ``method`` on the default model, or None."""
    folder = PACKAGED / method
    return folder if (folder / CONFIG_FILE).is_file() else None


def _shape(weights: dict[str, torch.Tensor], name: str) -> torch.Size | None:
    return weights[name].shape if name in weights else None
