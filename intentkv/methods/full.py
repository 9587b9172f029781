"""Keep everything."""

from intentkv.config import Config
from intentkv.methods import Method
from intentkv.queries.none import NoQueries
from intentkv.selection import ForcedKeep

SUMMARY = "keep everything; equal to the stock server"
SOURCE = "baseline"


def build(config: Config) -> Method:
    return Method(NoQueries(), None, ForcedKeep())
