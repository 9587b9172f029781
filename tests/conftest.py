"""Models that tests serve or compute with; made once a session, only when a test asks for them."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

from intentkv_sglang.default_model import ensure_default_model, make_tiny_model

GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_configure(config: pytest.Config) -> None:
    """Let Triton interpret kernels, except where the GPU tests run alone: they need them compiled.

    Triton decides at import and again at each launch whether kernels are interpreted; its own library must agree with ours. So it is
    imported here, before anything that imports SGLang or transformers.
    """
    only_gpu = [Path(argument.split("::")[0]).resolve().is_relative_to(GPU_TESTS) for argument in config.args]
    if not all(only_gpu):
        os.environ["TRITON_INTERPRET"] = "1"
        importlib.import_module("triton.experimental.gluon")
        del os.environ["TRITON_INTERPRET"]


@pytest.fixture(scope="session")
def default_model() -> Path:
    """Folder of the small real model."""
    return ensure_default_model(None)


@pytest.fixture(scope="session")
def tiny_model(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random two-layer Qwen3 with the real model's tokenizer.

    Its weights are spread ten times wider than usual: attention then decides the next token, and no token is a close second.
    """
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", default_model, initializer_range=0.2)
