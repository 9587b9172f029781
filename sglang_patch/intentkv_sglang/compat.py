"""Every private name of SGLang that the plugin relies on, and the checks that they are what we expect.

Supported: 0.5.17. Other versions are refused unless ``INTENTKV_ALLOW_UNTESTED_SGLANG=1``.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import torch

from intentkv.kernels.paged_keys import PagedKeys, PagedKV

TESTED_VERSIONS = ("0.5.17",)
BACKEND_NAME = "intentkv"
"""Value of ``--radix-cache-backend`` that selects the plugin."""

# Hook targets, one place. Each must be patched before the cache is built (see guards.check_hooks).
HOOK_POOL_INIT = "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.__init__"
HOOK_BATCH_INIT = "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new"
HOOK_SCHEDULER_INIT = "sglang.srt.managers.scheduler.Scheduler.__init__"
HOOK_BATCH_RESULT = "sglang.srt.managers.scheduler.Scheduler.process_batch_result"
HOOK_CONTROL = "sglang.srt.managers.scheduler.Scheduler.handle_dumper_control"
HOOK_VALIDATE_REQUEST = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"
HOOK_CHAT_REQUEST = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._convert_to_internal_request"
HOOK_FINISHED = "sglang.srt.utils.request_logger.RequestLogger.log_finished_request"
HOOK_HTTP_SERVER = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"
SCHEDULER_HOOKS = (HOOK_POOL_INIT, HOOK_BATCH_INIT, HOOK_SCHEDULER_INIT, HOOK_BATCH_RESULT, HOOK_CONTROL)

# (dotted function, parameters we pass or rely on)
_SIGNATURES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (HOOK_BATCH_INIT, ("batch", "model_runner")),
    (HOOK_BATCH_RESULT, ("batch", "result")),
    (HOOK_CONTROL, ("recv_req",)),
    (HOOK_VALIDATE_REQUEST, ("obj", "input_ids")),
    (HOOK_FINISHED, ("obj", "out")),
    ("sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.cache_finished_req", ("req", "is_insert", "kv_len_to_handle")),
    ("sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.cache_unfinished_req", ("req", "chunked")),
    (
        "sglang.srt.mem_cache.unified_cache.components.full_component.FullComponent.evict_component",
        ("node", "device_frees", "host_frees", "target"),
    ),
    (
        "sglang.srt.mem_cache.unified_cache.components.full_component.FullComponent.acquire_component_lock",
        ("node", "result", "lock_host"),
    ),
    (
        "sglang.srt.mem_cache.unified_cache.components.full_component.FullComponent.release_component_lock",
        ("node", "params", "lock_host"),
    ),
    (
        "sglang.srt.mem_cache.unified_cache.components.full_component.FullComponent.redistribute_on_node_split",
        ("new_parent", "child"),
    ),
)


def sglang_version() -> str:
    return version("sglang")


def version_problem() -> str | None:
    """One sentence when the installed SGLang is not one we tested, else None."""
    found = sglang_version()
    if found in TESTED_VERSIONS or os.environ.get("INTENTKV_ALLOW_UNTESTED_SGLANG") == "1":
        return None
    return (
        f"SGLang {found} is not supported; install sglang=={TESTED_VERSIONS[-1]} or set INTENTKV_ALLOW_UNTESTED_SGLANG=1 to try it anyway."
    )


def signature_problems() -> list[str]:
    """One sentence for each private function whose parameters are not the ones we rely on."""
    import pkgutil

    problems = []
    for target, wanted in _SIGNATURES:
        try:
            function = pkgutil.resolve_name(target)
        except (AttributeError, ImportError):
            problems.append(f"SGLang has no {target}; install sglang=={TESTED_VERSIONS[-1]}.")
            continue
        missing = [name for name in wanted if name not in inspect.signature(inspect.unwrap(function)).parameters]
        if missing:
            problems.append(f"SGLang's {target} has no parameter {', '.join(missing)}; install sglang=={TESTED_VERSIONS[-1]}.")
    return problems


def unpatched_hooks() -> list[str]:
    """Scheduler-side hook targets that SGLang did not apply (it only logs a hook that fails)."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return [target for target in SCHEDULER_HOOKS if target not in HookRegistry._patched]


def plugin_selected() -> bool:
    """Whether the server of this process was started with ``--radix-cache-backend intentkv``."""
    from sglang.srt.runtime_context import get_context

    server_args = get_context().server_args
    return server_args is not None and server_args.radix_cache_backend == BACKEND_NAME


def is_health_check(rid: str) -> bool:
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

    return rid.startswith(HEALTH_CHECK_RID_PREFIX)


class AttentionShape(NamedTuple):
    """What all attention layers of a model have in common, on this rank."""

    query_heads: int
    dim: int
    scaling: float


def attention_shape(model: torch.nn.Module) -> AttentionShape:
    """The shape of the model's attention layers.

    Raises:
        ValueError: no attention layer, layers that differ, logit capping, or layers that see a window or chunk of positions only.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    layers = [m for m in model.modules() if isinstance(m, RadixAttention)]
    shapes = {AttentionShape(m.tp_q_head_num, m.qk_head_dim, float(m.scaling)) for m in layers}
    if len(shapes) != 1:
        raise ValueError(f"IntentKV needs a model whose attention layers are all alike, found {len(shapes)} kinds.")
    if any(m.logit_cap for m in layers):
        raise ValueError("IntentKV does not support models with attention logit capping.")
    if any(m.sliding_window_size > 0 or m.use_irope for m in layers):
        # Without SGLang's memory pool for such layers nothing else tells: a window would be counted in live tokens.
        raise ValueError("IntentKV does not support models with sliding-window or chunked attention layers.")
    return shapes.pop()


def kv_layers(kv_pool: Any) -> range:
    """Layer ids that ``kv_pool`` holds on this rank."""
    return range(kv_pool.start_layer, kv_pool.start_layer + kv_pool.layer_num)


def paged_kv(model: torch.nn.Module, kv_pool: Any, layers: Sequence[int]) -> PagedKV:
    """Keys and values of ``layers`` in ``kv_pool``, which holds them all its life.

    SGLang divides by the layer's ``k_scale`` (``v_scale``) what it stores in fewer bits, and only that.

    Raises:
        ValueError: keys that are not plain numbers in [slot, head, dim] order.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    keys = [kv_pool.get_key_buffer(layer) for layer in layers]
    values = [kv_pool.get_value_buffer(layer) for layer in layers]
    if getattr(kv_pool, "is_quantized_kv_cache", False):
        raise ValueError("IntentKV reads keys of 8 bits or more: choose another --kv-cache-dtype.")
    attention = {m.layer_id: m for m in model.modules() if isinstance(m, RadixAttention)}
    eight_bit = keys[0].element_size() == 1
    key_scales = [(attention[layer].k_scale_float or 1.0) if eight_bit else 1.0 for layer in layers]
    value_scales = [(attention[layer].v_scale_float or 1.0) if eight_bit else 1.0 for layer in layers]
    return PagedKV(PagedKeys(keys, key_scales), PagedKeys(values, value_scales))
