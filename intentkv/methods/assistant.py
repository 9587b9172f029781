"""Ours: decayed energy of the assistant's own queries. The default."""

from intentkv.aggregators.decayed_energy import DecayedEnergy
from intentkv.config import Config
from intentkv.methods import Method
from intentkv.queries.assistant import AssistantTurns
from intentkv.selection import ForcedKeep

SUMMARY = "decayed energy of the assistant's own queries, one float a token (default)"
SOURCE = "this project; docs/results.md"


def build(config: Config) -> Method:
    return Method(
        AssistantTurns(config.turn_queries, config.window),
        DecayedEnergy(config.decay),
        ForcedKeep(sinks=config.sinks, recent=config.recent),
        while_decoding=True,
    )
