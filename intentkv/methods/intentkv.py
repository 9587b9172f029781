"""The published rule: attention mass of a decayed memory of mean span queries."""

from intentkv.aggregators.query_memory import QueryMemoryRule
from intentkv.config import Config
from intentkv.methods import Method
from intentkv.queries.actionable import ActionableMeans
from intentkv.selection import ForcedKeep

SUMMARY = "attention mass of QueryMemory, a decayed mean of user and tool queries"
SOURCE = "IntentKV, arXiv 2606.09916, section 3, phase 1"


def build(config: Config) -> Method:
    return Method(ActionableMeans(), QueryMemoryRule(config.decay), ForcedKeep(sinks=config.sinks, recent=config.recent), True)
