"""Max-pooled attention mass of the observation window (SnapKV, arXiv 2404.14469, section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from intentkv.protocols import Captured, KeyReader
from intentkv.sessions import SessionState
from intentkv.spans import Prompt


@dataclass(frozen=True)
class WindowPool:
    """Attention mass of the window's queries, summed over layers and heads, then max-pooled over ``pool`` neighbouring live positions.

    The softmax runs over all live positions a query sees, as in the model; one keep-set serves all layers and heads.
    """

    pool: int

    def absorb(self, state: SessionState, captured: Captured, keys: KeyReader, prompt: Prompt) -> None:
        """Keeps no memory between turns."""

    def score(
        self, state: SessionState, history: torch.Tensor, captured: Sequence[Captured], keys: KeyReader, prompt: Prompt
    ) -> torch.Tensor:
        if not history.numel():
            return torch.zeros(0, dtype=torch.float32, device=history.device)
        live = keys.live
        total = torch.zeros(live.shape[0], dtype=torch.float32, device=history.device)
        for window in captured:
            total += keys.scores(window.queries, live, "mass", window.positions)
        pooled = torch.nn.functional.max_pool1d(total[None, None], self.pool, 1, self.pool // 2)[0, 0]
        return pooled[torch.searchsorted(live, history)]
