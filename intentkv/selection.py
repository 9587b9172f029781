"""Which positions stay: the always-kept set and a deterministic top-k over the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from intentkv.spans import Prompt


@dataclass(frozen=True)
class ForcedKeep:
    """The always-kept set F = [0, pi) + [q_s, N): system prefix and newest actionable span (IntentKV, section 3), plus options.

    The generation prompt behind the span belongs to it.
    """

    system: bool = True
    actionable: bool = True
    sinks: int = 0
    recent: int = 0
    protected: Sequence[tuple[int, int]] = field(default_factory=tuple)

    def mask(self, prompt: Prompt) -> torch.Tensor:
        """[prompt.length] bool on the CPU, True where a position may not be evicted."""
        n = prompt.length
        forced = torch.zeros(n, dtype=torch.bool)
        if self.system:
            forced[: prompt.system_end] = True
        span = prompt.actionable
        if self.actionable and span is not None:
            forced[span.start : span.end] = True
        forced[prompt.generation_start :] = True
        forced[: self.sinks] = True
        if self.recent:
            forced[max(0, n - self.recent) :] = True
        for start, end in self.protected:
            forced[start:end] = True
        return forced


def top_positions(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Mask of the ``count`` best of ``scores`` ([n] float32): [n] bool on the same device.

    Ties go to the later position: without evidence, recent text is the better bet. Deterministic.
    """
    n = scores.shape[0]
    count = max(0, min(count, n))
    # A stable ascending sort leaves the later of two equal scores nearer to the end.
    order = torch.sort(scores.detach(), stable=True).indices
    # index_fill_ and not kept[...] = True: an assigned number is copied to a GPU, and the host waits for the copy.
    return torch.zeros(n, dtype=torch.bool, device=scores.device).index_fill_(0, order[n - count :], True)
