"""Results of servers that ran side by side, put together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from intentkv_eval.bench_arms import Origin
from intentkv_eval.bench_capacity import RESULT_FILE, Options, Pool, Result, Window, make_cell
from intentkv_eval.bench_merge import app

pytestmark = pytest.mark.unit


def written(folder: Path, arm: str, turns_per_s: float, pool: Pool = Pool(0.3, 900), **options: Any) -> Path:
    base = make_cell(arm, pool, 0, Window(0, 1, True, 0, None), [], None)
    result = Result(
        origin=Origin(device="two equal GPUs", seed=0, data_sha256="d"),
        options=Options(input=[], model="m", arms=[arm], **options),
        length_of_sessions="short",
        working_set_tokens=3000,
        session_tokens=[100, 200],
        cells=[base.model_copy(update={"turns_per_s": turns_per_s})],
    )
    folder.mkdir()
    file = folder / RESULT_FILE
    file.write_text(result.model_dump_json())
    return file


def test_ratios_across_files(tmp_path: Path) -> None:
    files = [written(tmp_path / "a", "stock", 2.0, seconds=80), written(tmp_path / "b", "assistant:8192", 9.0, seconds=40)]
    result = CliRunner().invoke(app, [*map(str, files), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    merged = json.loads((tmp_path / "out" / RESULT_FILE).read_text())
    assert [(ratio["arm"], ratio["turns"]) for ratio in merged["ratios"]] == [("assistant:8192", 4.5)]
    assert [cell["arm"] for cell in merged["cells"]] == merged["options"]["arms"] == ["stock", "assistant:8192"]
    assert (tmp_path / "out" / RESULT_FILE).with_suffix(".html").is_file()


@pytest.mark.parametrize(
    ("other", "says"),
    [({"concurrent": 32}, "differ in concurrent"), ({"seed": 1}, "differ in seed"), ({"pool": Pool(0.3, 800)}, "pools differ")],
)
def test_what_is_not_comparable_is_refused(tmp_path: Path, other: dict[str, Any], says: str) -> None:
    """Catches a ratio of different work or of different memory."""
    files = [written(tmp_path / "a", "stock", 2.0), written(tmp_path / "b", "assistant", 9.0, **other)]
    result = CliRunner().invoke(app, [*map(str, files), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert says in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    result = CliRunner().invoke(app, [str(tmp_path / "x.json"), "--out", str(tmp_path / "out")])
    assert (result.exit_code, "no result of this version" in result.stderr) == (2, True)
