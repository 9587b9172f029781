"""The published rule with a trained residual."""

from intentkv.aggregators.learned import Learned, head_queries
from intentkv.config import Config
from intentkv.head import load_head
from intentkv.methods import Method, head_folder
from intentkv.selection import ForcedKeep

SUMMARY = "the published rule corrected by a trained head (--head)"
SOURCE = "IntentKV, arXiv 2606.09916, section 3, phase 2"
NEEDS_HEAD = True


def build(config: Config) -> Method:
    head = load_head(head_folder(config))
    return Method(
        head_queries("intentkv", head.config.feature_set, config.turn_queries, config.window),
        Learned("intentkv", head, config.decay),
        ForcedKeep(sinks=config.sinks, recent=config.recent),
    )
