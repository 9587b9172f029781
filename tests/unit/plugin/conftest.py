"""SGLang's own pools, requests and radix cache on the CPU, driven by a small scheduler loop: all but the model and the processes.

The model's queries, keys and values are tables over (layer, token, position): an oracle knows them without reading the pool.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from intentkv_sglang.cpu_platform_name import NAME
from intentkv_sglang.vision import ensure_torchvision_imports

os.environ["SGLANG_PLATFORM"] = NAME
ensure_torchvision_imports()

from sglang.srt.layers.radix_attention import RadixAttention  # noqa: E402
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req, release_req  # noqa: E402
from sglang.srt.mem_cache.allocation import alloc_for_decode, alloc_for_extend  # noqa: E402
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.common import release_kv_cache  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.runtime_context import get_context  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

from intentkv.config import Config, load_config  # noqa: E402
from intentkv_sglang.capture import QueryBank  # noqa: E402
from intentkv_sglang.cpu_attention import NewRowsAttnBackend  # noqa: E402
from intentkv_sglang.figures import KEY  # noqa: E402
from intentkv_sglang.live_view import Lane, LanePass, PassChannel, ShadowRows, with_live_view  # noqa: E402
from intentkv_sglang.plugin import _add_shadow_rows  # noqa: E402
from intentkv_sglang.radix_cache import IntentKVRadixCache  # noqa: E402
from intentkv_sglang.runtime import Runtime  # noqa: E402

FULL = ComponentType.FULL
VOCABULARY = 512
CONTEXT = 512
# Ids that differ from their index: a mix-up of the two shows.
LAYERS = range(1, 3)
Q_HEADS, KV_HEADS, DIM = 4, 2, 8


@pytest.fixture(scope="session")
def two_processes() -> Callable[[str, os.PathLike[str]], list[Any]]:
    """Runs a script as ``SCRIPT RANK FOLDER`` for ranks 0 and 1 at once and returns the JSON that each prints last."""

    def run(script: str, folder: os.PathLike[str]) -> list[Any]:
        started = [subprocess.Popen([sys.executable, script, str(rank), str(folder)], stdout=subprocess.PIPE, text=True) for rank in (0, 1)]
        try:
            return [json.loads(process.communicate(timeout=300)[0].splitlines()[-1]) for process in started]
        finally:
            # One that has lost the other would wait for it for ever.
            for process in started:
                process.kill()

    return run


@pytest.fixture(scope="session", autouse=True)
def server_args() -> ServerArgs:
    """What a scheduler process publishes before it builds anything."""
    args = ServerArgs(model_path="dummy", device="cpu", attention_backend="torch_native", radix_cache_backend="intentkv")
    get_context().set_server_args(args)
    return args


class Tables:
    """A made-up model: the query, key or value of a token is its token's vector plus its position's."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def table(heads: int) -> tuple[torch.Tensor, torch.Tensor]:
            return tuple(torch.randn(len(LAYERS), rows, heads, DIM, generator=generator) for rows in (VOCABULARY, CONTEXT))

        self._tables = {"q": table(Q_HEADS), "k": table(KV_HEADS), "v": table(KV_HEADS)}

    def read(self, which: str, tokens: Sequence[int], start: int = 0) -> torch.Tensor:
        """[L, n, H, D] of ``tokens`` at positions ``start`` on."""
        by_token, by_position = self._tables[which]
        return by_token[:, list(tokens)] + by_position[:, start : start + len(tokens)]


class Batch:
    """ScheduleBatch as far as SGLang's allocation and the plugin read it."""

    def __init__(self, engine: Engine, reqs: Sequence[Req], mode: ForwardMode) -> None:
        self.reqs = list(reqs)
        self.forward_mode = mode
        self.device = "cpu"
        self.tree_cache = engine.cache
        self.req_to_token_pool = engine.rows
        self.model_config = SimpleNamespace(is_encoder_decoder=False)
        if mode.is_decode():
            self.seq_lens_cpu = torch.tensor([r.kv_committed_len for r in reqs])
            self.seq_lens = self.seq_lens_cpu.clone()
            self.req_pool_indices = torch.tensor([r.req_pool_idx for r in reqs])
            self.out_cache_loc = alloc_for_decode(self, token_per_req=1)
            self.seq_lens, self.seq_lens_cpu = self.seq_lens + 1, self.seq_lens_cpu + 1
            self.prefix_lens = self.extend_lens = None
        else:
            self.prefix_lens = [r.extend_range.start for r in reqs]
            self.extend_lens = [r.extend_range.length for r in reqs]
            self.extend_num_tokens = sum(self.extend_lens)
            self.seq_lens_cpu = torch.tensor([r.extend_range.end for r in reqs])
            self.seq_lens = self.seq_lens_cpu.clone()
            self.out_cache_loc, self.req_pool_indices, _ = alloc_for_extend(self)
        for req, length in zip(reqs, self.seq_lens_cpu.tolist(), strict=True):
            req.kv_committed_len = length

    def mix_with_running(self, running: Batch) -> None:
        """Decode steps that ride along with a prefill pass (``--enable-mixed-chunk``)."""
        self.forward_mode = ForwardMode.MIXED
        self.prefix_lens = self.prefix_lens + [n - 1 for n in running.seq_lens_cpu.tolist()]
        self.extend_lens = self.extend_lens + [1] * len(running.reqs)
        self.reqs += running.reqs
        for name in ("seq_lens", "seq_lens_cpu", "req_pool_indices", "out_cache_loc"):
            setattr(self, name, torch.cat([getattr(self, name), getattr(running, name)]))

    def maybe_evict_swa(self) -> None: ...

    def is_dllm(self) -> bool:
        return False

    def forward_batch(self) -> SimpleNamespace:
        """ForwardBatch as far as the attention backend reads it."""
        extend = self.prefix_lens is not None
        return SimpleNamespace(
            forward_mode=self.forward_mode,
            req_pool_indices=self.req_pool_indices,
            seq_lens=self.seq_lens,
            seq_lens_cpu=self.seq_lens_cpu,
            seq_lens_sum=int(self.seq_lens_cpu.sum()),
            extend_prefix_lens=torch.tensor(self.prefix_lens) if extend else None,
            extend_prefix_lens_cpu=self.prefix_lens,
            extend_seq_lens=torch.tensor(self.extend_lens) if extend else None,
            out_cache_loc=self.out_cache_loc,
            encoder_lens=None,
        )


class TreeNode(NamedTuple):
    """A node as the oracle reads it off the tree."""

    node: object
    start: int
    dead: list[bool]
    """Of the whole path."""
    slots: list[int]
    """Of the whole path."""


Path = tuple[object, tuple[int, ...]]
"""(extra key, token ids from the root)."""


class Engine:
    """The steps of SGLang's scheduler that touch KV, in its order and with its own functions; ``check`` is the independent oracle."""

    def __init__(self, slots: int = 256, rows: int = 8, need_sort: bool = False) -> None:
        self.rows = ReqToTokenPool(rows, CONTEXT, "cpu", False)
        _add_shadow_rows(None, self.rows)
        self.kv = MHATokenToKVPool(slots, 1, torch.float32, KV_HEADS, DIM, len(LAYERS), "cpu", False, start_layer=LAYERS.start)
        self.allocator = TokenToKVPoolAllocator(slots, dtype=torch.float32, device="cpu", kvcache=self.kv, need_sort=need_sort)
        params = CacheInitParams(disable=False, req_to_token_pool=self.rows, token_to_kv_pool_allocator=self.allocator, page_size=1)
        self.cache = IntentKVRadixCache(params)
        self.tables = Tables()
        self.attention = [RadixAttention(Q_HEADS, DIM, DIM**-0.5, KV_HEADS, layer) for layer in LAYERS]
        self.runtime: Runtime | None = None
        self.running: list[Req] = []
        self.passes: list[LanePass] = []
        self.responses: dict[str, list[dict[str, int]]] = {}
        """What the client of a finished request was told: SGLang answers before the plugin handles the batch's result."""
        self._outputs: dict[str, Sequence[int]] = {}
        self._chunked: set[str] = set()
        runner = SimpleNamespace(
            device="cpu",
            model=torch.nn.ModuleList(self.attention),
            req_to_token_pool=self.rows,
            token_to_kv_pool=self.kv,
            dtype=torch.float32,
        )
        self.channel = PassChannel()
        shadows = ShadowRows(self.rows.req_to_token, self.rows.size)
        self.backend = with_live_view(NewRowsAttnBackend(runner), "torch_native", shadows, self.channel)
        self._runner = runner

    def start_runtime(self, tokenizer: object = None, deferred: bool = False, **options: object) -> Runtime:
        """Attach the plugin's runtime with a configuration of ``options``; ``deferred`` commits evictions one pass later, as on a GPU."""
        config: Config = load_config(**{"debug": True, "hysteresis": 0} | options)
        self.runtime = Runtime(config, self.cache)
        self.bank = QueryBank(LAYERS[:: config.layer_stride], config.query_rows, Q_HEADS, DIM, torch.float32, "cpu")
        group = SimpleNamespace(world_size=1, rank_in_group=0, cpu_group=None)
        scheduler = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=self._runner), tokenizer=tokenizer, tp_group=group)
        self.runtime.bind(scheduler, self.bank, self.channel)
        self.runtime.evictions.deferred = deferred
        return self.runtime

    # ---- The scheduler's steps ----

    def request(
        self,
        rid: str,
        ids: Iterable[int],
        output: Sequence[int] = (0,) * CONTEXT,
        session_id: str | None = None,
        options: dict[str, object] | None = None,
        extra_key: str | None = None,
    ) -> Req:
        """A request that will generate ``output`` and then finish."""
        params = SamplingParams(max_new_tokens=len(output), custom_params={"intentkv": options} if options is not None else None)
        self._outputs[rid] = output
        return Req(rid, "", array("q", ids), params, session_id=session_id, extra_key=extra_key)

    def admit(self, req: Req, chunk: int | None = None) -> bool:
        """Match and lock; False when the pool cannot hold the pass even after eviction."""
        if req.kv is None:
            req.init_next_round_input(self.cache)
            self.cache.inc_lock_ref(req.last_node)
            req.skip_lock_node_ids = {}
            req.is_retracted = False
        else:
            self.cache.cache_unfinished_req(req, chunked=True)
            req.init_next_round_input()
        start, end = len(req.prefix_indices), len(req.full_untruncated_fill_ids)
        if chunk is not None and start + chunk < end:
            end = start + chunk
            self._chunked.add(req.rid)
            req.inflight_middle_chunks = 1
        else:
            self._chunked.discard(req.rid)
            req.inflight_middle_chunks = 0
        req.set_extend_range(start, end)
        fits = end - start <= self.allocator.available_size() + self.cache.evictable_size()
        if not fits and req.kv is None:
            self.cache.dec_lock_ref(req.last_node)
        return fits

    def extend(self, *reqs: Req, chunk: int | None = None) -> None:
        """One prefill pass of ``reqs`` (new, or in the middle of their chunks), at most ``chunk`` new tokens each."""
        admitted = [self.admit(req, chunk) for req in reqs]
        assert all(admitted), "the test asks for more than the pool holds"
        self.extend_admitted(*reqs)

    def extend_admitted(self, *reqs: Req, decoding: Sequence[Req] = ()) -> None:
        """A prefill pass of admitted requests; ``decoding`` ones take a decode step in it."""
        batch = Batch(self, reqs, ForwardMode.EXTEND)
        if decoding:
            batch.mix_with_running(Batch(self, decoding, ForwardMode.DECODE))
        self.running += [r for r in reqs if r not in self.running]
        self._forward(batch)
        for req in batch.reqs:
            if req.rid not in self._chunked:
                self._sampled(req)
                if not req.finished() and req in reqs:
                    self.cache.cache_unfinished_req(req)
        self._end()

    def prefill(self, *reqs: Req, chunk: int | None = None) -> None:
        """Prefill ``reqs`` to their end."""
        pending = list(reqs)
        while pending:
            self.extend(*pending, chunk=chunk)
            pending = [r for r in pending if r.rid in self._chunked]

    def mid_prefill(self, req: Req) -> bool:
        return req.rid in self._chunked

    def decode(self, *reqs: Req) -> None:
        """One decode step."""
        self._forward(Batch(self, reqs, ForwardMode.DECODE))
        for req in reqs:
            self._sampled(req)
        self._end()

    def generate(self, *reqs: Req) -> None:
        """Decode until all have finished."""
        while pending := [r for r in reqs if not r.finished()]:
            self.decode(*pending)

    def run(self, req: Req, chunk: int | None = None) -> Req:
        """A whole request, alone."""
        self.prefill(req, chunk=chunk)
        self.generate(req)
        return req

    def _sampled(self, req: Req) -> None:
        output = self._outputs[req.rid]
        req.output_ids.append(output[len(req.output_ids)])
        if len(req.output_ids) == len(output):
            req.finished_reason = FINISH_LENGTH(len(output))
            self._release(req)
            if self.runtime is not None and req.customized_info is not None:
                self.responses[req.rid] = req.customized_info[KEY][0 : len(output)]

    def _release(self, req: Req, is_insert: bool = True) -> None:
        release_kv_cache(req, self.cache, is_insert=is_insert)
        self.running.remove(req)

    def retract(self, req: Req) -> None:
        """Give a running request's memory up; the same object is prefilled again later."""
        release_req(
            req=req,
            remaing_req_count=0,
            server_args=get_context().server_args,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.cache,
            hisparse_coordinator=None,
        )
        self.running.remove(req)

    def abort(self, req: Req) -> None:
        """A client went away: in the middle of the prefill nothing is inserted, later the request finishes early."""
        req.finished_reason = FINISH_ABORT()
        self._release(req, is_insert=not self.mid_prefill(req))
        self._end()

    def flush(self) -> None:
        """``/flush_cache``; SGLang allows it at idle only."""
        assert not self.running
        self.cache.reset()
        self.rows.clear()
        self.allocator.clear()

    def match_length(self, ids: Sequence[int], extra_key: str | None = None) -> int:
        return len(self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", ids), extra_key))).device_indices)

    # ---- The model ----

    def _forward(self, batch: Batch) -> None:
        """Attention of every layer; each output is compared with dense attention over the positions whose row entry is not dead."""
        spans = []
        for lane, (req, end) in enumerate(zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True)):
            tokens = (req.origin_input_ids + req.output_ids)[:end]
            spans.append((tokens, end - 1 if batch.prefix_lens is None else batch.prefix_lens[lane]))
        if self.runtime is not None:
            self.runtime.begin_pass(batch)
        else:
            lanes = zip(batch.reqs, spans, strict=True)
            self.channel.current = LanePass(
                [Lane(r.req_pool_idx, start, len(tokens), self.cache.n_dead(r.last_node)) for r, (tokens, start) in lanes]
            )
        self.passes.append(self.channel.current)
        forward_batch = batch.forward_batch()
        new = {w: torch.cat([self.tables.read(w, tokens[start:], start) for tokens, start in spans], dim=1) for w in "qkv"}
        self.backend.init_forward_metadata(forward_batch)
        for index, layer in enumerate(self.attention):
            q, k, v = (new[w][index] for w in "qkv")
            out = self.backend.forward(q.flatten(1), k, v, layer, forward_batch).view(-1, Q_HEADS, DIM)
            for req, (tokens, start) in zip(batch.reqs, spans, strict=True):
                expected = self._attention(index, tokens, start, self.rows.req_to_token[req.req_pool_idx, : len(tokens)] == 0)
                torch.testing.assert_close(out[: len(expected)].double(), expected, rtol=1e-4, atol=1e-4)
                out = out[len(expected) :]

    def _attention(self, index: int, tokens: Sequence[int], start: int, dead: torch.Tensor) -> torch.Tensor:
        """[n, H_q, D] float64 of the tokens from ``start`` on: causal attention over all positions, dead ones masked to -inf."""
        q = self.tables.read("q", tokens[start:], start)[index].double()
        k, v = (self.tables.read(w, tokens)[index].double().repeat_interleave(Q_HEADS // KV_HEADS, 1) for w in "kv")
        logits = torch.einsum("ihd,jhd->hij", q, k) * DIM**-0.5
        position = torch.arange(len(tokens))
        hidden = (position[None] > position[start:, None]) | dead[None]
        return torch.einsum("hij,jhd->ihd", torch.softmax(logits.masked_fill(hidden, float("-inf")), -1), v)

    def _end(self) -> None:
        if self.runtime is not None:
            self.runtime.end_pass()

    # ---- The oracle ----

    def tree(self) -> dict[Path, TreeNode]:
        """Every node by its path, read off the raw tree."""
        found: dict[Path, TreeNode] = {}

        def walk(parent: object, tokens: tuple[int, ...], slots: list[int]) -> None:
            for node in parent.children.values():
                path = (node.key.extra_key, (*tokens, *node.key))
                all_slots = slots + node.component_data[FULL].value.tolist()
                assert len(path[1]) == len(all_slots), "a node's value is as long as its key"
                found[path] = TreeNode(node, len(tokens), [s == 0 for s in all_slots], all_slots)
                walk(node, path[1], all_slots)

        walk(self.cache.tree_core.root_node, (), [])
        return found

    def check(self, locked: Sequence[Path] = ()) -> dict[Path, TreeNode]:
        """Invariants 1 to 3 of the architecture, without the cache's own check.

        Args:
            locked: paths of nodes that the test has locked besides running requests.
        """
        free = self.allocator.free_pages.tolist() + self.allocator.release_pages.tolist()
        private: list[int] = []
        locks = [*locked]
        tree = self.tree()
        for req in self.running:
            held = req.cache_protected_len
            path = (req.extra_key, tuple((req.origin_input_ids + req.output_ids)[:held]))
            row = self.rows.req_to_token[req.req_pool_idx].tolist()
            private += row[held : req.kv.kv_allocated_len]
            locks.append(path)
            assert row[:held] == (tree[path].slots if held else []), f"row of {req.rid} differs from its path"
            assert self.cache.path_slots(req.last_node).tolist() == row[:held]
        live: list[int] = []
        sizes = {True: 0, False: 0}
        for (extra_key, tokens), (node, start, dead, slots) in tree.items():
            data = node.component_data[FULL]
            own = [s for s in slots[start:] if s]
            live += own
            expected = sum(key == extra_key and holder[: len(tokens)] == tokens for key, holder in locks)
            assert data.lock_ref == expected, f"node {tokens} has {data.lock_ref} locks, {expected} holders"
            sizes[expected > 0] += len(own)
            tag = data.metadata.get("intentkv")
            marked = tag.dead.tolist() if tag is not None and tag.dead is not None else [False] * (len(tokens) - start)
            assert marked == dead[start:], f"host and device disagree about the dead positions of {tokens}"
            assert (tag.n_dead if tag is not None else 0) == sum(dead[start:])
            assert self.cache.n_dead(node.id) == sum(dead)
        # No slot free twice, in two nodes, in a node and free, lost, or 0: together they are the pool, once each.
        assert sorted(free + live + private) == list(range(1, self.allocator.size + 1))
        assert self.allocator.available_size() == len(free)
        assert (self.cache.evictable_size(), self.cache.protected_size()) == (sizes[False], sizes[True])
        assert self.cache.component.total_dead == sum(sum(n.dead[n.start :]) for n in tree.values())
        return tree


@pytest.fixture(scope="session")
def engine_class() -> type[Engine]:
    return Engine


@pytest.fixture
def engine(engine_class: type[Engine]) -> Iterator[Engine]:
    """An engine whose invariants must hold at the end of the test, too."""
    made = engine_class()
    yield made
    made.check()
