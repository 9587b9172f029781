"""A finished replay as a Weights & Biases run: its turns, its pool over time, its figures. wandb is optional and imported here only."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Literal

from intentkv_eval.replay import SUMMARY_FILE, Summary
from intentkv_eval.runs import load_run
from intentkv_eval.turns import TurnRecord

_KEYS = ("WANDB_API_KEY", "WANDB_MODE")
"""Either says what the user wants; with neither, the run stays on this machine."""


def check() -> None:
    """Find out before a long replay that wandb is there.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    importlib.import_module("wandb")


def export(folder: Path, project: str) -> str:
    """Log what ``intentkv replay`` wrote to ``folder``.

    Without ``WANDB_API_KEY`` or ``WANDB_MODE`` in the environment nothing leaves this machine: the run is written to ``folder/wandb``,
    and ``wandb sync`` can send it later.

    Returns:
        Address of the run, or its folder when it is offline.

    Raises:
        ConfigError: the folder holds no run.
        ModuleNotFoundError: wandb is not installed.
    """
    import wandb

    run = load_run(folder)
    summary = Summary.model_validate_json((folder / SUMMARY_FILE).read_text())
    config = summary.model_dump(mode="json", include={"provenance", "options", "seeds", "dataset"})
    mode: Literal["offline"] | None = None if any(os.environ.get(key) for key in _KEYS) else "offline"
    with wandb.init(project=project, name=summary.arm, config=config, dir=folder, mode=mode) as target:
        target.define_metric("turns/*", step_metric="turns/number")
        target.define_metric("pool/*", step_metric="pool/time_s")
        for number, turn in enumerate(run.turns):
            figures = {name: value for name in TurnRecord.model_fields if isinstance(value := getattr(turn, name), (int, float))}
            target.log({"turns/number": number, **{f"turns/{name}": value for name, value in figures.items()}})
        for sample in run.samples:
            terms = {**sample.pool.model_dump(), **sample.counters.model_dump(exclude={"declined"})}
            target.log({"pool/time_s": sample.time_s, **{f"pool/{name}": value for name, value in terms.items()}})
        target.log({"records": wandb.Table(list(TurnRecord.model_fields), [list(turn.model_dump().values()) for turn in run.turns])})
        target.summary.update(summary.aggregates.model_dump(exclude_none=True))
        if summary.prune is not None:
            target.summary.update({"prune": summary.prune.model_dump(exclude_none=True)})
        return str(target.url or Path(target.dir).parent)
