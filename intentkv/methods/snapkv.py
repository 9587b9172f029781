"""SnapKV with one keep-set for all layers and heads."""

from intentkv.aggregators.window_pool import WindowPool
from intentkv.config import Config
from intentkv.methods import Method
from intentkv.queries.window import ObservationWindow
from intentkv.selection import ForcedKeep

SUMMARY = "pooled attention mass of the prompt's last tokens"
SOURCE = "SnapKV, arXiv 2404.14469, section 4"


def build(config: Config) -> Method:
    # the window itself always stays, as published
    forced = ForcedKeep(sinks=config.sinks, recent=max(config.window, config.recent))
    # the largest of neighbouring sums is no sum of the heads' largest
    return Method(ObservationWindow(config.window), WindowPool(config.pool), forced, splits_by_head=False)
