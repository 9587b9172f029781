"""Per-request figures in the response: ``meta_info["intentkv"]``, a list with one dictionary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

KEY = "intentkv"


class Figures(Sequence[dict[str, int]]):
    """What one request cost, in tokens.

    SGLang streams ``Req.customized_info`` as one value per output token and concatenates the pieces. A request's figures are known at
    its end, so every slice is empty until then, and the last one holds the single dictionary.
    """

    def __init__(self, req: Any) -> None:
        self._req = req
        self._admitted = False
        self.session_key: str | None = None
        """Session of the request, kept over retractions."""
        self.dead_tokens = 0
        self.pruned_tokens = 0
        self.forced_tokens = 0
        self.target_tokens = 0
        self.cached_tokens = 0
        self.live_cached_tokens = 0
        self.peak_live_tokens = 0

    @classmethod
    def of(cls, req: Any) -> Figures:
        """The figures of ``req``, made on first use; a retracted request keeps its own."""
        if req.customized_info is None:
            req.customized_info = {}
        figures = req.customized_info.get(KEY)
        if figures is None:
            figures = req.customized_info[KEY] = cls(req)
        assert isinstance(figures, Figures)
        return figures

    def admitted(self, cached: int, dead: int) -> bool:
        """Book an admission; True the first time, False after a retraction."""
        first = not self._admitted
        self._admitted = True
        if first:
            self.cached_tokens, self.live_cached_tokens = cached, cached - dead
        self.now(dead)
        return first

    def evicted(self, tokens: int, forced: int, target: int) -> None:
        """Book an eviction event."""
        self.pruned_tokens += tokens
        self.forced_tokens, self.target_tokens = forced, target

    @property
    def logical_tokens(self) -> int:
        """Prompt and generated tokens so far."""
        return len(self._req.origin_input_ids) + len(self._req.output_ids)

    def now(self, dead: int) -> None:
        """Book ``dead`` positions at the request's present size."""
        self.dead_tokens = dead
        self.peak_live_tokens = max(self.peak_live_tokens, self.logical_tokens - dead)

    def as_dict(self) -> dict[str, int]:
        live = self.logical_tokens - self.dead_tokens
        return {
            "logical_tokens": self.logical_tokens,
            "live_tokens": live,
            "dead_tokens": self.dead_tokens,
            "pruned_tokens": self.pruned_tokens,
            "forced_tokens": self.forced_tokens,
            "target_tokens": self.target_tokens,
            "live_cached_tokens": self.live_cached_tokens,
            "peak_live_tokens": max(self.peak_live_tokens, live),
        }

    def __len__(self) -> int:
        return 1

    @overload
    def __getitem__(self, index: int) -> dict[str, int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, int]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, int] | list[dict[str, int]]:
        if isinstance(index, slice):
            return [self.as_dict()] if self._req.finished() else []
        return self.as_dict()
