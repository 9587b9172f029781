"""What cannot work is refused at start: exit status 2 and one line that says what to change, no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .harness import PATIENCE_S


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "intentkv", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def check(result: subprocess.CompletedProcess[str], expected: str) -> None:
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr + result.stdout
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert expected in line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model", "{tiny}", "--page-size", "16"], "--page-size 1"),
        (["--method", "magic"], "choose one of"),
        (["--config", "{broken}"], "malformed"),
        (["--model", "{missing}"], "does not exist"),
    ],
    ids=["page size", "unknown method", "malformed config", "missing model"],
)
def test_refused(tiny_model: Path, tmp_path: Path, arguments: list[str], expected: str) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("method = [")
    paths = {"tiny": tiny_model, "broken": broken, "missing": tmp_path / "missing"}
    check(serve(*(argument.format(**paths) for argument in arguments)), expected)
