"""Models that tests serve or compute with; made once a session, only when a test asks for them."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest

from intentkv_sglang.default_model import ensure_default_model, make_tiny_model

# Triton decides at import and again at each launch whether kernels are interpreted; its own library must agree with ours. So it is
# imported here, before anything that imports SGLang or transformers. Tests on a GPU want compiled kernels: they run alone, and whether
# they do must be known before pytest has a configuration to ask.
_named = [Path(argument.split("::")[0]).resolve() for argument in sys.argv[1:]]
_tests = [path for path in _named if path.exists()]
if not _tests or not all(path.is_relative_to(Path(__file__).resolve().parent / "gpu") for path in _tests):
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
