"""Draws request_life.svg, the figure of architecture.md: ``python docs/figures/request_life.py``."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import NamedTuple

LEFT, TOP, STEP, LANE, BOX, HEIGHT = 150, 40, 114, 92, 106, 66
LANES = ("HTTP process", "scheduler", "radix tree and pool", "attention")


class Step(NamedTuple):
    lane: int
    title: str
    lines: tuple[str, str]
    ours: bool
    """Done by the plugin; else by SGLang, which the plugin only leaves its marks in."""


STEPS = (
    Step(0, "Validate", ("options are checked", "a bad value: 400"), True),
    Step(2, "Match", ("all token ids match", "dead ones included"), False),
    Step(1, "Open", ("messages, session", "queries wanted"), True),
    Step(3, "Attend", ("live slots only", "wanted queries kept"), True),
    Step(2, "Checkpoint", ("prompt is inserted", "the tree owns it"), False),
    Step(1, "Score", ("session's memory", "scores the history"), True),
    Step(2, "Prune", ("tree, row, slots", "in this order"), True),
    Step(3, "Decode", ("reads the pruned", "cache"), True),
    Step(2, "Finish", ("generated part", "is inserted"), False),
)
OURS, STOCK, DARK, SOFT = ("#dbe8fb", "#1565c0"), ("#eceff1", "#78909c"), "#263238", "#607d8b"


def text(x: float, y: float, words: str, size: float = 12, anchor: str = "middle", color: str = DARK, weight: str = "400") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{color}" font-weight="{weight}">{escape(words)}</text>'
    )


def corner(number: int) -> tuple[float, float]:
    """Left upper corner of a step's box."""
    return LEFT + number * STEP, TOP + STEPS[number].lane * LANE


def box(number: int) -> list[str]:
    step, (x, y) = STEPS[number], corner(number)
    fill, line = OURS if step.ours else STOCK
    return [
        f'<rect x="{x}" y="{y}" width="{BOX}" height="{HEIGHT}" rx="5" fill="{fill}" stroke="{line}"/>',
        text(x + BOX / 2, y + 19, f"{number + 1} {step.title}", weight="600"),
        text(x + BOX / 2, y + 38, step.lines[0], size=9.5),
        text(x + BOX / 2, y + 52, step.lines[1], size=9.5),
    ]


def arrow(number: int) -> str:
    """From the middle of a step's right side down or up to the next one's nearer edge."""
    (x, y), (to_x, to_y) = corner(number), corner(number + 1)
    below = to_y > y
    end = to_y if below else to_y + HEIGHT
    path = f"M{x + BOX},{y + HEIGHT / 2} H{to_x + BOX / 2} V{end + (-2 if below else 2)}"
    return f'<path d="{path}" fill="none" stroke="{SOFT}" stroke-width="1.4" marker-end="url(#head)"/>'


def picture() -> str:
    width, height = LEFT + len(STEPS) * STEP + 6, TOP + len(LANES) * LANE + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        'font-family="system-ui, sans-serif">',
        "<title>The nine steps of a request, by the part of the server that takes them</title>",
        f'<defs><marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0,0 L8,4 L0,8 z" fill="{SOFT}"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        text(LEFT, 20, "Blue: the plugin. Grey: SGLang as it is.", size=11, anchor="start", color=SOFT),
    ]
    for number, name in enumerate(LANES):
        y = TOP + number * LANE + HEIGHT + (LANE - HEIGHT) / 2
        parts.append(text(LEFT - 12, TOP + number * LANE + HEIGHT / 2 + 4, name, size=12, anchor="end", weight="600"))
        if number < len(LANES) - 1:
            parts.append(f'<line x1="0" y1="{y}" x2="{width}" y2="{y}" stroke="#eceff1"/>')
    parts += [arrow(number) for number in range(len(STEPS) - 1)]
    for number in range(len(STEPS)):
        parts += box(number)
    (first, _), (last, _), low = corner(1), corner(len(STEPS) - 1), height - 22
    back = f"M{last + BOX * 0.8:g},{TOP + 2 * LANE + HEIGHT} V{low} H{first + BOX / 2} V{TOP + 2 * LANE + HEIGHT + 2}"
    parts.append(f'<path d="{back}" fill="none" stroke="{SOFT}" stroke-width="1.4" stroke-dasharray="5 4" marker-end="url(#head)"/>')
    parts.append(text((first + last + BOX) / 2, low + 15, "the next turn starts at 1 and matches all of it", size=11, color=SOFT))
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture(), encoding="utf-8")
