"""QueryMemory and the IntentKV rule score (IntentKV, section 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from intentkv.protocols import Captured, KeyReader
from intentkv.sessions import SessionState
from intentkv.spans import Prompt

_MEMORY = "query_memory"


def update_query_memory(memory: torch.Tensor | None, encoding: torch.Tensor, decay: float) -> torch.Tensor:
    """M_t = e^-lambda M_{t-1} + Enc(q_t), unit-normalised along D per layer and head.

    Args:
        memory: [L, H_q, D] float32 or None at the first turn.
        encoding: [L, H_q, D] float32, mean post-RoPE query of the actionable span.
    """
    mixed = encoding if memory is None else math.exp(-decay) * memory + encoding
    return torch.nn.functional.normalize(mixed, dim=-1)


@dataclass(frozen=True)
class QueryMemoryRule:
    """rule_j = sum over layers and heads of softmax_{j in H}(M . K_j / sqrt(D))."""

    decay: float

    def absorb(self, state: SessionState, captured: Captured, keys: KeyReader, prompt: Prompt) -> None:
        if captured.form == "mean":
            state.memory[_MEMORY] = update_query_memory(state.memory.get(_MEMORY), captured.queries, self.decay)

    def score(
        self, state: SessionState, history: torch.Tensor, captured: Sequence[Captured], keys: KeyReader, prompt: Prompt
    ) -> torch.Tensor:
        memory = state.memory.get(_MEMORY)
        if memory is None:
            return torch.zeros(history.shape[0], dtype=torch.float32, device=history.device)
        return keys.scores(memory[:, None], history, "mass")
