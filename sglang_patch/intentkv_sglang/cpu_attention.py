"""torch_native attention that computes new rows only.

Stock ``torch_native`` extend runs SDPA over the whole sequence, S x S, even when all but one token comes from the radix cache: a cached
4k prompt takes seconds on a CPU. Same gather by ``req_to_token``; only the new rows are computed.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention as sdpa


def _plain(encoder_lens: Any, sliding_window_size: int | None, is_cross_attn: bool) -> bool:
    return encoder_lens is None and not is_cross_attn and (sliding_window_size is None or sliding_window_size < 0)


def _gather(cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[1, H_kv, n, D] of the slots."""
    return cache[slots].movedim(0, 1).unsqueeze(0).to(dtype)


class NewRowsAttnBackend(TorchNativeAttnBackend):
    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        if not causal or not _plain(encoder_lens, sliding_window_size, is_cross_attn):
            stock: torch.Tensor = super()._run_sdpa_forward_extend(
                query,
                output,
                k_cache,
                v_cache,
                req_to_token,
                req_pool_indices,
                seq_lens,
                extend_prefix_lens,
                extend_seq_lens,
                encoder_lens,
                scaling,
                enable_gqa,
                causal,
                is_cross_attn,
                sliding_window_size,
            )
            return stock
        start = 0
        lanes = zip(req_pool_indices.tolist(), seq_lens.tolist(), extend_prefix_lens.tolist(), extend_seq_lens.tolist(), strict=True)
        for row, length, prefix, new in lanes:
            slots = req_to_token[row, :length]
            # The new rows see the whole prefix and each other causally: bottom-right aligned.
            mask = torch.ones(new, length, dtype=torch.bool, device=query.device).tril(prefix) if prefix and new > 1 else None
            out = sdpa(
                query[start : start + new].movedim(0, 1).unsqueeze(0),
                _gather(k_cache, slots, query.dtype),
                _gather(v_cache, slots, query.dtype),
                attn_mask=mask,
                is_causal=not prefix and new > 1,
                scale=scaling,
                enable_gqa=enable_gqa,
            )
            output[start : start + new] = out.squeeze(0).movedim(1, 0)
            start += new
        return output

    def _run_sdpa_forward_decode(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        if not _plain(encoder_lens, sliding_window_size, is_cross_attn):
            stock: torch.Tensor = super()._run_sdpa_forward_decode(
                query,
                output,
                k_cache,
                v_cache,
                req_to_token,
                req_pool_indices,
                seq_lens,
                encoder_lens,
                scaling,
                enable_gqa,
                causal,
                is_cross_attn,
                sliding_window_size,
            )
            return stock
        for lane, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
            slots = req_to_token[row, :length]
            keys = _gather(k_cache, slots, query.dtype)
            values = _gather(v_cache, slots, query.dtype)
            # A GQA group's query heads are the rows of one small product per KV head.
            group = query[lane].view(1, keys.shape[1], -1, query.shape[-1])
            output[lane] = sdpa(group, keys, values, scale=scaling).reshape(-1, values.shape[-1])
        return output


def create_backend(runner: Any) -> NewRowsAttnBackend:
    return NewRowsAttnBackend(runner)
