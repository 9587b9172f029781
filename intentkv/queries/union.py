"""What several query sources want, together."""

from __future__ import annotations

from dataclasses import dataclass

from intentkv.protocols import CaptureRequest, QuerySource
from intentkv.spans import Prompt


@dataclass(frozen=True)
class Union:
    sources: tuple[QuerySource, ...]

    @property
    def decode(self) -> bool:
        return any(source.decode for source in self.sources)

    @property
    def decode_limit(self) -> int:
        return max(source.decode_limit for source in self.sources)

    def requests(self, prompt: Prompt) -> list[CaptureRequest]:
        wanted = [request for source in self.sources for request in source.requests(prompt)]
        return sorted(wanted, key=lambda request: (request.span.end, request.span.start))
