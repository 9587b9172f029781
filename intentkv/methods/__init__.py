"""Named methods: one file each, found by name. A file gives SUMMARY, SOURCE and ``build(config) -> Method``."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from intentkv.config import Config
    from intentkv.protocols import Aggregator, Layout, QuerySource
    from intentkv.selection import ForcedKeep


@dataclass(frozen=True)
class Method:
    """A preset of the parts in :mod:`intentkv.protocols` (budget and trigger come from the configuration or the request)."""

    queries: QuerySource
    aggregator: Aggregator | None
    """None: never evict."""
    forced: ForcedKeep
    while_decoding: bool = False
    """Also evict while a long generation outgrows its budget, every ``decode_interval`` tokens."""
    layout: Layout = "redirect"


@dataclass(frozen=True)
class MethodInfo:
    name: str
    summary: str
    source: str


@cache
def method_names() -> tuple[str, ...]:
    """Names of all methods, as file names in this package with ``-`` for ``_``."""
    return tuple(sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__)))


def _module(name: str) -> ModuleType:
    if name not in method_names():
        raise KeyError(f"unknown method {name!r}")
    return import_module(f"{__name__}.{name.replace('-', '_')}")


def method_info(name: str) -> MethodInfo:
    """What a method is, in one line, and where it comes from.

    Raises:
        KeyError: no such method.
    """
    module = _module(name)
    return MethodInfo(name, module.SUMMARY, module.SOURCE)


def build_method(name: str, config: Config) -> Method:
    """The method ``name`` with the configuration's parameters.

    Raises:
        KeyError: no such method.
    """
    method: Method = _module(name).build(config)
    return method
