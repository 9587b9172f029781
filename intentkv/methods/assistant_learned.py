"""Ours: the assistant rule with a trained residual."""

from intentkv.config import Config
from intentkv.methods import Method, learned_method

SUMMARY = "the assistant rule corrected by a trained head (--head)"
SOURCE = "this project; docs/train.md"
NEEDS_HEAD = True


def build(config: Config) -> Method:
    return learned_method("assistant", config)
