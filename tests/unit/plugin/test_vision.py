"""torchvision beside a CPU build of torch. That it imports at all is shown by every test here: conftest did it before SGLang."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from intentkv_sglang import vision

pytestmark = pytest.mark.unit


def test_the_operator_is_declared_and_torchvision_is_whole():
    pytest.importorskip("torchvision")
    from torchvision.transforms import InterpolationMode

    assert InterpolationMode.BICUBIC
    assert str(torch.ops.torchvision.nms.default._schema).startswith("torchvision::nms(Tensor dets, Tensor scores, float iou_threshold)")


def test_a_second_call_changes_nothing():
    """Declaring an operator twice is an error in torch."""
    before, library = sys.modules.get("torchvision"), vision._library
    vision.ensure_torchvision_imports()
    assert sys.modules.get("torchvision") is before
    assert vision._library is library


def fail_with(error):
    def fail(name):
        raise error

    return fail


def test_without_torchvision(monkeypatch):
    monkeypatch.setattr(importlib, "import_module", fail_with(ModuleNotFoundError("No module named 'torchvision'")))
    vision.ensure_torchvision_imports()


def test_another_failure_is_not_swallowed(monkeypatch):
    monkeypatch.setattr(importlib, "import_module", fail_with(RuntimeError("something else")))
    with pytest.raises(RuntimeError, match="something else"):
        vision.ensure_torchvision_imports()


def test_schemas_are_declared_where_the_extension_does_not_load(monkeypatch):
    """Half-imported modules are dropped before the second try; another torchvision-like name is left alone."""
    tries, declared = [], []

    def load(name):
        tries.append([n for n in ("torchvision", "torchvision.ops", "torchvisionary") if n in sys.modules])
        if len(tries) == 1:
            raise RuntimeError("operator torchvision::nms does not exist")

    class Library:
        def __init__(self, name, kind):
            assert (name, kind) == ("torchvision", "DEF")

        def define(self, schema):
            declared.append(schema.partition("(")[0])

    monkeypatch.setattr(importlib, "import_module", load)
    monkeypatch.setattr(torch.library, "Library", Library)
    monkeypatch.setattr(vision, "_library", None)
    for name in ("torchvision", "torchvision.ops", "torchvisionary"):
        monkeypatch.setitem(sys.modules, name, object())
    vision.ensure_torchvision_imports()
    assert tries == [["torchvision", "torchvision.ops", "torchvisionary"], ["torchvisionary"]]
    assert declared == ["nms", "qnms"]
    assert vision._library is not None, "the declaration would be collected"
