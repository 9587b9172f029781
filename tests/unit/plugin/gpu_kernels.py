"""What the kernels of FlashInfer and FA3 compute, in plain torch, for SGLang's own backends to call on a CPU.

Only what SGLang plans with reaches the sums: slots, lengths and causal flags. So an output is right only if the plan was.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType, SimpleNamespace

import torch
from sglang.srt.layers.attention import flashinfer_backend
from sglang.srt.runtime_context import get_parallel

from .attention_case import DIM


def attend(q, k, v, scale, causal):
    """[n, H_q, D] and the log of the softmax's sum, [n, H_q], of queries [n, H_q, D] over keys [m, H_kv, D].

    A causal mask is aligned to the last query and key. Over no keys: 0 and -inf.
    """
    group = q.shape[1] // k.shape[1]
    logits = torch.einsum("nhd,mhd->hnm", q, k.repeat_interleave(group, 1)) * scale
    if causal:
        logits = logits.masked_fill(~torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q)), float("-inf"))
    out = torch.einsum("hnm,mhd->nhd", torch.softmax(logits, -1), v.repeat_interleave(group, 1))
    return out, torch.logsumexp(logits, -1).T


def merge_state(out_a, lse_a, out_b, lse_b):
    total = torch.logaddexp(lse_a, lse_b)
    return out_a * (lse_a - total).exp()[..., None] + out_b * (lse_b - total).exp()[..., None], total


class Wrapper:
    """A FlashInfer wrapper: planned with indices, then asked for attention."""

    def __init__(self, workspace, layout, **options):
        self.is_cuda_graph_enabled = options.get("use_cuda_graph", False)
        self._paged_kv_indices_buf = options.get("paged_kv_indices_buffer")

    def slots(self):
        """Planned slots, lane by lane."""
        return [self.kv_indices[a:b].tolist() for a, b in self._ranges(self.kv_indptr)]

    @staticmethod
    def _ranges(indptr):
        return list(zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True))

    def _lanes(self, q, keys, values, causal, scale):
        outs, sums = zip(
            *[
                attend(q[a:b], keys[at], values[at], scale, causal)
                for (a, b), at in zip(self._ranges(self.qo_indptr), self._key_places(), strict=True)
            ],
            strict=True,
        )
        return torch.cat(outs), torch.cat(sums)


class PagedDecode(Wrapper):
    def begin_forward(self, kv_indptr, kv_indices, last_page_len, *shape, global_override_indptr_cpu=None, **options):
        if global_override_indptr_cpu is not None:
            # The real one takes its work sizes from the host copy and the kernel its lengths from the device.
            assert torch.equal(global_override_indptr_cpu, kv_indptr)
        self.qo_indptr = torch.arange(len(kv_indptr))
        self.kv_indptr, self.kv_indices = kv_indptr.clone(), kv_indices
        assert (last_page_len == 1).all()

    _key_places = Wrapper.slots

    def forward(self, q, kv_cache, sm_scale, **options):
        return self._lanes(q, *kv_cache, False, sm_scale)[0]


def fast_decode_plan(wrapper, *arguments, global_override_indptr_cpu, **options):
    assert global_override_indptr_cpu is not None
    PagedDecode.begin_forward(wrapper, *arguments, global_override_indptr_cpu=global_override_indptr_cpu, **options)


class PagedPrefill(Wrapper):
    def begin_forward(self, qo_indptr, kv_indptr, kv_indices, last_page_len, *shape, custom_mask, **options):
        assert custom_mask is None
        self.qo_indptr, self.kv_indptr, self.kv_indices = qo_indptr.clone(), kv_indptr.clone(), kv_indices

    _key_places = Wrapper.slots

    def forward(self, q, kv_cache, causal, sm_scale, **options):
        return self._lanes(q, *kv_cache, causal, sm_scale)[0]

    def forward_return_lse(self, q, kv_cache, causal, sm_scale, **options):
        return self._lanes(q, *kv_cache, causal, sm_scale)


class RaggedPrefill(Wrapper):
    def begin_forward(self, qo_indptr, kv_indptr, *shape, **options):
        self.qo_indptr, self.kv_indptr = qo_indptr.clone(), kv_indptr.clone()

    def _key_places(self):
        return [slice(a, b) for a, b in self._ranges(self.kv_indptr)]

    def forward(self, q, k, v, causal, sm_scale, **options):
        return self._lanes(q, k, v, causal, sm_scale)[0]

    def forward_return_lse(self, q, k, v, causal, sm_scale, **options):
        return self._lanes(q, k, v, causal, sm_scale)


class _KvIndices:
    """``kernel[grid](...)``: the slots of each lane's row, one after another."""

    def __getitem__(self, grid):
        return self._fill

    @staticmethod
    def _fill(table, rows, lengths, kv_indptr, starts, kv_indices, stride):
        assert starts is None
        assert stride == table.shape[1]
        for row, length, at in zip(rows.tolist(), lengths.tolist(), kv_indptr.tolist(), strict=False):
            kv_indices[at : at + length] = table[row, :length]


class _TorchOnCpu:
    """``torch`` for a module that names the device of its buffers itself."""

    def __getattr__(self, name):
        found = getattr(torch, name)
        if name not in ("empty", "zeros"):
            return found
        return lambda *arguments, device="cpu", **options: found(*arguments, device="cpu", **options)


def patch_flashinfer(patch):
    """Give SGLang's FlashInfer module the kernels above in place of those it could not import."""
    for name, replacement in {
        "BatchDecodeWithPagedKVCacheWrapper": PagedDecode,
        "BatchPrefillWithPagedKVCacheWrapper": PagedPrefill,
        "BatchPrefillWithRaggedKVCacheWrapper": RaggedPrefill,
        "fast_decode_plan": fast_decode_plan,
        "_safe_merge_state": merge_state,
        "create_flashinfer_kv_indices_triton": _KvIndices(),
        "torch": _TorchOnCpu(),
        "is_sm100_supported": lambda: False,
        "get_cuda_graph_max_batch_size": lambda server_args, rows: rows,
    }.items():
        patch.setattr(flashinfer_backend, name, replacement, raising=False)


def flash_attn_with_kvcache(q, k_cache, v_cache, page_table, cache_seqlens, cu_seqlens_q, softmax_scale, causal, max_seqlen_q, **options):
    outs = []
    for lane, (start, end) in enumerate(zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True)):
        assert end - start <= max_seqlen_q
        slots = page_table[lane, : int(cache_seqlens[lane])].long()
        assert len(slots) == cache_seqlens[lane], "the page table is narrower than the lane is long"
        outs.append(attend(q[start:end], k_cache[slots, 0], v_cache[slots, 0], softmax_scale, causal)[0])
    return torch.cat(outs)


def normal_decode_set_metadata(lengths_out, cu_seqlens_k, page_table, table, rows, strided, max_pages, lengths, delta, *rest, **more):
    """The tail of a page table row keeps what it held."""
    lengths_out.copy_(lengths + delta)
    cu_seqlens_k[1:].copy_(torch.cumsum(lengths_out, 0))
    for lane, (row, length) in enumerate(zip(rows.tolist(), lengths_out.tolist(), strict=True)):
        page_table[lane, :length] = table[row, :length]


def fa3_module(patch):
    """SGLang's FlashAttention module; it imports with its kernel packages replaced."""
    kernels, flash_attn = ModuleType("sgl_kernel"), ModuleType("sgl_kernel.flash_attn")
    kernels.merge_state_v2 = kernels.flash_attn = flash_attn
    flash_attn.flash_attn_varlen_func = flash_attn.flash_attn_with_kvcache = flash_attn_with_kvcache
    flash_attn.get_scheduler_metadata = lambda **sizes: None
    patch.setitem(sys.modules, "sgl_kernel", kernels)
    patch.setitem(sys.modules, "sgl_kernel.flash_attn", flash_attn)
    from sglang.srt.layers.attention import flashattention_backend

    patch.setattr(flashattention_backend, "flash_attn_with_kvcache", flash_attn_with_kvcache)
    patch.setattr(flashattention_backend, "normal_decode_set_metadata", normal_decode_set_metadata)
    return flashattention_backend


def runner_of(runner, q_heads, kv_heads, context):
    """What both backends read of SGLang's ModelRunner, around the pools of ``runner``."""
    server_args = SimpleNamespace(
        enable_mis=False,
        get_attention_backends=lambda: ("", ""),
        enable_deterministic_inference=False,
        speculative_eagle_topk=None,
        is_embedding=False,
        enable_prefill_cp=False,
        enable_dp_attention=False,
        dllm_algorithm=None,
        model_path="",
    )
    config = SimpleNamespace(
        num_attention_heads=q_heads,
        get_max_num_attention_heads=lambda: q_heads,
        get_num_kv_heads=lambda tp_size: kv_heads,
        head_dim=DIM,
        context_len=context,
        is_multimodal=False,
        is_encoder_decoder=False,
        is_local_attention_model=False,
        attention_arch=None,
        hf_config=SimpleNamespace(architectures=["Random"]),
        hf_text_config=SimpleNamespace(num_attention_heads=q_heads),
    )
    runner.req_to_token_pool.size = len(runner.req_to_token_pool.req_to_token) // 2
    return SimpleNamespace(
        device="cpu",
        req_to_token_pool=runner.req_to_token_pool,
        token_to_kv_pool=runner.token_to_kv_pool,
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: runner.token_to_kv_pool),
        server_args=server_args,
        model_config=config,
        kv_cache_dtype=torch.float32,
        kv_cache_dtype_str="auto",
        dtype=torch.float32,
        page_size=1,
        sliding_window_size=None,
        is_draft_worker=False,
        ps=SimpleNamespace(attn_cp_size=1, tp_size=1),
    )


one_rank = functools.partial(get_parallel().override, attn_tp_size=1)
