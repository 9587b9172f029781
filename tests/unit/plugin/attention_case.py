"""One pass of attention over pruned and whole lanes, and what it must give: dense float64 attention with dead positions masked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from intentkv_sglang.live_view import Lane, LanePass, PassChannel, ShadowRows, with_live_view

DIM = 16
LAYER = 1
ROWS, CONTEXT, SLOTS = 6, 48, 200


class Seq(NamedTuple):
    """One sequence of a batch: ``new`` tokens are computed behind a prefix whose positions ``dead`` were evicted."""

    prefix: int
    new: int
    dead: frozenset[int]


@st.composite
def sequences(draw, decode):
    prefix = draw(st.integers(0, 16))
    new = 1 if decode else draw(st.integers(1, 6))
    dead = draw(st.one_of(st.just(frozenset()), st.frozensets(st.integers(0, prefix - 1)))) if prefix else frozenset()
    return Seq(prefix, new, dead)


class Case:
    """A pool full of random K and V (garbage in slot 0 above all), rows with dead marks, and one pass over ``lanes``."""

    def __init__(self, backend, decode, lanes, q_heads, kv_heads, seed, dead_count=None, name="torch_native"):
        """``backend(runner)`` builds the attention backend that SGLang knows by ``name``."""
        self.generator = torch.Generator().manual_seed(seed)
        self.lanes, self.decode = lanes, decode
        self.layer = RadixAttention(q_heads, DIM, DIM**-0.5, kv_heads, LAYER)
        self.pool = MHATokenToKVPool(SLOTS, 1, torch.float32, kv_heads, DIM, 2, "cpu", False)
        for buffer in (self.pool.get_key_buffer(LAYER), self.pool.get_value_buffer(LAYER)):
            buffer.copy_(torch.randn(buffer.shape, generator=self.generator))
            buffer[0] = 1e3
        self.table = torch.zeros(2 * ROWS + 1, CONTEXT, dtype=torch.int32)
        # Shadow rows hold what earlier passes left there.
        self.table[ROWS + 1 :] = SLOTS
        slots = (1 + torch.randperm(SLOTS, generator=self.generator)).tolist()
        # Lanes are in no particular rows.
        self.rows = (1 + torch.randperm(ROWS, generator=self.generator))[: len(lanes)].tolist()
        self.k_logical, self.v_logical, new_slots = [], [], []
        for row, lane in zip(self.rows, lanes, strict=True):
            own = [slots.pop() for _ in range(lane.prefix + lane.new)]
            # The full cache, before anything was evicted; the slots of dead positions then belong to somebody else.
            self.k_logical.append(self.pool.get_key_buffer(LAYER)[own].clone())
            self.v_logical.append(self.pool.get_value_buffer(LAYER)[own].clone())
            self.pool.get_key_buffer(LAYER)[[own[p] for p in lane.dead]] = 1e3
            new_slots += own[lane.prefix :]
            self.table[row, : len(own)] = torch.tensor([0 if p in lane.dead else s for p, s in enumerate(own)])
        runner = SimpleNamespace(device="cpu", req_to_token_pool=SimpleNamespace(req_to_token=self.table), token_to_kv_pool=self.pool)
        self.channel = PassChannel()
        self.shadows = ShadowRows(self.table, ROWS)
        self.backend = with_live_view(backend(runner), name, self.shadows, self.channel)
        lengths = [lane.prefix + lane.new for lane in lanes]
        prefixes = [lane.prefix for lane in lanes]
        self.batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
            batch_size=len(lanes),
            req_pool_indices=torch.tensor(self.rows),
            seq_lens=torch.tensor(lengths),
            seq_lens_cpu=torch.tensor(lengths),
            seq_lens_sum=sum(lengths),
            extend_prefix_lens=None if decode else torch.tensor(prefixes),
            extend_prefix_lens_cpu=None if decode else prefixes,
            extend_seq_lens=None if decode else torch.tensor([lane.new for lane in lanes]),
            extend_seq_lens_cpu=None if decode else [lane.new for lane in lanes],
            positions=torch.cat([torch.arange(lane.prefix, lane.prefix + lane.new) for lane in lanes]),
            out_cache_loc=torch.tensor(new_slots),
            encoder_lens=None,
            spec_info=None,
            cross_attention_custom_mask=None,
            attn_cp_metadata=None,
        )
        n_dead = [len(lane.dead) for lane in lanes] if dead_count is None else dead_count
        self.known = [
            Lane(row, lane.prefix, lane.prefix + lane.new, dead) for row, lane, dead in zip(self.rows, lanes, n_dead, strict=True)
        ]
        self.channel.current = LanePass(self.known)

    def run(self):
        """[tokens, H_q, D]: what the backend computes; the new tokens' K and V are those of the logical sequence."""
        tokens = sum(lane.new for lane in self.lanes)
        self.q = torch.randn(tokens, self.layer.tp_q_head_num, DIM, generator=self.generator)
        k, v = (
            torch.cat([full[lane.prefix :] for full, lane in zip(logical, self.lanes, strict=True)])
            for logical in (self.k_logical, self.v_logical)
        )
        self.backend.init_forward_metadata(self.batch)
        out = self.backend.forward(self.q.flatten(1), k, v, self.layer, self.batch)
        return out.view(tokens, -1, DIM)

    def expected(self):
        """[tokens, H_q, D] float64: causal attention over all positions, dead ones masked to -inf."""
        outputs, at = [], 0
        for lane, keys, values in zip(self.lanes, self.k_logical, self.v_logical, strict=True):
            group = self.layer.tp_q_head_num // self.layer.tp_k_head_num
            q = self.q[at : at + lane.new].double()
            at += lane.new
            k, v = keys.double().repeat_interleave(group, 1), values.double().repeat_interleave(group, 1)
            logits = torch.einsum("ihd,jhd->hij", q, k) * self.layer.scaling
            for i in range(lane.new):
                for j in range(lane.prefix + lane.new):
                    if j > lane.prefix + i or j in lane.dead:
                        logits[:, i, j] = float("-inf")
            outputs.append(torch.einsum("hij,jhd->ihd", torch.softmax(logits, -1), v))
        return torch.cat(outputs)
