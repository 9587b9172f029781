"""``intentkv train``: examples, fit, evaluate."""

from __future__ import annotations

import sys
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from pydantic import BaseModel, ValidationError
from rich.console import Console
from typer.core import TyperGroup

from intentkv.cli import OneLineErrors
from intentkv.config import Config, ConfigError
from intentkv.cuts import CutRules
from intentkv.trajectories import sha256_of
from intentkv_training.examples import ExampleSettings, ExampleStore, build_examples, example_settings
from intentkv_training.losses import LossWeights, default_weights
from intentkv_training.model import FrozenModel

M = TypeVar("M", bound=BaseModel)


class _Commands(OneLineErrors, TyperGroup):
    pass


app = typer.Typer(
    cls=_Commands,
    help="Train the residual head from logs of agents: examples, fit, evaluate. docs/train.md walks through it.",
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
)

_Logs = Annotated[
    list[Path], typer.Option("--input", help="Logs: request logs, message logs, .traj.json or ATIF; may be given again.", exists=True)
]
_Model = Annotated[str, typer.Option(help="Model folder or Hugging Face id; the one that will be served.")]
_Device = Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1; default: cuda where there is one.")]
_Dtype = Annotated[str, typer.Option(help="float32 (exact) or bfloat16.")]
_AUTO = "auto"


class Rule(str, Enum):
    assistant = "assistant"
    intentkv = "intentkv"


class LabelName(str, Enum):
    published = "published"
    mass = "mass"
    energy = "energy"
    value_energy = "value_energy"


class Features(str, Enum):
    published = "published"
    extended = "extended"
    layered = "layered"


class ResidualName(str, Enum):
    additive = "additive"
    log = "log"


class Precision(str, Enum):
    no = "no"
    bf16 = "bf16"


class SplitName(str, Enum):
    train = "train"
    validation = "validation"
    test = "test"
    all = "all"


def _model(folder: str, device: str, dtype: str) -> FrozenModel:
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"Unknown --dtype {dtype!r}; choose float32 or bfloat16.")
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == _AUTO else device
    if chosen.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"There is no CUDA device for --device {device}; use --device cpu.")
    return FrozenModel(folder, chosen, getattr(torch, dtype))


def _versions() -> dict[str, str]:
    found = {}
    for name in ("intentkv", "torch", "transformers", "accelerate"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from a checkout
            continue
    return found


@app.command()
def examples(
    files: _Logs,
    model: _Model,
    out: Annotated[Path, typer.Option(help="Folder for the examples; an interrupted run goes on.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Length of a piece of a conversation that the model reads at once.")] = 6000,
    pieces: Annotated[
        int, typer.Option(min=1, help="Pieces of a longer conversation, at most; each begins with its system prompt and task.")
    ] = 8,
    per_piece: Annotated[int, typer.Option(min=1, help="Turns of a piece that become examples.")] = 8,
    min_history: Annotated[int, typer.Option(min=1, help="Leave out turns with fewer tokens to choose from.")] = 256,
    horizon_turns: Annotated[int, typer.Option(min=1, help="Assistant turns whose queries are the future.")] = 2,
    test: Annotated[float, typer.Option(min=0, max=0.9, help="Share of the groups held out for evaluation.")] = 0.25,
    validation: Annotated[float, typer.Option(min=0, max=0.9, help="Share of the groups held out for early stopping.")] = 0.1,
    tools: Annotated[
        bool, typer.Option("--tools/--no-tools", help="List the tools in the system message of logs without token ids.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the split.")] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many conversations.")] = None,
    shard_mb: Annotated[int, typer.Option(min=1, help="A shard is closed behind the conversation that fills it.")] = 64,
    device: _Device = _AUTO,
    dtype: _Dtype = "float32",
) -> None:
    """Turn logs into labelled examples with the frozen base model."""
    frozen = _model(model, device, dtype)
    settings = example_settings(
        frozen,
        files,
        max_tokens=max_tokens,
        pieces=pieces,
        per_piece=per_piece,
        min_history=min_history,
        horizon_turns=horizon_turns,
        test=test,
        validation=validation,
        tools=tools,
        seed=seed,
    )
    counts = build_examples(files, out, frozen, settings, shard_mb << 20, limit)
    for reason, count in counts.items():
        typer.echo(f"{count:>10,}  {reason}")


@app.command()
def fit(
    data: Annotated[Path, typer.Option("--examples", help="Folder that `intentkv train examples` wrote.")],
    out: Annotated[Path, typer.Option(help="Folder for the head; an interrupted run goes on from its checkpoint.")],
    model: Annotated[str | None, typer.Option(help="Base model for the held-out KL; without it the held-out loss decides.")] = None,
    files: Annotated[list[Path] | None, typer.Option("--input", help="The logs again, for the held-out KL.", exists=True)] = None,
    rule: Annotated[Rule, typer.Option(help="Rule score that the head corrects.")] = Rule.assistant,
    label: Annotated[LabelName, typer.Option(help="What to predict.")] = LabelName.value_energy,
    features: Annotated[Features, typer.Option(help="Feature set.")] = Features.layered,
    residual: Annotated[ResidualName, typer.Option(help="How the residual joins the score; published: additive.")] = ResidualName.log,
    width: Annotated[int, typer.Option(min=4, help="Width of the head's hidden layers; published: 128.")] = 128,
    weights: Annotated[
        str | None, typer.Option(help="Loss terms, e.g. regression=1,listwise=0.5,bce=0,ranking=0,retain=0,memory=0,keep=0.25.")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the examples, at most.")] = 20,
    batch: Annotated[int, typer.Option(min=1, help="Examples a step, over all processes.")] = 8,
    candidates: Annotated[int, typer.Option(min=2, help="Candidates of an example a step.")] = 2048,
    lr: Annotated[float, typer.Option(min=0, help="Highest learning rate.")] = 1e-3,
    weight_decay: Annotated[float, typer.Option(min=0, help="Of AdamW.")] = 0.01,
    precision: Annotated[Precision, typer.Option(help="no: float32.")] = Precision.no,
    patience: Annotated[int, typer.Option(min=1, help="Epochs without a better held-out result before the end.")] = 5,
    held_cases: Annotated[int, typer.Option(min=1, help="Conversations for the held-out KL.")] = 6,
    held_ratios: Annotated[str, typer.Option(help="Budgets of the held-out KL.")] = "0.1,0.25",
    least_window: Annotated[int, typer.Option(min=1, help="Shortest conversation for the held-out KL, in tokens.")] = 3500,
    checkpoint_steps: Annotated[int | None, typer.Option(min=1, help="Save every so many steps, besides each epoch's end.")] = None,
    seed: Annotated[int, typer.Option(help="Of the start and the order.")] = 0,
    wandb: Annotated[bool, typer.Option("--wandb/--no-wandb", help="Log to wandb, offline without WANDB_API_KEY.")] = True,
    wandb_project: Annotated[str, typer.Option(help="Project in wandb.")] = "intentkv",
    cpu: Annotated[bool, typer.Option("--cpu/--no-cpu", help="Train on the CPU even where there is a GPU.")] = False,
) -> None:
    """Train a head. With several processes: accelerate launch --num_processes N -m intentkv_training fit ..."""
    from intentkv_training.evaluate import NextTurnKL, find_cases
    from intentkv_training.trainer import TrainSettings, train

    if (model is None) != (not files):
        raise ConfigError("The held-out KL needs both --model and --input; give both or neither.")
    store = ExampleStore(data)
    made = store.settings()
    settings = _validated(
        TrainSettings,
        rule=rule.value,
        feature_set=features.value,
        residual=residual.value,
        width=width,
        label=label.value,
        weights=_weights(weights) if weights else default_weights(label.value),
        epochs=epochs,
        batch=batch,
        candidates=candidates,
        lr=lr,
        weight_decay=weight_decay,
        precision=precision.value,
        patience=patience,
        seed=seed,
    )
    validate = None
    if model is not None and files:
        frozen = _model(model, "cpu" if cpu else _AUTO, "float32")
        if frozen.shape != made.shape:
            raise ConfigError(f"The examples were made with another model ({made.model}); give that one.")
        cases, _ = find_cases(files, frozen, _cut_rules(least_window), made, "validation", held_cases)
        validate = NextTurnKL(cases, frozen, made, settings.rule, settings.feature_set, _ratios(held_ratios))
    head = train(
        store.load("train"),
        store.load("validation"),
        made,
        settings,
        out,
        validate,
        _versions(),
        wandb_project if wandb else None,
        cpu,
        checkpoint_steps,
    )
    if head is not None:
        typer.echo(f"Head written to {out} ({', '.join(f'{k} {v:.4g}' for k, v in head.metrics.items())}).")
        typer.echo(f"Serve it: intentkv serve --model {model or 'DIR'} --method {head.method} --head {out}")


@app.command()
def evaluate(
    files: _Logs,
    model: _Model,
    out: Annotated[Path, typer.Option(help="Folder for rows.jsonl and summary.json; an interrupted run goes on.")],
    heads: Annotated[list[Path] | None, typer.Option("--head", help="A trained head; may be given again.")] = None,
    data: Annotated[Path | None, typer.Option("--examples", help="Examples that the heads were trained on: gives the split.")] = None,
    split: Annotated[SplitName, typer.Option(help="Which groups.")] = SplitName.test,
    methods: Annotated[list[str] | None, typer.Option("--method", help="Rules to compare; default: all.")] = None,
    ratios: Annotated[str, typer.Option(help="Shares of the history that stay.")] = "0.1,0.2,0.25,0.5",
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many conversations.")] = None,
    least_window: Annotated[int, typer.Option(min=1, help="Shortest conversation, in tokens.")] = 3500,
    least_cut: Annotated[int, typer.Option(min=1, help="Shortest history, in tokens.")] = 2500,
    batch: Annotated[int | None, typer.Option(min=1, help="Arms read at a time; default: 8 on a GPU, else 1.")] = None,
    device: _Device = _AUTO,
    dtype: _Dtype = "float32",
) -> None:
    """Compare rules, trained heads and oracles on held-out conversations: next-turn KL, NLL, top-1 and attention recall."""
    from intentkv_training import evaluate as room

    frozen = _model(model, device, dtype)
    sha = sha256_of(files)
    made = ExampleStore(data).settings() if data is not None else ExampleSettings(model="", shape=frozen.shape, data_sha256=sha)
    rules = _cut_rules(least_window, least_cut)
    cases, left_out = room.find_cases(files, frozen, rules, made, split.value, limit)
    chosen = room.methods_of(methods or room.RULES, heads or [], frozen, Config())
    rows = room.evaluate(cases, frozen, chosen, _ratios(ratios), batch or (8 if frozen.device.type == "cuda" else 1), out)
    summary = room.write_summary(rows, out, cases, left_out, frozen, sha, split.value, rules)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(room.table_of(summary.arms))
    for gap in summary.gaps:
        paired = f"{gap.paired.mean:+.3f} [{gap.paired.low:+.3f}, {gap.paired.high:+.3f}]" if gap.paired else "–"
        console.print(f"{gap.arm} at {gap.ratio:.0%}: KL against {gap.rule} {paired}, {gap.share:.0%} of the gap to the best oracle closed")


def _cut_rules(least_window: int, least_cut: int = 2500) -> CutRules:
    least_cut = min(least_cut, max(1, least_window - 500))
    return CutRules(least_window=least_window, least_cut=least_cut, least_history=min(500, least_cut // 2))


def _ratios(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"Budgets {text!r} must be numbers with commas, e.g. 0.1,0.25.") from error
    if not all(0 < value <= 1 for value in values):
        raise ConfigError(f"Budgets {text!r} must be over 0 and at most 1.")
    return values


def _weights(text: str) -> LossWeights:
    try:
        given = {name.strip(): float(value) for name, value in (part.split("=") for part in text.split(","))}
    except ValueError as error:
        raise ConfigError(f"Loss weights {text!r} must read name=number,name=number.") from error
    return _validated(LossWeights, **given)


def _validated(kind: type[M], /, **values: Any) -> M:
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"Option {'.'.join(map(str, first['loc']))!r}: {first['msg']}.") from error


def main(arguments: list[str]) -> int:
    """Run ``intentkv train`` with ``arguments``; a command ends the process with its exit status."""
    app(args=arguments, prog_name="intentkv train")
    return 0
