"""Draws slot_map.svg, the figure of the README: ``python docs/figures/slot_map.py``."""

from __future__ import annotations

from html import escape
from pathlib import Path

CELL, LEFT, WIDTH = 42, 168, 880
TOKENS = 16
SPANS = (("system", 0, 2), ("question", 2, 4), ("tool result", 4, 8), ("assistant", 8, 10), ("tool result", 10, 13), ("new turn", 13, 16))
SLOTS = (21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33, 34, 35, 40, 41, 42)
DEAD = {4, 6, 7, 10, 12}
CACHED = 13
LIVE, GONE, NEW = ("#d7ecd9", "#2e7d32"), ("#eceff1", "#90a4ae"), ("#dbe8fb", "#1565c0")


def text(x: float, y: float, words: str, size: int = 13, anchor: str = "middle", color: str = "#263238", weight: str = "400") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{color}" font-weight="{weight}">{escape(words)}</text>'
    )


def label(y: float, title: str, below: str) -> list[str]:
    return [
        text(LEFT - 14, y + 17, title, anchor="end", weight="600"),
        text(LEFT - 14, y + 33, below, size=11, anchor="end", color="#607d8b"),
    ]


def cell(column: float, y: float, words: str, colors: tuple[str, str]) -> list[str]:
    fill, stroke = colors
    x = LEFT + column * CELL
    box = f'<rect x="{x + 1:g}" y="{y:g}" width="{CELL - 2}" height="34" rx="4" fill="{fill}" stroke="{stroke}"/>'
    return [box, text(x + CELL / 2, y + 22, words, color=stroke, weight="600")]


def brace(start: int, end: int, y: float, words: str, color: str) -> list[str]:
    x0, x1 = LEFT + start * CELL + 2, LEFT + end * CELL - 2
    line = f'<path d="M{x0} {y} v6 H{x1} v-6" fill="none" stroke="{color}" stroke-width="1.5"/>'
    return [line, text((x0 + x1) / 2, y + 22, words, size=12, color=color, weight="600")]


def draw() -> str:
    parts: list[str] = []
    for name, start, end in SPANS:
        x0, x1 = LEFT + start * CELL, LEFT + end * CELL
        parts.append(f'<rect x="{x0 + 2}" y="22" width="{x1 - x0 - 4}" height="4" rx="2" fill="#78909c"/>')
        parts.append(text((x0 + x1) / 2, 15, name, size=12, color="#455a64"))

    parts += label(38, "token ids", "the radix key")
    parts += [part for i in range(TOKENS) for part in cell(i, 38, f"t{i}", NEW if i >= CACHED else ("#ffffff", "#455a64"))]
    parts += brace(0, CACHED, 78, "prefix match: all 13 cached positions, evicted or not", "#455a64")
    parts += brace(CACHED, TOKENS, 78, "computed now", NEW[1])

    parts += label(118, "slot map", "0 = dead mark")
    for i, slot in enumerate(SLOTS):
        dead, colors = i in DEAD, NEW if i >= CACHED else LIVE
        parts += cell(i, 118, "0" if dead else str(slot), GONE if dead else colors)

    parts += label(184, "attention reads", "live slots, at their")
    parts.append(text(LEFT - 14, 184 + 46, "original positions", size=11, anchor="end", color="#607d8b"))
    live = [i for i in range(TOKENS) if i not in DEAD]
    for column, i in enumerate(live):
        x0, x1 = LEFT + (i + 0.5) * CELL, LEFT + (column + 0.5) * CELL
        parts.append(f'<path d="M{x0:g} 153 C{x0:g} 170 {x1:g} 166 {x1:g} 183" fill="none" stroke="#b0bec5"/>')
        parts += cell(column, 184, str(SLOTS[i]), NEW if i >= CACHED else LIVE)
        parts.append(text(x1, 232, f"pos {i}", size=10, color="#607d8b"))
    freed = ", ".join(str(SLOTS[i]) for i in sorted(DEAD))
    parts.append(text(LEFT + (len(live) + 0.4) * CELL, 200, "back in the KV pool:", size=12, anchor="start", color="#607d8b"))
    parts.append(text(LEFT + (len(live) + 0.4) * CELL, 217, f"slots {freed}", size=12, anchor="start", color="#607d8b"))

    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 246" width="{WIDTH}" height="246" role="img" '
        'font-family="system-ui, sans-serif">\n'
        "<title>Evicted positions hold the dead mark 0; the prefix still matches; attention reads the live slots</title>\n"
        f'<rect width="{WIDTH}" height="246" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")
