"""Which session a request belongs to (architecture D7): its ``session_id``, or the chain of tokens it continues."""

from __future__ import annotations

import itertools

from intentkv.sessions import SessionState, SessionStore
from intentkv_sglang.radix_cache import IntentKVRadixCache


class SessionResolver:
    """Finds, continues or forks session states.

    Without a ``session_id``, a session hangs on the tree: radix nodes carry the keys of the sessions that went through them. A request
    that continues the newest prompt of a chain's only owner is that session's next turn, also when its generated part was re-tokenised
    and diverges. A request that leaves the chain earlier, or continues a session that is just running, is a fork with a state of its own.
    """

    def __init__(self, cache: IntentKVRadixCache, store: SessionStore) -> None:
        self._cache = cache
        self._store = store
        self._numbers = itertools.count()

    def by_key(self, key: str) -> SessionState:
        """The state of a known session, made anew when the store has dropped it."""
        return self._store.get(key) or self._store.put(SessionState(key))

    def resolve(self, session_id: str | None, node_id: int, matched: int) -> SessionState:
        """The state of a request whose prefix match of ``matched`` tokens ended at ``node_id``."""
        if session_id is not None:
            return self.by_key(f"id:{session_id}")
        owners = sorted(self._cache.owners(node_id))
        chains = [o for o in owners if o.startswith("chain:")]
        if len(owners) == 1 and chains:
            state = self._store.get(chains[0])
            if state is None:
                # The store dropped it: the chain goes on under its old name, without its scores.
                return self.by_key(chains[0])
            if matched + 1 >= state.tip and not state.active:
                return state
        key = f"chain:{next(self._numbers)}"
        parents = [s for s in (self._store.get(c) for c in chains) if s is not None]
        parent = max(parents, key=lambda s: s.tip, default=None)
        return self._store.put(parent.fork(key, matched) if parent else SessionState(key))
