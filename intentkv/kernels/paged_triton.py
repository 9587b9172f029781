"""What Triton kernels share to read :class:`intentkv.kernels.paged_keys.PagedKeys`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from intentkv.kernels.paged_keys import PagedKeys

_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
}


def triton_dtype(keys: PagedKeys) -> tl.dtype:
    """Triton's name of the dtype in which ``keys`` are stored.

    Raises:
        ValueError: there is no kernel for it.
    """
    if keys.dtype not in _DTYPES:
        raise ValueError(f"keys of dtype {keys.dtype} have no kernel; use one of {', '.join(map(str, _DTYPES))}")
    return _DTYPES[keys.dtype]


@triton.jit
def layer_base(pointers, layer, DTYPE: tl.constexpr):
    """Start of a layer's buffer. Without the hint the compiler must assume odd addresses, and loads element by element."""
    return tl.multiple_of(tl.load(pointers + layer).to(tl.pointer_type(DTYPE)), 16)
