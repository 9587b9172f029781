"""Session states: what a session remembers between turns. Losing one only loses scores, never correctness."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch


@dataclass
class SessionState:
    """Memory of one session. The tensors in ``memory`` belong to whichever aggregator named them.

    A tensor of one or two dimensions has a row a position; one of three dimensions has none.
    """

    key: str
    memory: dict[str, torch.Tensor] = field(default_factory=dict)
    scored_length: int = 0
    """Positions ``[0, scored_length)`` that the score-space memory covers."""
    tip: int = 0
    """Prompt length of the session's newest request, in tokens."""
    turns: int = 0
    active: set[str] = field(default_factory=set)
    """Ids of this session's running requests."""
    pruned_tokens: int = 0
    logical_tokens: int = 0
    live_tokens: int = 0

    def truncate(self, length: int) -> None:
        """Forget per-position memory from ``length`` on: other tokens stand there now."""
        self.scored_length = min(self.scored_length, length)
        for name, value in self.memory.items():
            if value.dim() <= 2:
                self.memory[name] = value[:length]

    def fork(self, key: str, length: int) -> SessionState:
        """A new session that continues this one's first ``length`` tokens.

        Per-position memory is cut to the shared prefix. Memory without positions is carried over only when the whole
        session is shared: otherwise it would hold intents from beyond the fork.
        """
        whole = length + 1 >= self.tip
        memory = {}
        for name, value in self.memory.items():
            if value.dim() <= 2:
                memory[name] = value[:length].clone()
            elif whole:
                memory[name] = value.clone()
        return SessionState(key=key, memory=memory, scored_length=min(self.scored_length, length))


class SessionStore:
    """At most ``capacity`` session states, least recently used dropped first (IntentKV keeps 1,024)."""

    def __init__(self, capacity: int = 1024) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.capacity = capacity
        self._states: OrderedDict[str, SessionState] = OrderedDict()

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[SessionState]:
        """The states, least recently used first."""
        return iter(self._states.values())

    def get(self, key: str) -> SessionState | None:
        """The state of ``key`` and mark it recently used, or None."""
        state = self._states.get(key)
        if state is not None:
            self._states.move_to_end(key)
        return state

    def put(self, state: SessionState) -> SessionState:
        """Store ``state``; drops the least recently used state that has no running request when over capacity."""
        self._states[state.key] = state
        self._states.move_to_end(state.key)
        while len(self._states) > self.capacity:
            victim = next((k for k, s in self._states.items() if not s.active and k != state.key), None)
            if victim is None:
                break
            del self._states[victim]
        return state

    def clear(self) -> None:
        self._states.clear()
