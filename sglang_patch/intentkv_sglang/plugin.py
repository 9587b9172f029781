"""Entry point of group ``sglang.srt.plugins``: registers the radix backend, the hooks and the live-view attention.

Everything stays inert unless the server is started with ``--radix-cache-backend intentkv``. SGLang only logs a plugin that fails, so that
flag is what makes a failure fatal: its factory (:func:`create_cache`) refuses to build a cache unless every hook is in place.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch

from intentkv.config import config_from_environment
from intentkv.methods import build_method
from intentkv_sglang import compat, guards
from intentkv_sglang.capture import DecodeTap, QueryBank
from intentkv_sglang.live_view import BACKENDS, PassChannel, ShadowRows, with_live_view

_runtime: Any = None
"""The Runtime of this scheduler process, once its radix cache is built."""
_channel = PassChannel()
"""From the runtime to this process's attention backends."""
_bank: QueryBank | None = None
"""Made with the first attention backend, before any graph is recorded."""
_exporter: Any = None
"""Publishes its metrics, when the server has any."""


def register() -> None:
    """Called by SGLang in every process that loads plugins."""
    from sglang.srt.mem_cache.registry import register_radix_cache_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from intentkv_sglang import routes

    register_radix_cache_backend(compat.BACKEND_NAME, create_cache)
    _wrap_attention_backends()
    HookRegistry.register(compat.HOOK_POOL_INIT, _add_shadow_rows, HookType.AFTER)
    HookRegistry.register(compat.HOOK_BATCH_INIT, _begin_pass, HookType.AFTER)
    HookRegistry.register(compat.HOOK_SCHEDULER_INIT, _bind, HookType.AFTER)
    HookRegistry.register(compat.HOOK_BATCH_RESULT, _end_pass, HookType.AFTER)
    HookRegistry.register(compat.HOOK_CONTROL, _control, HookType.AROUND)
    if multiprocessing.parent_process() is None:
        # The HTTP side lives in the main process only; hooking it elsewhere would import FastAPI into every scheduler.
        HookRegistry.register(compat.HOOK_VALIDATE_REQUEST, routes.validate_request, HookType.BEFORE)
        HookRegistry.register(compat.HOOK_HTTP_SERVER, routes.add_routes, HookType.BEFORE)
        _record()


def _record() -> None:
    """Log requests, when the configuration says where to."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    config = config_from_environment()
    if config.record is None:
        return
    from intentkv_sglang.recorder import Recorder

    recorder = Recorder(config)
    HookRegistry.register(compat.HOOK_VALIDATE_REQUEST, recorder.note_prompt, HookType.BEFORE)
    HookRegistry.register(compat.HOOK_CHAT_REQUEST, recorder.note_chat, HookType.AFTER)
    HookRegistry.register(compat.HOOK_FINISHED, recorder.note_finished, HookType.BEFORE)


def create_cache(ctx: Any) -> Any:
    """Factory of ``--radix-cache-backend intentkv``.

    Raises:
        GuardError: a setting, version or model is not supported, or a hook is missing.
        ConfigError: the configuration is invalid.
    """
    global _runtime
    from intentkv_sglang.radix_cache import IntentKVRadixCache
    from intentkv_sglang.runtime import Runtime

    guards.require(
        guards.environment_problems() + guards.server_problems(ctx.server_args) + guards.context_problems(ctx) + guards.hook_problems()
    )
    config = config_from_environment()
    cache = IntentKVRadixCache(ctx.params)
    _runtime = Runtime(config, cache)
    return cache


def _wrap_attention_backends() -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend

    for name in BACKENDS:
        # Under its own name: SGLang decides by name which paths a backend may take.
        register_attention_backend(name)(_live_view_factory(name, ATTENTION_BACKENDS[name]))


def _live_view_factory(name: str, stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def create(runner: Any) -> Any:
        from sglang.srt.platforms import current_platform

        from intentkv_sglang import cpu_attention, cpu_platform

        on_plain_cpu = name == "torch_native" and isinstance(current_platform, cpu_platform.PlainCpuPlatform)
        backend = cpu_attention.create_backend(runner) if on_plain_cpu else stock(runner)
        if not compat.plugin_selected():
            return backend
        _make_bank(runner)
        pool = runner.req_to_token_pool
        return with_live_view(backend, name, ShadowRows(pool.req_to_token, pool.size), _channel)

    return create


def _make_bank(runner: Any) -> None:
    """Storage for captured queries; a graph records writes into it, so it must exist before the first recording."""
    global _bank
    if _bank is not None:
        return
    config = config_from_environment()
    shape = compat.attention_shape(runner.model)
    layers = compat.kv_layers(runner.token_to_kv_pool)[:: config.layer_stride]
    device = runner.req_to_token_pool.req_to_token.device
    _bank = QueryBank(layers, config.query_rows, shape.query_heads, shape.dim, runner.dtype, device)
    if device.type == "cuda" and build_method(config.method, config).queries.decode:
        _channel.decode_tap = DecodeTap(_bank, runner.req_to_token_pool.size)


def _add_shadow_rows(result: None, pool: Any, *args: Any, **kwargs: Any) -> None:
    """A shadow row for each request row: row r (1..size) has its shadow at r + size. Backends take the tensor later."""
    if compat.plugin_selected():
        rows, context = pool.req_to_token.shape
        pool.req_to_token = torch.zeros((rows + pool.size, context), dtype=pool.req_to_token.dtype, device=pool.req_to_token.device)


def _begin_pass(forward_batch: Any, cls: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    if _runtime is not None:
        _runtime.begin_pass(batch)


def _bind(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    global _exporter
    if _runtime is None:
        return
    guards.require(guards.backend_problems(scheduler.tp_worker.model_runner.attn_backend))
    _runtime.bind(scheduler, _bank, _channel)
    if scheduler.server_args.enable_metrics and scheduler.tp_group.rank_in_group == 0:
        from intentkv_sglang.exporter import Exporter

        _exporter = Exporter(_runtime)


def _end_pass(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    if _runtime is not None:
        _runtime.end_pass()
        if _exporter is not None:
            _exporter.publish()


def _control(stock: Callable[..., None], scheduler: Any, request: Any) -> None:
    from intentkv_sglang import status

    if _runtime is not None and request.method == status.STATUS_COMMAND:
        status.answer(_runtime, scheduler, request)
    else:
        stock(scheduler, request)
