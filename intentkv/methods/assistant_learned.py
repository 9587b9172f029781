"""Ours: the assistant rule with a trained residual."""

from intentkv.aggregators.learned import Learned, head_queries
from intentkv.config import Config
from intentkv.head import load_head
from intentkv.methods import Method, head_folder
from intentkv.selection import ForcedKeep

SUMMARY = "the assistant rule corrected by a trained head (--head)"
SOURCE = "this project; docs/train.md"
NEEDS_HEAD = True


def build(config: Config) -> Method:
    head = load_head(head_folder(config))
    return Method(
        head_queries("assistant", head.config.feature_set, config.turn_queries, config.window),
        Learned("assistant", head, config.decay),
        ForcedKeep(sinks=config.sinks, recent=config.recent),
    )
