"""Pictures drawn after the fact, from result files."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from intentkv_eval.bench_arms import Origin
from intentkv_eval.bench_decode import Cell, Options, Result
from intentkv_eval.bench_pictures import app

pytestmark = pytest.mark.unit


def test_finished_result_is_drawn_beside_its_file(tmp_path: Path) -> None:
    """Catches a result that cannot be read back, and a page that needs a network or leaves out an arm."""
    cells = [
        Cell(arm=arm, batch=8, length=length, attended_tokens=length, step_s=0.01) for arm in ("stock", "a:1") for length in (1000, 2000)
    ]
    options = Options(model="m", arms=[], lengths=[], batches=[])
    file = tmp_path / "bench_decode.json"
    file.write_text(Result(origin=Origin(device="some device", seed=0), options=options, cells=cells).model_dump_json())
    assert CliRunner().invoke(app, [str(file)]).exit_code == 0
    page = (tmp_path / "bench_decode.html").read_text(encoding="utf-8")
    assert all(text in page for text in ("stock, batch 8", "a:1, batch 8", "some device"))
    assert '<script src="http' not in page


@pytest.mark.parametrize(("name", "text"), [("other.json", "{}"), ("bench_decode.json", "{}"), ("bench_prune.json", None)])
def test_unusable_file_is_one_sentence(name: str, text: str | None, tmp_path: Path) -> None:
    """Catches a traceback for a file that is none of ours, broken, or not there."""
    if text is not None:
        (tmp_path / name).write_text(text)
    result = CliRunner().invoke(app, [str(tmp_path / name)])
    assert result.exit_code == 2
    assert result.output.startswith("Error: ")
