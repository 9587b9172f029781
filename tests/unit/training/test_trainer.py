"""The trainer: learns, resumes to the bit, agrees between one and two processes, and stops when the held-out result does."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from intentkv.config import ConfigError
from intentkv.head import WEIGHTS_FILE, load_head, load_head_config
from intentkv_training.examples import ExampleStore
from intentkv_training.losses import LossWeights, default_weights
from intentkv_training.trainer import HISTORY_FILE, Held, Loader, TrainSettings, train

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def made(example_folder):
    store = ExampleStore(example_folder)
    return store.load("train"), store.load("validation"), store.settings()


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """accelerate keeps its state for the process's life; a run of its own starts without it."""
    yield
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


def settings_of(**options):
    given = {"weights": default_weights(options.get("label", "value_energy")), "epochs": 2, "batch": 4, "candidates": 128}
    return TrainSettings(**(given | options))


def run(made, out, settings, **options):
    return train(*made, settings, out, cpu=True, **options)


def history(out):
    return [json.loads(line) for line in (out / HISTORY_FILE).read_text().splitlines()]


def test_learns_and_writes_a_head(made, tmp_path):
    """Catches: gradients that do not arrive, statistics that are not saved, the last head saved instead of the best."""
    settings = settings_of(epochs=8, lr=3e-3, weights=LossWeights(regression=1.0))
    head = run(made, tmp_path / "head", settings)
    losses = [line["train_loss"] for line in history(tmp_path / "head")]
    assert losses[-1] < 0.8 * losses[0]
    best = min(line["held_out"] for line in history(tmp_path / "head"))
    assert head.metrics["held_out"] == best
    assert head.shape == made[2].shape
    assert head.data_sha256 == made[2].data_sha256
    loaded = load_head(tmp_path / "head")
    assert loaded.config == head
    assert loaded.shift.abs().sum() > 0
    card = (tmp_path / "head" / "README.md").read_text()
    assert head.data_sha256 in card
    assert "assistant-learned" in card


@pytest.mark.parametrize(("stop", "checkpoint"), [(2, None), (3, 1), (5, 2)])
def test_resumed_equals_uninterrupted(made, tmp_path, stop, checkpoint):
    """To the bit. Catches: an order that depends on how often it was asked for, optimiser or schedule that start anew, steps run twice."""
    settings = settings_of()
    run(made, tmp_path / "whole", settings)
    assert run(made, tmp_path / "parts", settings, stop_after=stop, checkpoint_steps=checkpoint) is None
    run(made, tmp_path / "parts", settings, checkpoint_steps=checkpoint)
    assert (tmp_path / "parts" / WEIGHTS_FILE).read_bytes() == (tmp_path / "whole" / WEIGHTS_FILE).read_bytes()
    assert history(tmp_path / "parts") == history(tmp_path / "whole")


def test_a_finished_run_is_not_run_again_and_another_is_refused(made, tmp_path):
    head = run(made, tmp_path / "head", settings_of(epochs=1))
    before = (tmp_path / "head" / HISTORY_FILE).read_bytes()
    assert run(made, tmp_path / "head", settings_of(epochs=1)) == head
    assert (tmp_path / "head" / HISTORY_FILE).read_bytes() == before
    with pytest.raises(ConfigError, match="other settings"):
        run(made, tmp_path / "head", settings_of(epochs=2))


def test_nothing_held_out_is_refused(made, tmp_path):
    """Catches: a run that stops by a constant and keeps its first head."""
    train_rows, _, examples = made
    with pytest.raises(ConfigError, match="no held-out examples"):
        train(train_rows, [], examples, settings_of(), tmp_path / "head", cpu=True)
    assert train(train_rows, [], examples, settings_of(epochs=1), tmp_path / "head", lambda head: Held(1.0, {}), cpu=True) is not None


def test_seeds(made, tmp_path):
    """Catches: a seed that is not used."""
    for name, seed in (("a", 0), ("b", 1)):
        run(made, tmp_path / name, settings_of(epochs=1, seed=seed))
    assert (tmp_path / "a" / WEIGHTS_FILE).read_bytes() != (tmp_path / "b" / WEIGHTS_FILE).read_bytes()


def test_stops_early_at_the_best(made, tmp_path):
    """The held-out result falls once and rises then. Catches: patience off by one, a later head over the best one."""
    results = iter([3.0, 1.0, 2.0, 2.0, 2.0, 0.0])
    heads = []

    def validate(head):
        heads.append(head.output.weight.detach().clone())
        return Held(next(results), {"kl_at_0.25": 7.0})

    head = run(made, tmp_path / "head", settings_of(epochs=20, patience=2), validate=validate)
    assert [line["held_out"] for line in history(tmp_path / "head")] == [3.0, 1.0, 2.0, 2.0]
    assert head.metrics["epoch"] == 1
    assert head.metrics["kl_at_0.25"] == 7.0
    assert torch.equal(load_head(tmp_path / "head").output.weight, heads[1])


@pytest.mark.parametrize(("rule", "features", "residual", "label"), [
    ("intentkv", "published", "additive", "published"), ("intentkv", "extended", "log", "energy"),
    ("assistant", "published", "log", "mass"), ("assistant", "layered", "log", "energy"),
])  # fmt: skip
def test_every_kind_of_head(made, tmp_path, rule, features, residual, label):
    settings = settings_of(epochs=1, rule=rule, feature_set=features, residual=residual, label=label)
    head = run(made, tmp_path / "head", settings)
    assert (head.rule, head.feature_set, head.residual, head.label) == (rule, features, residual, label)
    assert load_head(tmp_path / "head").features == 3 * 16 + 1 + {"published": 0, "extended": 17, "layered": 17 + 4 * 2}[features]


def test_bf16(made, tmp_path):
    head = run(made, tmp_path / "head", settings_of(epochs=1, precision="bf16"))
    assert torch.isfinite(torch.tensor(head.metrics["train_loss"]))


def test_rows_without_evidence_are_dropped_and_template_tokens_left_out(made):
    rows, _, examples = made
    loader = Loader(rows, settings_of(label="published"), examples.floor)
    assert loader.dropped + len(loader.usable) == len(rows)
    assert loader.dropped > 0
    everything = Loader(rows, settings_of(), examples.floor)
    assert everything.dropped == 0
    if loader.usable:
        batch = loader.batch([(loader.usable[0], "x")])
        assert (~batch.valid).any()
    assert everything.batch([(0, "x")]).valid.all()


def test_processes_share_each_step(made):
    """Two processes see together what one sees. Catches: an example seen twice or never, steps of different number."""
    rows, _, examples = made
    one = Loader(rows, settings_of(), examples.floor)
    two = [Loader(rows, settings_of(), examples.floor, 2, rank) for rank in range(2)]
    for whole, *halves in zip(one.epoch(3), *(loader.epoch(3) for loader in two), strict=True):
        labels = sorted(round(float(row.sum()), 4) for row in whole.label)
        assert labels == sorted(round(float(row.sum()), 4) for half in halves for row in half.label)
    with pytest.raises(ConfigError, match="processes"):
        Loader(rows, settings_of(batch=3), examples.floor, 2, 0)


def test_two_processes(made, example_folder, tmp_path):
    """A real run with two CPU processes ends at the same head as one process, up to rounding."""
    flags = ["--epochs", "1", "--batch", "4", "--candidates", "128", "--no-wandb", "--cpu", "--examples", str(example_folder)]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1",
              "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]  # fmt: skip
    both = subprocess.run(
        [*launch, "-m", "intentkv_training", "fit", *flags, "--out", str(tmp_path / "two")], capture_output=True, text=True, timeout=600
    )
    assert both.returncode == 0, both.stderr[-2000:]
    run(made, tmp_path / "one", settings_of(epochs=1))
    one, two = load_head(tmp_path / "one"), load_head(tmp_path / "two")
    for (name, a), (_, b) in zip(one.state_dict().items(), two.state_dict().items(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    assert len(history(tmp_path / "two")) == 1, "one process writes"
    assert load_head_config(tmp_path / "two").versions


def test_wandb_offline(made, tmp_path, monkeypatch):
    """Without a key it logs offline, into the run's own folder."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    run(made, tmp_path / "head", settings_of(epochs=1), wandb_project="test")
    assert list((tmp_path / "head" / "wandb").glob("offline-run-*"))


def test_a_wider_head(made, tmp_path):
    """Catches: a width that is not the head's on disk, so that it cannot be loaded."""
    head = run(made, tmp_path / "head", settings_of(epochs=1, width=64))
    assert head.width == 64
    assert load_head(tmp_path / "head").hidden.out_features == 64
