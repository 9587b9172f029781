"""The command line: what users get wrong, and what must reach the packages behind it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from intentkv import cli
from intentkv.config import Config
from intentkv.methods import method_names

pytestmark = pytest.mark.unit

RUNNER = CliRunner()


@pytest.fixture
def serve_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | None, Config, bool, list[str]]]:
    """Calls that reach the launcher, which is replaced."""
    calls: list[tuple[str | None, Config, bool, list[str]]] = []

    def serve(model: str | None, config: Config, stock: bool, extra: list[str]) -> int:
        calls.append((model, config, stock, extra))
        return 3

    _replace(monkeypatch, "intentkv_sglang.launcher", serve=serve)
    return calls


def _replace(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    module = ModuleType(name)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)


def test_serve_passes_everything_on(serve_calls: list[Any], tmp_path: Path) -> None:
    """Catches a flag that typer swallows, reorders or splits, options that lose to the file, and a lost exit status."""
    file = tmp_path / "c.toml"
    file.write_text('method = "snapkv"\nbudget = 100\n')
    arguments = ["serve", "--tp-size", "2", "--model", "m", "--mem-fraction-static=0.5", "--budget", "64", "--config", str(file)]
    result = RUNNER.invoke(cli.app, [*arguments, "--stock", "-x", "--enable-metrics", "--port", "3"])
    assert result.exit_code == 3, result.output
    model, config, stock, extra = serve_calls[0]
    assert (model, config.method, config.budget, stock) == ("m", "snapkv", 64, True)
    assert extra == ["--tp-size", "2", "--mem-fraction-static=0.5", "-x", "--enable-metrics", "--port", "3"]


def test_record_serves_and_evicts_nothing(serve_calls: list[Any], tmp_path: Path) -> None:
    """Catches a record command that evicts by default, or loses SGLang's flags."""
    result = RUNNER.invoke(cli.app, ["record", str(tmp_path / "logs"), "--model", "m", "--limit-mb", "7", "--port", "1234"])
    assert result.exit_code == 3, "the server's exit status"
    ((model, settings, stock, extra),) = serve_calls
    assert (model, stock, extra) == ("m", False, ["--port", "1234"])
    assert (settings.method, settings.record, settings.record_limit_mb) == ("full", tmp_path / "logs", 7)


def test_doctor_passes_flags_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches flags that doctor checks a server without, and flags of ours that it gives to SGLang or does not check."""
    _replace(monkeypatch, "intentkv_sglang.doctor", run=lambda extra: 10 + len(extra))
    ours = ["--model", "m", "--budget", "64", "--method", "snapkv"]
    assert RUNNER.invoke(cli.app, ["doctor", *ours, "--page-size", "16"]).exit_code == 12
    result = RUNNER.invoke(cli.app, ["doctor", "--model", "m", "--method", "assistant-learned"])
    assert result.exit_code == 2
    assert "--head" in result.stderr


BAD = {
    "unknown method": ["serve", "--method", "nope"],
    "learned method without a head": ["serve", "--method", "assistant-learned", "--model", "some-model"],
    "head that is not there": ["serve", "--head", "missing"],
    "record into no room": ["record", "logs", "--limit-mb", "0"],
    "record to nowhere": ["record"],
    "budget of nothing": ["serve", "--budget", "0"],
    "budget that is no number": ["serve", "--budget", "many"],
    "config file that is not there": ["serve", "--config", "missing.toml"],
    "config file of another kind": ["serve", "--config", "setup.cfg"],
    "malformed config file": ["serve", "--config", "bad.toml"],
    "unknown field in a config file": ["serve", "--config", "unknown.json"],
    "option without a value": ["serve", "--model"],
    "input that is not there": ["replay", "--input", "missing.jsonl", "--out", "out"],
    "no input": ["replay", "--out", "out"],
    "unknown request method": ["replay", "--input", "good.jsonl", "--out", "out", "--method", "nope"],
    "bad request budget": ["replay", "--input", "good.jsonl", "--out", "out", "--budget", "-3"],
    "both budgets": ["replay", "--input", "good.jsonl", "--out", "out", "--budget", "3", "--budget-ratio", "0.5"],
    "no server": ["replay", "--input", "good.jsonl", "--out", "out", "--url", "http://127.0.0.1:9"],
    "concurrency of nothing": ["replay", "--input", "good.jsonl", "--out", "out", "--concurrency", "0"],
    "report of a folder that is not there": ["report", "missing"],
    "report of nothing": ["report"],
    "unknown command": ["dance"],
    "unknown option": ["methods", "--all"],
    "unknown option of the program": ["--all"],
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_status_2(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve_calls: list[Any]) -> None:
    """Catches a traceback, a page of usage, or a server that starts with a setting the user did not mean."""
    monkeypatch.chdir(tmp_path)
    Path("setup.cfg").touch()
    Path("bad.toml").write_text("budget = \n[")
    Path("unknown.json").write_text('{"bugdet": 3}')
    Path("good.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    result = RUNNER.invoke(cli.app, BAD[name])
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("Error: ")
    assert result.stderr.endswith(".\n")
    assert serve_calls == []
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("command", "missing", "remedy"),
    [
        (["serve"], "sglang", "intentkv[server]"),
        (["doctor"], "intentkv_sglang", "intentkv[server]"),
        (["replay", "--input", "x", "--out", "y"], "httpx", "intentkv[eval]"),
        (["report", "x"], "plotly", "intentkv[eval]"),
        (["train", "fit"], "accelerate", "intentkv[train]"),
    ],
)
def test_missing_package_names_the_extra(command: list[str], missing: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a bare ModuleNotFoundError for someone who installed only the core."""

    def absent(name: str) -> ModuleType:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(cli, "import_module", absent)
    result = RUNNER.invoke(cli.app, command)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert repr(missing) in result.stderr
    assert remedy in result.stderr


def test_package_missing_only_when_used_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a package that is imported late and then reported as a crash."""
    _replace(monkeypatch, "intentkv_sglang.launcher", serve=lambda *_: importlib.import_module("no_such_package_here"))
    result = RUNNER.invoke(cli.app, ["serve"])
    assert result.exit_code == 2
    assert "'no_such_package_here'" in result.stderr


def test_our_own_missing_module_is_not_blamed_on_the_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a bug of ours that tells users to install what they have."""
    _replace(monkeypatch, "intentkv_sglang.launcher", serve=lambda *_: importlib.import_module("intentkv.no_such_module"))
    assert isinstance(RUNNER.invoke(cli.app, ["serve"]).exception, ModuleNotFoundError)


def test_methods_needs_only_the_core() -> None:
    """Catches an import of a server or HTTP package on the way to a command that needs none."""
    absent = ["sglang", "intentkv_sglang", "intentkv_eval", "httpx", "plotly", "tqdm", "prometheus_client", "transformers"]
    script = f"""
import sys
sys.modules.update(dict.fromkeys({absent}))
sys.argv = ["intentkv", "methods"]
from intentkv.cli import main
main()
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(method_names())
    assert all(line.endswith("]") for line in lines)


@pytest.mark.parametrize("command", [[], ["serve"], ["record"], ["replay"], ["report"], ["doctor"], ["methods"]])
def test_help_explains_every_option(command: list[str]) -> None:
    """Catches a command or option without a word of help."""
    result = RUNNER.invoke(cli.app, [*command, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    options = [line.strip("│ *") for line in result.stdout.splitlines() if line.lstrip("│ *").startswith("--")]
    assert options
    for option in options:
        assert option[-1] in ".]", option  # a sentence, or its default behind one


def test_program_without_a_command_shows_help_and_version_is_short() -> None:
    """Catches a silent exit, and a version that needs more than one line to read."""
    assert "Commands" in RUNNER.invoke(cli.app, []).stdout
    assert RUNNER.invoke(cli.app, ["--version"]).stdout.startswith("intentkv ")


def test_module_and_command_are_the_same_program() -> None:
    """Catches ``python -m intentkv`` that differs from the console script: servers are started through it."""
    result = subprocess.run([sys.executable, "-m", "intentkv", "serve", "--budget", "0"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert result.stderr.startswith("Error: ")
