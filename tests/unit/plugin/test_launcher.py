"""``intentkv serve``: which command line and environment the server gets."""

from __future__ import annotations

import argparse
import json
import os
import sys

import pytest
from sglang.srt.server_args import ServerArgs

from intentkv.config import Config, ConfigError, config_from_environment, load_config
from intentkv_sglang import default_model, launcher
from intentkv_sglang.cpu_platform_name import NAME
from intentkv_sglang.launcher import server_arguments, server_environment

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def parse():
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    return parser.parse_args


@pytest.mark.parametrize("cpu", [True, False])
@pytest.mark.parametrize("stock", [True, False])
def test_defaults_are_flags_that_sglang_knows(parse, stock, cpu):
    args = parse(server_arguments("some/model", stock, [], cpu))
    assert args.model_path == "some/model"
    assert args.enable_metrics
    assert args.enable_cache_report
    assert (args.radix_cache_backend == "intentkv") == (not stock)
    assert (args.attention_backend == "torch_native") == cpu
    assert (args.device == "cpu") == cpu


@pytest.mark.parametrize("extra", [
    ["--dtype", "bfloat16"],
    ["--dtype=bfloat16"],
    ["--max-total-tokens", "99"],
    ["--max-total-tokens=99"],
    ["--attention-backend", "triton"],
    ["--mem-fraction-static", "0.1"],
    ["--max-running-requests=3", "--grammar-backend", "xgrammar"],
    ["--disable-cuda-graph", "--enable-metrics", "--enable-cache-report"],
    ["--sampling-backend", "flashinfer", "--device", "cuda"],
])  # fmt: skip
def test_a_user_flag_is_never_overridden(parse, extra):
    """Every flag that the user gave stands once, as given; the others keep our defaults."""
    arguments = server_arguments("m", False, extra, cpu=True)
    assert arguments[-len(extra) :] == extra
    names = [a.split("=")[0] for a in arguments if a.startswith("--")]
    assert len(set(names)) == len(names), "a flag is given twice"
    ours, theirs = vars(parse(server_arguments("m", False, [], cpu=True))), vars(parse(arguments))
    wanted = vars(parse(["--model-path", "m", *extra]))
    plain = vars(parse(["--model-path", "m"]))
    for name, value in theirs.items():
        given = wanted[name] != plain[name]
        assert value == (wanted[name] if given else ours[name])


def test_a_flag_whose_name_starts_like_ours_is_another(parse):
    args = parse(server_arguments("m", False, ["--enable-metrics-for-all-schedulers"], cpu=True))
    assert args.enable_metrics


def test_environment(monkeypatch):
    config = load_config(method="snapkv", budget=77)
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("INTENTKV_CONFIG", raising=False)
    before = dict(os.environ)
    environment = server_environment(config, stock=False, local_model=True, cpu=True)
    assert environment["SGLANG_PLATFORM"] == NAME
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert "SGLANG_USE_CPU_ENGINE" not in environment, "it would take the AMX path, which a plain CPU lacks"
    assert dict(os.environ) == before, "the launcher's own environment was changed"
    monkeypatch.setenv("INTENTKV_CONFIG", environment["INTENTKV_CONFIG"])
    assert config_from_environment() == config


def test_environment_of_a_stock_server_and_of_a_gpu(monkeypatch):
    for name in ("SGLANG_PLATFORM", "INTENTKV_CONFIG", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    stock = server_environment(Config(), stock=True, local_model=False, cpu=False)
    assert not {"SGLANG_PLATFORM", "INTENTKV_CONFIG", "HF_HUB_OFFLINE"} & stock.keys()
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert server_environment(Config(), stock=True, local_model=True, cpu=True)["HF_HUB_OFFLINE"] == "0"


@pytest.mark.parametrize(("model", "stock", "extra", "message"), [
    ("m", False, ["--model-path", "other"], "with --model"),
    (None, True, ["--model=other"], "with --model"),
    ("m", False, ["--radix-cache-backend", "lmcache"], "--radix-cache-backend"),
    ("./nowhere", False, [], "'./nowhere' does not exist"),
    ("~/nowhere-at-all", True, [], "does not exist"),
])  # fmt: skip
def test_errors(monkeypatch, model, stock, extra, message):
    """Before anything starts; no model is fetched or converted."""

    def refuse(*args):
        raise AssertionError("a server was started")

    monkeypatch.setattr(os, "execve", refuse)
    monkeypatch.setattr(default_model, "ensure_default_model", refuse)
    with pytest.raises(ConfigError, match=message) as caught:
        launcher.serve(model, Config(), stock, extra)
    assert "\n" not in str(caught.value)


def test_recording_that_cannot_work(monkeypatch, tmp_path):
    """Before anything starts. Catches: a server that records nothing in silence."""
    monkeypatch.setattr(os, "execve", lambda *call: pytest.fail("a server was started"))
    with pytest.raises(ConfigError, match="stock server cannot record"):
        launcher.serve("m", Config(record=tmp_path / "logs"), True, [])
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Cannot record into"):
        launcher.serve("m", Config(record=tmp_path / "file" / "logs"), False, [])


@pytest.mark.parametrize(("model", "expected"), [(None, "made"), ("org/name", "org/name"), ("FOLDER", "FOLDER")])
def test_serve_replaces_the_process(monkeypatch, tmp_path, model, expected):
    """The same Python, our launch module, our environment; the model as a folder where it is one."""
    started = []
    monkeypatch.setattr(os, "execve", lambda *call: started.append(call))
    monkeypatch.setattr(default_model, "ensure_default_model", lambda cache: tmp_path / "made")
    names = {"FOLDER": str(tmp_path), "made": str(tmp_path / "made")}
    launcher.serve(names.get(model, model), load_config(budget=5), False, ["--port", "1234"])
    ((program, command, environment),) = started
    assert program == command[0] == sys.executable
    assert command[1:5] == ["-m", "intentkv_sglang.launch", "--model-path", names.get(expected, expected)]
    assert command[-2:] == ["--port", "1234"]
    assert json.loads(environment["INTENTKV_CONFIG"])["budget"] == 5
