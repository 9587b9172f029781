"""The card beside a head: what it is, what it was made from, how good it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from intentkv.head import HeadConfig

if TYPE_CHECKING:
    from intentkv_training.trainer import TrainSettings

CARD_FILE = "README.md"


def write_card(folder: Path, head: HeadConfig, settings: TrainSettings, examples: int, dropped: int) -> None:
    """Write ``folder/README.md``."""
    shape = head.shape
    metrics = "\n".join(f"| {name} | {value:.6g} |" for name, value in head.metrics.items())
    weights = ", ".join(f"{name} {value:g}" for name, value in settings.weights.model_dump(exclude={"keep", "margin"}).items() if value)
    text = f"""# IntentKV head for {shape.model_type}

A learned residual on the `{head.rule}` rule score: which positions of an agent's KV cache are worth keeping.

Serve it with `intentkv serve --model MODEL --method {head.method} --head DIR`. It fits models of family {shape.model_type} with
{shape.layers} layers, {shape.query_heads} query heads, {shape.kv_heads} KV heads of dimension {shape.head_dim}, and is refused elsewhere.

| | |
|---|---|
| features | {head.feature_set} |
| residual | {head.residual} |
| width | {head.width} |
| label | {head.label} |
| loss | {weights} |
| examples | {examples} (left out without evidence: {dropped}) |
| data | SHA-256 of the logs {head.data_sha256} |
| seed | {settings.seed} |

| result | |
|---|---|
{metrics}

Trained on what a full cache shows; a server that has evicted before shows less. Judge it by `intentkv train evaluate` on logs of your own.
"""
    (folder / CARD_FILE).write_text(text, encoding="utf-8")
