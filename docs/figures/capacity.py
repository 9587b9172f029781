"""Draws capacity.svg from results of ``bench_capacity``: ``python docs/figures/capacity.py FILE...`` (one panel row a file)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

WIDTH, LEFT, BAR, PANEL, GAP = 880, 150, 26, 210, 30
COLORS = {"stock": "#90a4ae"}
OURS = ("#1565c0", "#2e7d32", "#6a1b9a", "#ef6c00")
PANELS: tuple[tuple[str, Callable[[dict[str, Any]], float], str], ...] = (
    ("turns per second", lambda c: c["turns_per_s"], "{:.2f}"),
    ("prefix-hit rate", lambda c: 100 * c["prefix_hit_rate"], "{:.1f} %"),
    ("time to first token, median", lambda c: c["ttft_s"]["p50"], "{:.3g} s"),
)


def text(x: float, y: float, words: str, size: int = 12, anchor: str = "start", color: str = "#263238", weight: str = "400") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{color}" font-weight="{weight}">{escape(words)}</text>'
    )


def rows(result: dict[str, Any], top: float) -> list[str]:
    cells = sorted(result["cells"], key=lambda cell: cell["arm"] != "stock")
    share, options = cells[0]["pool_share"], result["options"]
    kind = "long sessions" if options["long"] else "sessions as recorded"
    parts = [text(8, top + 12, f"{options['concurrent']} {kind}, pool {share:g} × working set", size=13, weight="600")]
    for number, (title, value, form) in enumerate(PANELS):
        x = LEFT + number * (PANEL + GAP)
        parts.append(text(x, top + 34, title, color="#607d8b"))
        most = max(value(cell) for cell in cells)
        for place, cell in enumerate(cells):
            y = top + 42 + place * (BAR + 6)
            color = COLORS.get(cell["arm"], OURS[(place - 1) % len(OURS)])
            length = max(1.0, (PANEL - 60) * value(cell) / most)
            parts.append(f'<rect x="{x}" y="{y:g}" width="{length:.1f}" height="{BAR}" rx="3" fill="{color}"/>')
            parts.append(text(x + length + 6, y + 17, form.format(value(cell)), weight="600"))
            if not number:
                parts.append(text(LEFT - 10, y + 17, cell["arm"], anchor="end"))
    return parts


def draw(results: list[dict[str, Any]]) -> str:
    parts, height = [], 8
    for result in results:
        parts += rows(result, height)
        height += 66 + len(result["cells"]) * (BAR + 6)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        'font-family="system-ui, sans-serif">\n<title>Stock SGLang and IntentKV with the same KV pool</title>\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    found = [json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:]]
    Path(__file__).with_suffix(".svg").write_text(draw(found), encoding="utf-8")
