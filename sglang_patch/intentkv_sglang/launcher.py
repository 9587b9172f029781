"""``intentkv serve``: a stock SGLang server with the plugin selected, and sane flags on a plain CPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from intentkv.config import Config, ConfigError
from intentkv_sglang import compat, cpu_platform_name

_CPU_FLAGS = (
    ("--device", "cpu"),
    # "auto" would turn a float32 checkpoint into float16, which a plain CPU computes slowly and badly.
    ("--dtype", "float32"),
    ("--attention-backend", "torch_native"),
    ("--sampling-backend", "pytorch"),
    ("--grammar-backend", "none"),
    ("--disable-cuda-graph", None),
    ("--mem-fraction-static", "0.5"),
    ("--max-total-tokens", "32768"),
    ("--max-running-requests", "8"),
    # An idle scheduler that polls would take a share of the few cores there are.
    ("--sleep-on-idle", None),
)

_GPU_FLAGS = (("--attention-backend", "triton"),)


def _given(flag: str, extra: list[str]) -> bool:
    return any(a == flag or a.startswith(f"{flag}=") for a in extra)


def server_arguments(model: str, stock: bool, extra: list[str], cpu: bool) -> list[str]:
    """SGLang's command line: ours first, never overriding a flag the user gave."""
    arguments = ["--model-path", model]
    defaults: list[tuple[str, str | None]] = [("--enable-cache-report", None), ("--enable-metrics", None)]
    defaults += _CPU_FLAGS if cpu else _GPU_FLAGS
    if not stock:
        defaults.append(("--radix-cache-backend", compat.BACKEND_NAME))
    for flag, value in defaults:
        if not _given(flag, extra):
            arguments += [flag] if value is None else [flag, value]
    return arguments + extra


def server_environment(config: Config, stock: bool, local_model: bool, cpu: bool) -> dict[str, str]:
    """Environment of the server process; spawned schedulers inherit it."""
    environment = dict(os.environ)
    if not stock:
        environment["INTENTKV_CONFIG"] = config.model_dump_json()
    if cpu:
        environment["SGLANG_PLATFORM"] = cpu_platform_name.NAME
        environment.pop("SGLANG_USE_CPU_ENGINE", None)
    if local_model:
        environment.setdefault("HF_HUB_OFFLINE", "1")
    return environment


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"Cannot record into {str(folder)!r}: {error.strerror}; give a folder that can be written.") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"Cannot record into {str(folder)!r}: it is not writable; give a folder that can be written.")


def serve(model: str | None, config: Config, stock: bool, extra: list[str]) -> int:
    """Replace this process by the server (same pid, so a supervisor's signals reach it).

    Args:
        model: folder or Hugging Face name; None serves SmolLM2, converted once into the cache folder.
        stock: leave the plugin out, everything else equal.
        extra: SGLang flags, passed through.

    Raises:
        ConfigError: a flag contradicts the plugin, or the model folder does not exist.
    """
    if _given("--model-path", extra) or _given("--model", extra):
        raise ConfigError("Give the model once, with --model.")
    if not stock and _given("--radix-cache-backend", extra):
        raise ConfigError("--radix-cache-backend is set by 'intentkv serve'; leave it out, or use --stock.")
    if stock and config.record is not None:
        raise ConfigError("A stock server cannot record: leave out --record or --stock.")
    if config.record is not None:
        _check_writable(config.record)
    if model is None:
        from intentkv_sglang.default_model import ensure_default_model

        model = str(ensure_default_model(None))
    elif model.startswith((".", "/", "~")) and not Path(model).expanduser().is_dir():
        raise ConfigError(f"Model folder {model!r} does not exist; give an existing folder or a Hugging Face name.")
    cpu = not torch.cuda.is_available()
    local = Path(model).expanduser().is_dir()
    arguments = server_arguments(str(Path(model).expanduser()) if local else model, stock, extra, cpu)
    sys.stdout.flush()
    os.execve(
        sys.executable,
        [sys.executable, "-m", "intentkv_sglang.launch", *arguments],
        server_environment(config, stock, local, cpu),
    )
