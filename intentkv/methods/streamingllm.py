"""StreamingLLM: attention sinks and the newest tokens."""

from intentkv.aggregators.position import Recency
from intentkv.config import Config
from intentkv.methods import Method
from intentkv.queries.none import NoQueries
from intentkv.selection import ForcedKeep

SUMMARY = "attention sinks and the newest tokens"
SOURCE = "StreamingLLM, arXiv 2309.17453, section 3"

_SINKS = 4


def build(config: Config) -> Method:
    return Method(NoQueries(), Recency(), ForcedKeep(sinks=max(_SINKS, config.sinks), recent=config.recent), True)
