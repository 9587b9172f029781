"""``intentkv train`` as a user types it: the whole way on a made-up log, and mistakes as one line."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from intentkv import cli
from intentkv.head import load_head_config
from intentkv_training.cli import _ratios, _weights

pytestmark = pytest.mark.unit


def command(*arguments):
    with pytest.raises(SystemExit) as caught:
        cli.app(args=["train", *map(str, arguments)], prog_name="intentkv")
    return caught.value.code


def test_examples_fit_evaluate(agents, tiny_model, tmp_path, capsys):
    """Catches: steps that do not fit together, a command line that says something else than what to do next."""
    common = ["--model", tiny_model, "--device", "cpu"]
    assert command("examples", "--input", agents, *common, "--out", tmp_path / "ex", "--min-history", 20, "--per-piece", 2,
                   "--validation", 0.25, "--test", 0.25, "--seed", 13, "--limit", 9) == 0  # fmt: skip
    assert "examples" in capsys.readouterr().out
    assert command("fit", "--examples", tmp_path / "ex", "--out", tmp_path / "head", "--epochs", 1, "--batch", 4, "--no-wandb", "--cpu",
                   "--weights", "regression=1,listwise=0.1") == 0  # fmt: skip
    assert f"--method assistant-learned --head {tmp_path / 'head'}" in capsys.readouterr().out
    assert load_head_config(tmp_path / "head").label == "value_energy"
    assert command("evaluate", "--input", agents, *common, "--out", tmp_path / "eval", "--head", tmp_path / "head", "--examples",
                   tmp_path / "ex", "--split", "all", "--limit", 1, "--least-window", 300, "--ratios", "0.25", "--method", "assistant",
                   "--method", "random") == 0  # fmt: skip
    out = capsys.readouterr().out
    assert "assistant-learned" in out
    assert "of the gap to the best oracle closed" in out
    summary = json.loads((tmp_path / "eval" / "summary.json").read_text())
    assert {arm["arm"] for arm in summary["arms"]} >= {"assistant", "assistant-learned", "random", "oracle: energy"}


@pytest.mark.parametrize(("arguments", "word"), [
    (["fit", "--examples", "nowhere", "--out", "x"], "holds no examples"),
    (["fit", "--examples", "nowhere", "--out", "x", "--model", "m"], "both --model and --input"),
    (["examples", "--input", "nowhere.jsonl", "--model", "m", "--out", "x"], "does not exist"),
    (["examples", "--model", "m", "--out", "x"], "Missing option"),
    (["nonsense"], "No such command"),
])  # fmt: skip
def test_mistakes_are_one_line(arguments, word, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command(*arguments) == 2
    err = capsys.readouterr().err
    assert word in err
    assert err.count("\n") == 1


def test_no_model(agents, tmp_path, capsys):
    assert command("examples", "--input", agents, "--model", tmp_path / "none", "--out", tmp_path / "x") == 2
    err = capsys.readouterr().err
    assert "No model could be loaded" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("text", ["a", "0", "1.5", "0.1,,"])
def test_bad_ratios(text):
    with pytest.raises(ValueError, match="Budgets"):
        _ratios(text)


@pytest.mark.parametrize("text", ["regression", "regression=x", "speed=1", "regression=-1"])
def test_bad_weights(text):
    with pytest.raises(ValueError, match=r"[.]$"):
        _weights(text)


@pytest.mark.parametrize("name", [[], ["examples"], ["fit"], ["evaluate"]])
def test_help_explains_every_option(name):
    result = CliRunner().invoke(cli.app, ["train", *name, "--help"], env={"COLUMNS": "240"})
    options = [line.strip("│ *") for line in result.output.splitlines() if line.lstrip("│ *").startswith("--")]
    assert options
    assert [option for option in options if option[-1] not in ".]"] == []
