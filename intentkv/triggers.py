"""When an eviction happens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OverTarget:
    """After prefill, once live tokens exceed the target by more than ``hysteresis`` (IntentKV, settings)."""

    hysteresis: int = 512

    def fires(self, n_live: int, n_target: int) -> bool:
        return n_live > n_target + self.hysteresis
