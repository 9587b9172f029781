"""Uniformly random history: the floor every method must beat."""

from intentkv.aggregators.position import Random
from intentkv.config import Config
from intentkv.methods import Method
from intentkv.queries.none import NoQueries
from intentkv.selection import ForcedKeep

SUMMARY = "random history tokens; the floor"
SOURCE = "baseline"


def build(config: Config) -> Method:
    return Method(NoQueries(), Random(config.seed), ForcedKeep(sinks=config.sinks, recent=config.recent), True)
