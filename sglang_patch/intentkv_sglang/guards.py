"""Start-up guards: what is not supported is refused with one sentence that says what to change. Nothing is skipped silently."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from intentkv.config import Config
from intentkv.head import ModelShape, load_head
from intentkv_sglang import compat
from intentkv_sglang.live_view import BACKENDS


class GuardError(RuntimeError):
    """The server cannot run with the plugin; the message says what to change."""


@dataclass(frozen=True)
class Guard:
    """``fires(server_args)`` is true when a setting is not supported; ``change`` says what to do."""

    name: str
    fires: Callable[[Any], bool]
    change: str


_CHOICE = f"{', '.join(list(BACKENDS)[:-1])} or {list(BACKENDS)[-1]}"


def _on(name: str, default: Any = None) -> Callable[[Any], bool]:
    return lambda args: bool(getattr(args, name, default))


def _above_one(name: str) -> Callable[[Any], bool]:
    return lambda args: (getattr(args, name, 1) or 1) > 1


def _wrong_backend(args: Any) -> bool:
    names = {args.attention_backend, args.prefill_attention_backend, args.decode_attention_backend} - {None}
    return bool(names - set(BACKENDS))


def _split_backends(args: Any) -> bool:
    """SGLang then builds one backend that holds two; which of them has the rows is not ours to follow."""
    prefill, decode = (name or args.attention_backend for name in (args.prefill_attention_backend, args.decode_attention_backend))
    return bool(prefill != decode)


def _full_prefill_graph(args: Any) -> bool:
    """Attention of a prompt would be replayed too: no query could be captured from it."""
    resolved = getattr(getattr(args, "cuda_graph_config", None), "prefill", None)
    return "full" in (args.cuda_graph_backend_prefill, getattr(resolved, "backend", None))


_KV_TYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
"""Plain tensors that scoring can read; the others are packed or scaled block by block."""


_SERVER_GUARDS: tuple[Guard, ...] = (
    # Before the radix cache, which SGLang itself turns off for it.
    Guard("multi-item scoring", _on("enable_mis"), "remove --enable-mis."),
    Guard("page size", _above_one("page_size"), "start with --page-size 1."),
    Guard("radix cache off", _on("disable_radix_cache"), "remove --disable-radix-cache."),
    Guard("hierarchical cache", _on("enable_hierarchical_cache"), "remove --enable-hierarchical-cache."),
    Guard("hierarchical sparse attention", _on("enable_hisparse"), "remove --enable-hisparse."),
    Guard("LMCache", _on("enable_lmcache"), "remove --enable-lmcache."),
    Guard("FlexKV", _on("enable_flexkv"), "remove --enable-flexkv."),
    Guard("unified memory pool", _on("enable_unified_memory"), "remove --enable-unified-memory."),
    Guard("PD disaggregation", lambda a: a.disaggregation_mode not in (None, "null"), "remove --disaggregation-mode."),
    Guard("speculative decoding", _on("speculative_algorithm"), "remove --speculative-algorithm."),
    Guard("streaming sessions", _on("enable_streaming_session"), "remove --enable-streaming-session."),
    Guard("session radix cache", _on("enable_session_radix_cache"), "remove --enable-session-radix-cache."),
    Guard("stripped thinking cache", _on("strip_thinking_cache"), "remove --strip-thinking-cache."),
    Guard("pipeline parallelism", _above_one("pp_size"), "start with --pp-size 1."),
    Guard("decode context parallelism", _above_one("dcp_size"), "start with --dcp-size 1."),
    Guard("attention context parallelism", _above_one("attn_cp_size"), "start with --attn-cp-size 1."),
    Guard("data-parallel attention", _on("enable_dp_attention"), "remove --enable-dp-attention."),
    Guard("two-batch overlap", _on("enable_two_batch_overlap"), "remove --enable-two-batch-overlap."),
    Guard("PD multiplexing", _on("enable_pdmux"), "remove --enable-pdmux."),
    Guard("data parallelism in one server", _above_one("dp_size"), "start one server per replica behind a router."),
    Guard("embedding models", _on("is_embedding"), "remove --is-embedding."),
    Guard("diffusion LLM", _on("dllm_algorithm"), "remove --dllm-algorithm."),
    Guard("attention backend", _wrong_backend, f"start with --attention-backend {_CHOICE}."),
    Guard(
        "different attention backends for prefill and decode",
        _split_backends,
        "remove --prefill-attention-backend and --decode-attention-backend.",
    ),
    Guard("full prefill CUDA graphs", _full_prefill_graph, "start with --cuda-graph-backend-prefill breakable."),
    Guard("block-scaled KV caches", lambda a: a.kv_cache_dtype not in _KV_TYPES, f"start with --kv-cache-dtype {' or '.join(_KV_TYPES)}."),
)


def server_problems(server_args: Any) -> list[str]:
    """One sentence for every guard that ``server_args`` (SGLang's ServerArgs) trips."""
    return [f"IntentKV does not support {g.name}: {g.change}" for g in _SERVER_GUARDS if g.fires(server_args)]


def environment_problems() -> list[str]:
    """One sentence for every installed version, private signature or variable that is not supported."""
    problems = [p for p in [compat.version_problem()] if p]
    problems += compat.signature_problems()
    if os.environ.get("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", "").lower() in ("1", "true"):
        problems.append("IntentKV does not support the C++ radix tree: unset SGLANG_EXPERIMENTAL_CPP_RADIX_TREE.")
    if os.environ.get("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python") != "python":
        problems.append("IntentKV needs the Python tree core: unset SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.")
    return problems


def hook_problems() -> list[str]:
    """One sentence for every hook SGLang did not apply."""
    return [f"SGLang did not apply the hook on {t}: see its log for the cause, or reinstall intentkv." for t in compat.unpatched_hooks()]


def context_problems(ctx: Any) -> list[str]:
    """One sentence for every unsupported kind of model or cache in SGLang's TreeCacheBuildContext."""
    problems = []
    if ctx.is_hybrid_swa or ctx.is_hybrid_ssm or ctx.is_dsa:
        problems.append("IntentKV supports plain attention only: serve a model without sliding-window, state-space or sparse layers.")
    if getattr(ctx.model_config, "is_encoder_decoder", False):
        problems.append("IntentKV does not support encoder-decoder models: serve a decoder-only model.")
    if getattr(getattr(ctx.model_config, "attention_arch", None), "name", None) == "MLA":
        problems.append("IntentKV does not support MLA attention: serve an MHA or GQA model.")
    return problems


def head_problems(config: Config, server_args: Any) -> list[str]:
    """One sentence when the trained head of ``config`` does not fit the model, or the model the ranks, that ``server_args`` name.

    Raises:
        ConfigError: the head is missing or damaged.
    """
    if config.head is None:
        return []
    head = load_head(config.head).config
    # Of the whole model, as a head's: no rank has divided it yet.
    shape = ModelShape.of(server_args.get_model_config().hf_config)
    problem = head.problem(shape, config.layer_stride) or _uneven_ranks(shape, server_args)
    return [problem] if problem else []


def _uneven_ranks(shape: ModelShape, server_args: Any) -> str | None:
    """A mean over heads is the mean over ranks only when all have equally many.

    On a GPU, SGLang gives a KV head to several ranks when there are more ranks than heads; on the CPU it pads with heads of zeros.
    """
    size, query_heads, kv_heads = server_args.tp_size or 1, shape.query_heads, shape.kv_heads
    shared = server_args.device != "cpu" and size % kv_heads == 0
    if query_heads % size == 0 and (kv_heads % size == 0 or shared):
        return None
    return (
        f"A trained head needs the model's heads divided evenly: start with a --tp-size that divides {query_heads} query heads and "
        f"{kv_heads} KV heads, not {size}."
    )


def backend_problems(attn_backend: Any) -> list[str]:
    """One sentence when the attention backend that SGLang built has no live view, for example because it chose one by itself."""
    if getattr(attn_backend, "sees_live_slots_only", False):
        return []
    return [f"IntentKV does not support the attention backend {type(attn_backend).__name__}: start with --attention-backend {_CHOICE}."]


def require(problems: list[str]) -> None:
    """Raises:
    GuardError: naming the first problem, when there is one.
    """
    if problems:
        raise GuardError(problems[0])
