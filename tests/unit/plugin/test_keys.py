"""Keys read back from SGLang's pool. Oracle: the keys that were stored, and attention over them."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from intentkv.kernels.paged_keys import PagedKeys
from intentkv.scoring import key_scores
from intentkv_sglang import compat
from intentkv_sglang.keys import PoolKeys

pytestmark = pytest.mark.unit

LAYERS = range(3, 6)
"""Ids that differ from their index."""
SCALES = (0.02, None, 0.5)
"""Of each layer; None: a checkpoint without one."""


def stored(pool_dtype):
    """A model's attention layers, the pool with 20 keys in slots 5 on, and those keys [L, 20, 2, 8]."""
    pool = MHATokenToKVPool(40, 1, pool_dtype, 2, 8, len(LAYERS), "cpu", False, start_layer=LAYERS.start)
    layers = torch.nn.ModuleList([RadixAttention(4, 8, 8**-0.5, 2, layer) for layer in LAYERS])
    keys = torch.randn(len(LAYERS), 20, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    for layer, scale, key in zip(layers, SCALES, keys, strict=True):
        if scale is not None:
            layer.k_scale, layer.k_scale_float = torch.tensor(scale), scale
            layer.v_scale, layer.v_scale_float = torch.tensor(2 * scale), 2 * scale
        # SGLang divides in place
        pool.set_kv_buffer(layer, torch.arange(5, 25), key.clone(), 3 * key, layer.k_scale, layer.v_scale)
    return layers, pool, keys.float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("picked", [LAYERS, LAYERS[::2]])
def test_reads_what_was_stored(dtype, picked):
    """Catches: a factor of another layer, none for 8-bit keys, one for keys that were stored undivided, a layer id taken for its index."""
    model, pool, want = stored(dtype)
    slots = torch.arange(5, 25).flip(0)
    keys = PoolKeys(compat.paged_kv(model, pool, picked), slots, torch.arange(20), picked, 0.3)
    positions = torch.tensor([0, 3, 19])
    # half a step of the number format: 1/16 of a value's power of two for e4m3, 1/8 for e5m2, and what is too small for it
    near = {torch.bfloat16: (0, 0), torch.float8_e4m3fn: (1 / 16, 2**-10), torch.float8_e5m2: (1 / 8, 2**-10)}[dtype]
    read = {layer: keys.keys(layer, positions) for layer in picked}
    for layer in picked:
        assert read[layer].dtype == torch.float32
        stored_key = want[layer - LAYERS.start].flip(0)[positions]
        torch.testing.assert_close(read[layer], stored_key, rtol=near[0], atol=near[1])
        stored_value = (3 * stored_key.bfloat16()).float()
        torch.testing.assert_close(keys.values(layer, positions), stored_value, rtol=near[0], atol=6 * near[1])
    queries = torch.randn(len(picked), 2, 4, 8, generator=torch.Generator().manual_seed(1))
    total = sum(key_scores(queries[i], read[layer], 0.3, "energy") for i, layer in enumerate(picked))
    torch.testing.assert_close(keys.scores(queries, positions, "energy"), total)
    by_layer = torch.stack([key_scores(queries[i], read[layer], 0.3, "energy") for i, layer in enumerate(picked)])
    torch.testing.assert_close(keys.layer_scores(queries, positions, "energy"), by_layer)
    norms = torch.stack([keys.values(layer, positions).square().sum(2).mean(1) for layer in picked], 1)
    torch.testing.assert_close(keys.value_norms(positions), norms)
    torch.testing.assert_close(keys.mean_keys(positions), torch.stack(list(read.values())).mean((0, 2)))


@pytest.mark.parametrize(
    ("buffers", "scales"),
    [
        ([torch.zeros(4, 2, 8), torch.zeros(4, 2, 8).half()], None),
        ([torch.zeros(4, 2, 1, 8)], None),
        ([torch.zeros(2, 4, 8).transpose(0, 1)], None),
        ([torch.zeros(4, 2, 8)], [0.0]),
        ([torch.zeros(4, 2, 8)], [1.0, 1.0]),
    ],
)
def test_refuses_buffers_it_would_misread(buffers, scales):
    """Catches: keys of another layout or dtype read as if they were plain."""
    with pytest.raises(ValueError, match=r"key buffers|dequantisation"):
        PagedKeys(buffers, scales)
