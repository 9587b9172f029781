"""Kernels run in Triton's interpreter on the CPU: the switch must be set when a kernel is decorated and when it is launched."""

from __future__ import annotations

import importlib

import pytest


@pytest.fixture
def interpreted(monkeypatch):
    """``interpreted("attention_scores")``: a kernel module whose kernels run in the interpreter."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return lambda name: importlib.import_module(f"intentkv.kernels.{name}")
