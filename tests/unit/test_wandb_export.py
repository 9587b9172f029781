"""A replay as a Weights & Biases run, offline."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from intentkv import cli

from .report_runs import TURNS, write_run

pytestmark = pytest.mark.unit


def test_missing_wandb_is_one_sentence_before_the_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a long replay that ends in a traceback."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    result = CliRunner().invoke(cli.app, ["replay", "--input", str(tmp_path / "none"), "--out", str(tmp_path / "out"), "--wandb"])
    assert result.exit_code == 2
    assert "pip install 'intentkv[wandb]'" in result.output


def test_run_is_written_and_stays_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an upload without being asked, and turns or samples that are not in the run."""
    wandb = pytest.importorskip("wandb", reason="wandb is not installed; run: pip install wandb")
    from intentkv_eval import wandb_export

    for key in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged: list[dict[str, object]] = []
    original = wandb.Run.log

    def log(self: object, data: dict[str, object], *args: object, **kwargs: object) -> None:
        logged.append(data)
        original(self, data, *args, **kwargs)

    monkeypatch.setattr(wandb.Run, "log", log)
    run = write_run(tmp_path / "one", "a", TURNS, samples=True)
    folder = Path(wandb_export.export(run, "tests"))
    assert folder.is_relative_to(run / "wandb")
    assert list(folder.glob("*.wandb"))
    assert [entry["turns/prompt_tokens"] for entry in logged if "turns/number" in entry] == [100, 300, 200, 400]
    assert [entry["pool/dead"] for entry in logged if "pool/time_s" in entry] == [0, 70]
