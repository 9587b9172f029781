"""The radix cache with dead positions: ledgers, slots, owners and eviction, on SGLang's real pools.

Oracle: ``Engine.check`` reads the raw tree, rows and free lists; owners and locks are kept here by token path.
"""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import Phase, given, note, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from intentkv_sglang.radix_cache import IntegrityError, IntentKVRadixCache
from intentkv_sglang.tree_component import node_tag

pytestmark = pytest.mark.unit

FULL = ComponentType.FULL
SESSIONS = ["a", "b"]


def kill(engine, node_id, positions, req=None):
    """Prune as the runtime does: the tree first, then the running request's row, then the slots."""
    dead = torch.tensor(positions, dtype=torch.int64)
    slots = engine.cache.prune(node_id, dead)
    assert slots.numel() == len(positions)
    if req is not None:
        engine.rows.req_to_token[req.req_pool_idx, dead] = 0
    engine.cache.free_slots(slots)


def held(req):
    return req.extra_key, tuple((req.origin_input_ids + req.output_ids)[: req.cache_protected_len])


class Program:
    """A random sequence of everything that happens to the tree; what the tree must hold is kept here by token path."""

    def __init__(self, engine_class, seed):
        self.random = random.Random(seed)
        self.engine = engine_class(slots=self.random.randint(24, 60), rows=4, need_sort=self.random.random() < 0.5)
        self.cache: IntentKVRadixCache = self.engine.cache
        self.known = [[0, 1, 2, 0, 1, 2]]
        self.pins = []
        self.tags = []
        self.retracted = []
        self.count = self.pruned = 0

    def tokens(self):
        return self.random.choices(range(3), k=self.random.randint(0, 8))

    def pick(self, things):
        return self.random.choice(list(things))

    @property
    def holders(self):
        return [held(r) for r in self.engine.running] + [path for path, _ in self.pins]

    def owners(self, path):
        return {owner for owner, (key, held) in self.tags if key == path[0] and held[: len(path[1])] == path[1]}

    def forget_evicted(self):
        """An owner's path ends where the tree's does."""
        paths = set(self.engine.tree())
        kept = []
        for owner, (key, held) in self.tags:
            length = max((len(p) for k, p in paths if k == key and held[: len(p)] == p), default=0)
            kept.append((owner, (key, held[:length])))
        self.tags = kept

    def running(self, mid_prefill):
        return [r for r in self.engine.running if self.engine.mid_prefill(r) == mid_prefill]

    def step(self):
        """One possible action."""
        tree, decoding = self.engine.tree(), self.running(mid_prefill=False)
        actions = {self.match: 1, self.evict: 2}
        if self.engine.rows.available_size():
            actions[self.request_arrives] = 6
            if self.retracted:
                actions[self.readmit] = 3
        if self.running(mid_prefill=True):
            actions[self.next_chunk] = 5
        if decoding:
            actions |= {self.decode: 3, self.retract: 2}
        if self.engine.running:
            actions[self.finish_or_abort] = 3
        else:
            actions[self.flush] = 0.1
        if tree:
            actions |= {self.prune: 6, self.tag: 1, self.pin: 1}
        if self.pins:
            actions[self.unpin] = 2
        (action,) = self.random.choices(list(actions), weights=list(actions.values()))
        note(action.__name__)
        action()
        self.forget_evicted()

    def request_arrives(self):
        base = self.pick(self.known)
        ids = [*base[: self.random.randint(0, len(base))], *self.tokens()] or [0]
        self.known.append(ids)
        self.count += 1
        self.start(self.engine.request(f"r{self.count}", ids, extra_key=self.pick([None, None, None, "salt"])))

    def start(self, req):
        if self.engine.admit(req, self.pick([None, None, 3])):
            self.engine.extend_admitted(req)

    def readmit(self):
        self.start(self.retracted.pop())

    def next_chunk(self):
        req = self.pick(self.running(mid_prefill=True))
        if self.engine.admit(req, self.pick([None, 2])):
            self.engine.extend_admitted(req)
        else:
            self.engine.abort(req)

    def decode(self):
        reqs = self.running(mid_prefill=False)
        if self.engine.allocator.available_size() + self.cache.evictable_size() >= len(reqs):
            self.engine.decode(*reqs)

    def finish_or_abort(self):
        req = self.pick(self.engine.running)
        self.known.append([*req.origin_input_ids, *req.output_ids])
        self.engine.abort(req)

    def retract(self):
        req = self.pick(self.running(mid_prefill=False))
        self.engine.retract(req)
        self.retracted.append(req)

    def tag(self):
        path, entry = self.pick(self.engine.tree().items())
        owner = self.pick(SESSIONS)
        self.cache.add_owner(entry.node.id, owner)
        self.tags.append((owner, path))

    def pin(self):
        path, entry = self.pick(self.engine.tree().items())
        self.cache.inc_lock_ref(entry.node.id)
        self.pins.append((path, entry.node.id))

    def unpin(self):
        _, node_id = self.pins.pop(self.random.randrange(len(self.pins)))
        self.cache.dec_lock_ref(node_id)

    def prune(self):
        """Of a running request or of an idle path, whatever ``prunable_mask`` allows."""
        tree = self.engine.tree()
        req = self.pick([None, *self.running(mid_prefill=False)])
        if req is not None:
            path, node_id = held(req), req.last_node
        else:
            path, entry = self.pick(tree.items())
            node_id = entry.node.id
        owner, locks = self.pick(SESSIONS), int(req is not None)
        allowed = []
        for length in sorted(len(p) for k, p in tree if k == path[0] and path[1][: len(p)] == p):
            node_path = (path[0], path[1][:length])
            locked = sum(k == path[0] and p[:length] == node_path[1] for k, p in self.holders)
            allowed += [self.owners(node_path) <= {owner} and locked == locks] * (length - tree[node_path].start)
        assert self.cache.prunable_mask(node_id, owner, locks).tolist() == allowed
        choice = [p for p, ok in enumerate(allowed) if ok and not tree[path].dead[p]]
        choice = sorted(self.random.sample(choice, self.random.randint(0, len(choice))))
        free = self.engine.allocator.available_size()
        kill(self.engine, node_id, choice, req)
        self.pruned += len(choice)
        assert self.engine.allocator.available_size() == free + len(choice)
        assert set(self.engine.tree()) == set(tree), "pruning changed token ids, lengths or nodes"
        assert self.engine.match_length(path[1], path[0]) == len(path[1])

    def match(self):
        ids, key = (*self.pick(self.known), *self.tokens()), self.pick([None, "salt"])
        longest = 0
        for other, path in self.engine.tree():
            if other == key:
                common = next((i for i, (x, y) in enumerate(zip(path, ids, strict=False)) if x != y), min(len(path), len(ids)))
                longest = max(longest, common)
        assert self.engine.match_length(ids, key) == longest

    def evict(self):
        amount = self.random.randint(1, 20)
        before, evictable = self.engine.allocator.available_size(), self.cache.evictable_size()
        result = self.cache.evict(EvictParams(num_tokens=amount))
        gained = self.engine.allocator.available_size() - before
        assert result.num_tokens_evicted == gained
        assert gained >= min(amount, evictable)

    def flush(self):
        self.engine.flush()
        self.pins, self.tags = [], []

    def check(self):
        tree = self.engine.check([path for path, _ in self.pins])
        for path, entry in tree.items():
            assert self.cache.owners(entry.node.id) == self.owners(path)
            assert self.cache.dead_mask(entry.node.id).tolist() == entry.dead
            assert self.cache.path_length(entry.node.id) == len(path[1])
        self.cache.check_integrity(sum(r.kv.kv_allocated_len - r.cache_protected_len for r in self.engine.running))

    def finish(self):
        """Everything that ran can be given back: nothing is lost and nothing pins."""
        for req in list(self.engine.running):
            self.engine.abort(req)
        for _, node_id in self.pins:
            self.cache.dec_lock_ref(node_id)
        self.cache.evict(EvictParams(num_tokens=self.engine.allocator.size))
        assert self.engine.allocator.available_size() == self.engine.allocator.size


@settings(deadline=None, max_examples=25, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(seed=st.integers(0, 2**32))
def test_random_programs(engine_class, seed):
    """Catches: a ledger that counts dead positions or forgets live ones, a slot freed twice or lost, a dead mark lost in a split, a row
    that names a freed slot, a stale dead count, an owner lost in a split, a prune that another reader sees."""
    program = Program(engine_class, seed)
    for _ in range(80):
        program.step()
        program.check()
    program.finish()
    assert program.pruned, "the program tested nothing"


# ---- Directed ----


@pytest.fixture
def chain(engine):
    """A running request of 10 prompt tokens, 3 of them dead."""
    req = engine.request("chain", range(10))
    engine.prefill(req)
    kill(engine, req.last_node, [2, 3, 7], req)
    return req


def sizes(engine):
    return engine.cache.evictable_size(), engine.cache.protected_size()


def test_split_through_a_pruned_node(engine, chain):
    """Situation #5221, and the prompt-boundary split: dead offsets must go to the right half, on host and device alike."""
    assert engine.match_length([0, 1, 2, 99]) == 3
    tree = engine.check()
    assert tree[None, (0, 1, 2)].dead == [False, False, True]
    assert tree[None, tuple(range(10))].dead == [False, False, True, True, False, False, False, True, False, False]
    engine.cache.evict(EvictParams(num_tokens=100))
    engine.check()
    assert engine.match_length(range(10)) == 10
    assert sizes(engine) == (0, 7)


def test_locks_move_live_tokens_only(engine, chain):
    """Catches: evictable or protected off by the dead count, and a wrong delta, which SGLang's admission adds up."""
    node = chain.last_node
    assert sizes(engine) == (0, 7)
    engine.abort(chain)
    # The path got no new token: the sampled one has no KV yet.
    assert sizes(engine) == (7, 0)
    assert engine.cache.inc_lock_ref(node).delta == 7
    assert sizes(engine) == (0, 7)
    assert engine.cache.inc_lock_ref(node).delta == 0
    engine.cache.dec_lock_ref(node)
    assert sizes(engine) == (0, 7)
    engine.cache.dec_lock_ref(node)
    assert sizes(engine) == (7, 0)


def test_lock_below_a_locked_pruned_node_moves_the_rest(engine, chain):
    longer = engine.request("longer", [*range(10), 20, 21, 22], output=[5])
    engine.prefill(longer)
    assert sizes(engine) == (3, 7)
    node = engine.tree()[None, (*range(10), 20, 21, 22)].node.id
    assert engine.cache.inc_lock_ref(node).delta == 3
    assert sizes(engine) == (0, 10)
    engine.cache.dec_lock_ref(node)


def test_prune_debits_the_ledger_of_the_lock_state(engine, chain):
    kill(engine, chain.last_node, [0, 1], chain)
    assert sizes(engine) == (0, 5)
    engine.abort(chain)
    kill(engine, chain.last_node, [4])
    assert sizes(engine) == (4, 0)


@pytest.mark.parametrize("positions", [[3], [1, 2, 4], [9, 10], [10], [-1, 0], [-1]])
def test_prune_refuses_dead_and_foreign_positions(engine, chain, positions):
    """Nothing may have changed when it refuses: a half-done prune would free slots that nodes still name."""
    before = engine.tree()
    with pytest.raises(ValueError, match=r"dead already|outside the path"):
        engine.cache.prune(chain.last_node, torch.tensor(positions))
    assert engine.tree() == before


def test_prune_of_nothing(engine, chain):
    assert engine.cache.prune(chain.last_node, torch.empty(0, dtype=torch.int64)).numel() == 0
    root = engine.cache.tree_core.root_node.id
    assert engine.cache.prune(root, torch.empty(0, dtype=torch.int64)).numel() == 0
    with pytest.raises(ValueError, match="path of 0 tokens"):
        engine.cache.prune(root, torch.tensor([0]))


def test_shared_nodes_are_not_prunable(engine):
    """Decision D6: a stem that another session went through, or that another request reads, stays whole."""
    cache = engine.cache
    first, second = (engine.request(f"r{i}", [0, 1, 2, 3, 10 + i, 11 + i]) for i in range(2))
    engine.prefill(first)
    assert cache.prunable_mask(first.last_node, "a", locks=1).tolist() == [True] * 6
    engine.prefill(second)
    stem, own = [False] * 4, [True] * 2
    # Two locks on the stem.
    assert cache.prunable_mask(first.last_node, "a", locks=1).tolist() == stem + own
    assert cache.prunable_mask(second.last_node, "b", locks=1).tolist() == stem + own
    cache.add_owner(first.last_node, "a")
    cache.add_owner(second.last_node, "b")
    engine.abort(second)
    # One lock, two owners.
    assert cache.prunable_mask(first.last_node, "a", locks=1).tolist() == stem + own
    assert cache.prunable_mask(second.last_node, "b", locks=0).tolist() == stem + own
    # Somebody else's part is nobody's to prune, whatever its locks.
    assert cache.prunable_mask(second.last_node, "a", locks=0).tolist() == stem + [False] * 2


def test_retracted_request_frees_its_private_part_only(engine, chain):
    """Situation #33783: retraction after a prune. The tree keeps the prompt, dead positions included; readmission finds it."""
    for _ in range(3):
        engine.decode(chain)
    free = engine.allocator.available_size()
    engine.retract(chain)
    assert engine.allocator.available_size() == free + 3
    tree = engine.check()
    assert tree[None, tuple(range(10))].dead.count(True) == 3
    assert sizes(engine) == (7, 0)
    engine.prefill(chain)
    assert engine.cache.n_dead(chain.last_node) == 3
    assert chain.cache_protected_len == 14
    engine.check()


@pytest.mark.parametrize("finished", [True, False])
def test_duplicate_of_a_pruned_path_frees_its_own_slots(engine, finished):
    """Two requests compute the same tokens; the first one's copy is pruned before the second one is inserted (mini-sglang #142)."""
    first = engine.request("first", range(8))
    second = engine.request("second", [*range(8), 20], output=[1] if finished else [1, 2])
    # Both admitted before either is in the tree, as in one batch.
    assert engine.admit(second)
    engine.prefill(first)
    kill(engine, first.last_node, [1, 2, 3], first)
    free = engine.allocator.available_size()
    engine.extend_admitted(second)
    # Nine slots computed, eight of them duplicates and back again.
    assert engine.allocator.available_size() == free - 1
    tree = engine.check()
    assert tree[None, (*range(8), 20)].dead == [False, True, True, True] + [False] * 5
    if not finished:
        assert engine.cache.n_dead(second.last_node) == 3


def test_fully_dead_nodes_can_be_evicted(engine, chain):
    """Catches: an eviction that stops at a node that frees nothing, or hands an empty or dead value to the allocator."""
    engine.abort(chain)
    longer = engine.request("longer", [*range(10), 20, 21], output=[5])
    engine.prefill(longer)
    leaf = engine.tree()[None, (*range(10), 20, 21)].node.id
    kill(engine, leaf, [10, 11])
    free = engine.allocator.available_size()
    # The dead leaf frees nothing, its parent seven.
    assert engine.cache.evict(EvictParams(num_tokens=1)).num_tokens_evicted == 7
    assert engine.allocator.available_size() == free + 7
    assert engine.tree() == {}
    assert engine.cache.component.total_dead == 0


def test_only_dead_nodes_left(engine, chain):
    engine.abort(chain)
    kill(engine, chain.last_node, [0, 1, 4, 5, 6, 8, 9])
    assert sizes(engine) == (0, 0)
    assert engine.cache.evict(EvictParams(num_tokens=5)).num_tokens_evicted == 0
    assert engine.tree() == {}


@pytest.mark.parametrize("owner", ["a", "b", "nobody"])
def test_dead_spans(engine, owner):
    """Of the owner's longest path, not of whichever node comes first."""
    short, longer = engine.request("short", [0, 1, 2, 50, 51], output=[5]), engine.request("long", range(12), output=[5])
    for req in (short, longer):
        engine.prefill(req)
    cache = engine.cache
    cache.add_owner(short.last_node, "b")
    cache.add_owner(short.last_node, "a")
    cache.add_owner(longer.last_node, "a")
    kill(engine, longer.last_node, [4, 5, 6, 9, 11])
    kill(engine, short.last_node, [3])
    assert cache.dead_spans(owner) == {"a": [(4, 7), (9, 10), (11, 12)], "b": [(3, 4)], "nobody": []}[owner]


def test_reset_tells_the_listener_once_the_tree_is_gone(engine, chain):
    engine.abort(chain)
    seen = []
    engine.cache.on_reset = lambda: seen.append((engine.tree(), engine.cache.component.total_dead))
    engine.flush()
    assert seen == [({}, 0)]
    assert not engine.cache.has_node(chain.last_node)


def test_events_name_the_node_that_holds_the_request(engine):
    """A chunk in the middle is no checkpoint: its queries are not complete. A retraction is a drop, and so is an abort in mid-prefill."""
    seen = []
    engine.cache.on_event = lambda event: seen.append((event.kind, event.req.rid, engine.cache.path_length(event.node_id)))
    req = engine.request("r", range(10), output=[5, 6, 7])
    engine.prefill(req, chunk=4)
    engine.decode(req)
    engine.retract(req)
    engine.prefill(req)
    engine.extend(other := engine.request("other", range(20, 30)), chunk=4)
    engine.abort(other)
    chunks = [("chunk", "r", 4), ("chunk", "r", 8)]
    assert seen == [*chunks, ("checkpoint", "r", 10), ("drop", "r", 10), ("finish", "r", 12), ("drop", "other", 0)]


# ---- The cache's own check must notice ----


def free_twice(engine, req):
    engine.allocator.free(engine.allocator.free_pages[:1])


def free_a_live_slot(engine, req):
    engine.allocator.free(engine.cache.path_slots(req.last_node)[:1])


def evictable_off_by_one(engine, req):
    engine.cache.tree_core.component_evictable_size_[FULL] += 1


def protected_off_by_one(engine, req):
    engine.cache.tree_core.component_protected_size_[FULL] -= 1


def dead_slot_freed(engine, req):
    engine.allocator.free(torch.tensor([0]))


def dead_on_the_device_only(engine, req):
    engine.cache.tree_core.node_by_id(req.last_node).component_data[FULL].value[0] = 0


def dead_on_the_host_only(engine, req):
    node_tag(engine.cache.tree_core.node_by_id(req.last_node)).dead[0] = True


def dead_count_off(engine, req):
    node_tag(engine.cache.tree_core.node_by_id(req.last_node)).n_dead += 1


def slot_lost(engine, req):
    engine.allocator.alloc(1)


def slot_in_two_nodes(engine, req):
    value = engine.cache.tree_core.node_by_id(req.last_node).component_data[FULL].value
    value[0] = value[1]


CORRUPTIONS = {
    free_twice: "two places",
    free_a_live_slot: "two places",
    evictable_off_by_one: "ledgers say",
    protected_off_by_one: "ledgers say",
    dead_slot_freed: "dead slot is in the free list",
    dead_on_the_device_only: "dead slots on the device",
    dead_on_the_host_only: "dead slots on the device",
    dead_count_off: "dead slots on the device",
    slot_lost: "!= total",
    slot_in_two_nodes: "two places",
}


@pytest.mark.parametrize(("corrupt", "message"), CORRUPTIONS.items(), ids=lambda v: getattr(v, "__name__", ""))
def test_check_integrity_notices(engine_class, corrupt, message):
    """The check that debug mode and the server tests rely on raises for every kind of corruption."""
    engine = engine_class(slots=32)
    req = engine.request("r", range(10))
    engine.prefill(req)
    kill(engine, req.last_node, [2, 3, 7], req)
    engine.decode(req)
    engine.cache.check_integrity(private=1)
    corrupt(engine, req)
    with pytest.raises(IntegrityError, match=message):
        engine.cache.check_integrity(private=1)


def test_check_integrity_counts_private_slots(engine, chain):
    engine.decode(chain)
    with pytest.raises(IntegrityError, match=r"private=0 != total"):
        engine.cache.check_integrity(private=0)


def test_check_row_notices(engine, chain):
    row = engine.rows.req_to_token[chain.req_pool_idx, :10].clone()
    engine.cache.check_row("r", row, chain.last_node)
    with pytest.raises(IntegrityError, match="9 tree-owned positions, its path 10"):
        engine.cache.check_row("r", row[:9], chain.last_node)
    row[2] = 31
    with pytest.raises(IntegrityError, match="differ at 1 positions, first 2"):
        engine.cache.check_row("r", row, chain.last_node)
