"""Let PyPI's torchvision import beside a CPU build of torch.

SGLang and transformers import torchvision unconditionally. Its wheels are linked against CUDA torch, so beside a CPU torch its
C extension does not load and the Python side dies on ``operator torchvision::nms does not exist``. Declaring that operator's schema is
enough to import it; nothing on a text model's path calls it.
"""

from __future__ import annotations

import importlib
import sys

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_library: torch.library.Library | None = None


def ensure_torchvision_imports() -> None:
    """Import torchvision; declare the missing operator schemas first where its C extension does not load.

    Does nothing where torchvision loads or is not installed.

    Raises:
        RuntimeError: torchvision fails to import for another reason.
    """
    global _library
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
        for name in [n for n in sys.modules if n == "torchvision" or n.startswith("torchvision.")]:
            del sys.modules[name]
        _library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            _library.define(f"{operator}{_SCHEMA}")
        importlib.import_module("torchvision")
