"""A made-up research agent whose tools return real data: countries and airports from two PyPI packages, nothing downloaded.

The first tool result holds the answer to the question that the session opens with, and the last turn asks it again; in between the agent
reads about other countries. So the session shows what an eviction method remembers.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import airportsdata
from countryinfo import CountryInfo

_LISTED = 12
"""Airports of one tool result, and the fewest a country must have."""
_LONGEST_NAME = 32

_SYSTEM = "You are a research assistant. Use the tools, one call at a time, and answer from what they return."

_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]},
        },
    }
    for name, argument, description in (
        ("airports", "country", "Some airports of a country as a table."),
        ("country", "name", "Facts about a country as JSON."),
    )
]


class _Airport(NamedTuple):
    code: str
    city: str
    name: str
    elevation_ft: int
    latitude: float
    longitude: float


@dataclass(frozen=True)
class Needle:
    """The table row that answers the question, and where it stands."""

    message: int
    """Index in the session's messages."""
    text: str
    """Occurs in that message, once, and in no other."""


@dataclass(frozen=True)
class Session:
    record: dict[str, Any]
    """One line of a trajectory file."""
    needle: Needle


def research_session(seed: int = 0, countries: int = 8) -> Session:
    """A session of ``2 * countries + 2`` turns; about 700 tokens a country with SmolLM2's tokenizer.

    The same seed gives the same session with the same releases of the data packages.

    Args:
        countries: how many the agent compares, at least 1.
    """
    rng = random.Random(seed)
    airports, facts = _airports_by_country(), _facts_by_country()
    codes = sorted(code for code, found in airports.items() if code in facts and len(found) >= _LISTED)
    chosen = rng.sample(codes, countries)
    names = [facts[code]["name"] for code in chosen]
    tables = [rng.sample(airports[code], _LISTED) for code in chosen]
    asked = rng.choice(tables[0])
    question = f"at what elevation, in feet, lies {asked.name} of {asked.city}, {names[0]}?"

    script = _Script()
    script.say("system", _SYSTEM)
    script.say(
        "user",
        f"We look for a country to hold a conference in: {', '.join(names)}. Read about each and its airports. "
        f"At the end I will ask: {question}",
    )
    for code, name, table in zip(chosen, names, tables, strict=True):
        opening = rng.choice(("Next come the airports of", "I list the airports of", "Let me see how one gets to"))
        script.call(f"{opening} {name}.", "airports", {"country": name}, _table(table))
        opening = rng.choice(("Now some facts about", "I look up", "Let me read about"))
        script.call(f"{opening} {name}.", "country", {"name": name}, json.dumps(facts[code], ensure_ascii=False))
    largest = max(chosen, key=lambda code: facts[code]["population"])
    script.say("assistant", f"I have read about all {countries} countries. The most people live in {facts[largest]['name']}.")
    script.say("user", f"Thank you. Back to my first question: {question}")
    script.say("assistant", f"{asked.name} lies at {asked.elevation_ft} feet.")

    record = {
        "id": f"research-{seed}",
        "source": "intentkv_eval.world",
        "license": "MIT (data of the packages countryinfo and airportsdata)",
        "task": question,
        "tools": _TOOLS,
        "messages": script.messages,
        "meta": {"group": f"research-{seed}", "style": "native"},
    }
    first_result = next(index for index, message in enumerate(script.messages) if message["role"] == "tool")
    return Session(record, Needle(first_result, _row(asked)))


class _Script:
    """Messages as they are appended."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def say(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})

    def call(self, thought: str, tool: str, arguments: dict[str, str], result: str) -> None:
        """An assistant message that calls a tool, and the tool's answer."""
        identity = f"call-{len(self.messages)}"
        call = {"id": identity, "name": tool, "arguments": arguments}
        self.messages.append({"role": "assistant", "content": thought, "tool_calls": [call]})
        self.messages.append({"role": "tool", "content": result, "tool_call_id": identity, "name": tool})


def _airports_by_country() -> dict[str, list[_Airport]]:
    """Airports with an IATA code and short names, by the country's two-letter code, in the order of their codes."""
    found: dict[str, list[_Airport]] = defaultdict(list)
    for code, row in sorted(airportsdata.load("IATA").items()):
        if row["city"] and max(len(row["city"]), len(row["name"])) <= _LONGEST_NAME:
            place = round(row["lat"], 2), round(row["lon"], 2)
            found[row["country"]].append(_Airport(code, row["city"], row["name"], round(row["elevation"]), *place))
    return found


def _facts_by_country() -> dict[str, dict[str, Any]]:
    """What the ``country`` tool answers, by two-letter code."""
    facts = {}
    for info in CountryInfo("France").all().values():  # the release for Python 3.10 lists all only from an instance
        code = info.get("ISO", {}).get("alpha2")
        if not code or not info.get("population") or not info.get("capital") or len(info["name"]) > _LONGEST_NAME:
            continue
        facts[code] = {
            "name": info["name"],
            "capital": info["capital"],
            "region": info.get("region"),
            "subregion": info.get("subregion"),
            "population": info["population"],
            "area_km2": info.get("area"),
            "currencies": info.get("currencies", []),
            "languages": info.get("languages", []),
            "calling_codes": info.get("callingCodes", []),
            "time_zones": info.get("timezones", []),
            "neighbours": info.get("borders", []),
            "provinces": info.get("provinces", [])[:_LISTED],
        }
    return facts


def _row(airport: _Airport) -> str:
    return " | ".join(map(str, airport))


def _table(airports: list[_Airport]) -> str:
    return "\n".join([" | ".join(_Airport._fields), *map(_row, airports)])
