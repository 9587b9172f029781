"""Scores without queries: position only, and uniformly random."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from intentkv.protocols import Captured, KeyReader
from intentkv.sessions import SessionState
from intentkv.spans import Prompt
from intentkv.transfer import to_device


@dataclass(frozen=True)
class Recency:
    """Later positions score higher (StreamingLLM's window; its sinks are forced keep)."""

    def absorb(self, state: SessionState, captured: Captured, keys: KeyReader, prompt: Prompt) -> None:
        """Keeps no memory."""

    def score(
        self, state: SessionState, history: torch.Tensor, captured: Sequence[Captured], keys: KeyReader, prompt: Prompt
    ) -> torch.Tensor:
        return history.float()


@dataclass(frozen=True)
class Random:
    """Uniform scores, reproducible from the seed, the session and the prompt's length."""

    seed: int

    def absorb(self, state: SessionState, captured: Captured, keys: KeyReader, prompt: Prompt) -> None:
        """Keeps no memory."""

    def score(
        self, state: SessionState, history: torch.Tensor, captured: Sequence[Captured], keys: KeyReader, prompt: Prompt
    ) -> torch.Tensor:
        # crc32 and not hash(): the same on every rank and in every process
        seed = zlib.crc32(f"{self.seed}/{state.key}/{prompt.length}".encode())
        generator = torch.Generator().manual_seed(seed)
        return to_device(torch.rand(history.shape[0], generator=generator), history.device)
