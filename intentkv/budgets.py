"""How many history tokens stay."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FixedTokens:
    """C* = max(0, C - |F|): ``tokens`` bounds forced keep and history together; the prompt is never cut to C (IntentKV, section 3)."""

    tokens: int

    def keep_count(self, n_history: int, n_forced: int) -> int:
        return min(n_history, max(0, self.tokens - n_forced))


@dataclass(frozen=True)
class HistoryRatio:
    """A share of the compressible history, at least one token of it."""

    ratio: float

    def keep_count(self, n_history: int, n_forced: int) -> int:
        return min(n_history, max(1, round(self.ratio * n_history)))
