"""The frozen base model, read with transformers: what attention saw, and predictions with some of the past hidden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from intentkv.config import ConfigError
from intentkv.head import ModelShape
from intentkv.scoring import LayerwiseKeys
from intentkv.spans import PromptParser

_ATTENTION = "intentkv_training"


@dataclass
class Reading(LayerwiseKeys):
    """One dense pass over a whole conversation, after RoPE. A ``KeyReader`` in which everything up to ``end`` is live.

    Causal attention makes position j the same in every prefix that holds it, so one pass serves all turns.
    """

    queries: list[torch.Tensor]
    """L tensors [n, H_q, D]."""
    all_keys: list[torch.Tensor]
    """L tensors [n, H_kv, D]."""
    all_values: list[torch.Tensor]
    """L tensors [n, H_kv, D]."""
    scaling: float
    layer_stride: int = 1
    end: int = 0
    query_block: int = 64

    def __post_init__(self) -> None:
        self.layers = range(0, len(self.all_keys), self.layer_stride)
        self.end = self.end or len(self)

    def __len__(self) -> int:
        return self.all_keys[0].shape[0]

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.all_keys[0].device

    @property
    def live(self) -> torch.Tensor:
        """[end] int64: nothing is evicted here."""
        return self.live_before(self.end)

    def live_before(self, end: int) -> torch.Tensor:
        """[min(end, self.end)] int64."""
        return torch.arange(min(end, self.end), device=self.device)

    def keys(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """See :meth:`intentkv.scoring.LayerwiseKeys.keys`."""
        return self.all_keys[layer][positions].float()

    def values(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """See :meth:`intentkv.scoring.LayerwiseKeys.values`."""
        return self.all_values[layer][positions].float()

    def raw_queries(self, positions: Sequence[int]) -> torch.Tensor:
        """[L, n, H_q, D] float32 of the scored layers."""
        at = torch.tensor(positions, device=self.device)
        return torch.stack([self.queries[layer][at] for layer in self.layers]).float()

    def mean_query(self, start: int, end: int) -> torch.Tensor:
        """[L, H_q, D] float32 of the scored layers."""
        return torch.stack([self.queries[layer][start:end].float().mean(0) for layer in self.layers])


class FrozenModel:
    """A transformers model whose attention keeps what it sees, or reads a given past.

    Tensors live on ``device``. Float32 by default: scores of the server's and of this pass then differ by rounding only.
    """

    def __init__(self, folder: str | Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        """Raises:
        ConfigError: no model can be loaded from ``folder``.
        """
        try:
            from intentkv_sglang.vision import ensure_torchvision_imports
        except ModuleNotFoundError:  # training alone needs no server package, nor what it mends
            pass
        else:
            ensure_torchvision_imports()
        from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

        AttentionInterface.register(_ATTENTION, self._attend)
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=_ATTENTION)
        except (OSError, ValueError) as error:
            raise ConfigError(f"No model could be loaded from {str(folder)!r}: {str(error).splitlines()[0]}") from error
        self._model = model.to(device).eval().requires_grad_(False)
        self.device = torch.device(device)
        self.shape = ModelShape.of(model.config)
        self.parser = PromptParser(self.tokenizer)
        self.context = int(getattr(model.config, "max_position_embeddings", 1 << 30))
        self._scaling = self.shape.head_dim**-0.5
        self._seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None = None
        self._past: Reading | None = None
        self._visible = torch.empty(0)
        self._pieces: dict[int, str] = {}

    @property
    def name(self) -> str:
        """Folder or id it was loaded from."""
        return str(self._model.config.name_or_path)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each token."""
        for token in set(ids) - self._pieces.keys():
            self._pieces[token] = self.tokenizer.decode([token])
        return [self._pieces[token] for token in ids]

    def _attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """Attention of one layer: [B, H, n, D] each, post-RoPE."""
        self._scaling = scaling
        if self._seen is not None:
            self._seen.append(tuple(t[0].transpose(0, 1).contiguous() for t in (query, key, value)))  # type: ignore[arg-type]
        group = query.shape[1] // key.shape[1]
        attend = torch.nn.functional.scaled_dot_product_attention
        if self._past is None:
            out = attend(query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1), is_causal=True, scale=scaling)
            return out.transpose(1, 2), None
        batch, cut = self._visible.shape
        layer = module.layer_idx
        past_key = self._past.all_keys[layer][:cut].transpose(0, 1).expand(batch, -1, -1, -1)
        past_value = self._past.all_values[layer][:cut].transpose(0, 1).expand(batch, -1, -1, -1)
        new = query.shape[2]
        causal = torch.ones(new, new, dtype=torch.bool, device=query.device).tril().expand(batch, 1, new, new)
        seen = torch.cat([self._visible[:, None, None].expand(batch, 1, new, cut), causal], -1)
        keys = torch.cat([past_key, key], 2).repeat_interleave(group, 1)
        values = torch.cat([past_value, value], 2).repeat_interleave(group, 1)
        return attend(query, keys, values, attn_mask=seen, scale=scaling).transpose(1, 2), None

    @torch.no_grad()
    def read(self, ids: Sequence[int], layer_stride: int = 1) -> Reading:
        """One dense pass over ``ids``, of which every ``layer_stride``-th layer will be scored."""
        self._seen = []
        try:
            self._model.base_model(input_ids=torch.tensor([list(ids)], device=self.device), use_cache=False)
            queries, keys, values = (list(part) for part in zip(*self._seen, strict=True))
        finally:
            self._seen = None
        return Reading(queries, keys, values, self._scaling, layer_stride)

    @torch.no_grad()
    def predict(self, past: Reading, ids: Sequence[int], cut: int, visible: torch.Tensor, scored: Sequence[int]) -> torch.Tensor:
        """Teacher-forced predictions behind ``cut`` when of the past only ``visible`` can be read.

        Args:
            past: of at least ``ids[:cut]``; positions stay logical, hidden ones are gone from attention.
            ids: the conversation; ``ids[cut:]`` is read.
            visible: [B, cut] bool, one row a keep-set.
            scored: offsets behind the cut, from 1, of the tokens to predict.

        Returns:
            [B, len(scored), V] float32 log-probabilities.
        """
        batch = visible.shape[0]
        future = torch.tensor([list(ids[cut:])], device=self.device)
        self._past, self._visible = past, visible.to(self.device)
        try:
            hidden = self._model.base_model(
                input_ids=future.expand(batch, -1),
                position_ids=torch.arange(cut, len(ids), device=self.device)[None].expand(batch, -1),
                use_cache=False,
            ).last_hidden_state
        finally:
            self._past = None
        before = torch.tensor([k - 1 for k in scored], device=self.device)
        logits: torch.Tensor = self._model.get_output_embeddings()(hidden[:, before])
        return logits.float().log_softmax(-1)
