"""GPU tests run alone (``scripts/test_gpu.sh``): the other tests' process has Triton's interpreter on and servers on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton

from intentkv_sglang.vision import ensure_torchvision_imports

# before a test module imports SGLang
ensure_torchvision_imports()


def _reason() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    if type(triton.language.cumsum).__name__ != "JITFunction":
        return "Triton's interpreter is on in this process: run scripts/test_gpu.sh"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _reason()
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.gpu)
            # They are collected everywhere, so that a test that no longer imports fails also where none can run.
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
