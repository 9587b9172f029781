"""The published rule with a trained residual."""

from intentkv.config import Config
from intentkv.methods import Method, learned_method

SUMMARY = "the published rule corrected by a trained head (--head)"
SOURCE = "IntentKV, arXiv 2606.09916, section 3, phase 2"
NEEDS_HEAD = True


def build(config: Config) -> Method:
    return learned_method("intentkv", config)
