"""SGLang platform for a plain CPU: native PyTorch operators only, no AMX and no compiled kernels.

Entry point ``intentkv_cpu`` of group ``sglang.srt.platforms``; chosen by ``SGLANG_PLATFORM=intentkv_cpu``, or by itself where no GPU is.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from intentkv_sglang.cpu_platform_name import NAME


class PlainCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Out-of-tree platform, so that every layer takes its ``forward_native``."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Nothing to change: the launcher gives the flags."""

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "inductor"

    def get_mha_kv_pool_cls(self) -> type[Any]:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool  # type: ignore[no-any-return]

    def get_paged_allocator_cls(self) -> Callable[..., Any]:
        return token_allocator


def token_allocator(size: int, *, page_size: int, dtype: torch.dtype, device: str, kvcache: Any, need_sort: bool) -> Any:
    """SGLang's token allocator.

    Raises:
        ValueError: page size above 1: SGLang's paged allocator launches Triton kernels, which need a GPU.
    """
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    if page_size != 1:
        raise ValueError(f"The plain-CPU platform needs --page-size 1, got {page_size}.")
    return TokenToKVPoolAllocator(size, dtype=dtype, device=device, kvcache=kvcache, need_sort=need_sort)


def activate() -> str | None:
    """Dotted class name when this platform should be used, else None."""
    if torch.cuda.is_available() and os.environ.get("SGLANG_PLATFORM") != NAME:
        return None
    return f"{__name__}.PlainCpuPlatform"
