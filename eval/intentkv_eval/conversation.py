"""Recorded messages in the token ids of a running server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from intentkv.config import ConfigError
from intentkv.conversation import Conversation, assemble, texts_of
from intentkv.templates import TEMPLATES, Template
from intentkv.trajectories import Trajectory

Tokenize = Callable[[Sequence[str]], Awaitable[list[list[int]]]]
"""Texts to ids, no special tokens added, markers in the text as single ids."""


async def encode(trajectory: Trajectory, template: Template, tokenize: Tokenize) -> Conversation:
    """``trajectory`` in the ids of whoever tokenises."""
    return assemble(trajectory, await tokenize(texts_of(trajectory, template)))


async def choose_template(name: str | None, tokenize: Tokenize) -> Template:
    """The template ``name``, or without a name the first whose markers are single tokens of the server's vocabulary.

    Raises:
        ConfigError: no such template, or its markers are not single tokens.
    """
    if name is not None and name not in TEMPLATES:
        raise ConfigError(f"Unknown template {name!r}; choose one of {', '.join(TEMPLATES)}.")
    candidates = TEMPLATES.values() if name is None else [TEMPLATES[name]]
    for template in candidates:
        markers = [template.start, template.end, *template.requires]
        ids = await tokenize(markers)
        # distinct: a tokenizer may give its one "unknown" token for each of them
        if all(len(marker) == 1 for marker in ids) and len({marker[0] for marker in ids}) == len(markers):
            return template
    tried = f"the template {name!r}" if name else "any known template"
    raise ConfigError(f"The model's tokenizer lacks the markers of {tried} ({', '.join(TEMPLATES)}); choose another template or model.")
