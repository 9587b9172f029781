"""Named methods: one file each, found by name. A file gives SUMMARY, SOURCE and ``build(config) -> Method``."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from intentkv.config import Config
    from intentkv.head import RuleName
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
    decode_rule: Aggregator | None = None
    """What scores then, where it is not the aggregator; it reads the same session memory."""
    splits_by_head: bool = True
    """Scores (and memories) taken from some of the heads, added to those of the others, order positions as those of all heads do.

    An engine whose processes hold some heads each may then add scores; else every process must read keys for all heads."""
    layout: Layout = "redirect"


@dataclass(frozen=True)
class MethodInfo:
    name: str
    summary: str
    source: str
    needs_head: bool = False
    """Whether it loads a trained head (``Config.head``)."""


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
    return MethodInfo(name, module.SUMMARY, module.SOURCE, getattr(module, "NEEDS_HEAD", False))


def build_method(name: str, config: Config) -> Method:
    """The method ``name`` with the configuration's parameters.

    Raises:
        KeyError: no such method.
        ConfigError: its head is missing or damaged.
    """
    method: Method = _module(name).build(config)
    return method


def method_problem(name: str, config: Config) -> str | None:
    """One sentence when ``config`` has no head for the method ``name``, which needs one; else None.

    Raises:
        KeyError: no such method.
        ConfigError: the head is missing or damaged.
    """
    if not method_info(name).needs_head:
        return None
    if config.head is None:
        return f"Method {name!r} needs a trained head; give --head DIR ('intentkv train fit' writes one)."
    from intentkv.head import load_head

    wanted = load_head(config.head).config.method
    return None if name == wanted else f"The head in {str(config.head)!r} belongs to method {wanted!r}; choose that method or another head."


def learned_method(rule: RuleName, config: Config) -> Method:
    """``rule`` corrected by the trained head that the configuration names; in mid-decode the rule alone.

    A head is trained for the moment behind a prompt: while an answer is written, the window's queries are gone and its own tokens are
    among the candidates.

    Raises:
        ValueError: it names none; :func:`method_problem` says so to users before a method is built.
        ConfigError: the head is missing or damaged.
    """
    from intentkv.aggregators.learned import Learned, head_queries
    from intentkv.head import load_head

    if config.head is None:
        raise ValueError("a learned method was built without a head")
    head = load_head(config.head)
    plain = build_method(rule, config)
    return replace(
        plain,
        queries=head_queries(rule, head.config.feature_set, config.turn_queries, config.window),
        aggregator=Learned(rule, head, config.decay),
        decode_rule=plain.aggregator,
        splits_by_head=False,
    )
