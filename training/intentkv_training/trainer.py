"""The training loop on ``accelerate``: one CPU or GPU, or several processes; checkpoints from which a run goes on exactly."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from intentkv.config import ConfigError
from intentkv.head import EXTENDED, FeatureSet, HeadConfig, HeadInputs, Residual, ResidualHead, RuleName, Width, load_head_config, save_head
from intentkv_training.card import write_card
from intentkv_training.examples import Example, ExampleSettings
from intentkv_training.labels import Label
from intentkv_training.losses import Batch, LossWeights, loss_of

CHECKPOINT = "checkpoint"
HISTORY_FILE = "history.jsonl"
RUN_FILE = "run.json"


class TrainSettings(BaseModel):
    """Everything that decides the result, given the examples."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rule: RuleName = "assistant"
    feature_set: FeatureSet = "layered"
    residual: Residual = "log"
    width: Width = 128
    label: Label = "value_energy"
    weights: LossWeights
    epochs: int = Field(default=20, ge=1)
    batch: int = Field(default=8, ge=1)
    """Examples a step, over all processes."""
    candidates: int = Field(default=2048, ge=2)
    """Candidates of an example that one step sees, drawn anew each epoch."""
    lr: float = Field(default=1e-3, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)
    warmup: float = Field(default=0.05, ge=0, le=1)
    """Share of the steps with a rising learning rate; the rest falls as a cosine."""
    clip: float = Field(default=1.0, gt=0)
    precision: Literal["no", "bf16"] = "no"
    """``no``: float32."""
    patience: int = Field(default=5, ge=1)
    """Epochs without a better held-out result after which training ends."""
    seed: int = 0


class Held(NamedTuple):
    """A held-out result; lower is better."""

    value: float
    metrics: dict[str, float]


class Rows(Protocol):
    """What the trainer needs of a ``datasets.Dataset``."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Loader:
    """Batches in an order that depends on the seed, the epoch and the place only, so a resumed run sees what it would have seen."""

    def __init__(self, rows: Rows, settings: TrainSettings, floor: float, processes: int = 1, rank: int = 0) -> None:
        if settings.batch % processes:
            raise ConfigError(f"The batch of {settings.batch} cannot be shared by {processes} processes; give a multiple of them.")
        self._rows, self._settings, self._floor = rows, settings, floor
        self._processes, self._rank = processes, rank
        self.usable = [i for i in range(len(rows)) if self._evidence(i)]
        self.dropped = len(rows) - len(self.usable)
        """Rows without evidence for the label."""

    def _evidence(self, index: int) -> bool:
        if self._settings.label != "published":
            return True
        example = self._example(index)
        return bool((example.labels["published"] > 0)[~example.template].any())

    def _example(self, index: int) -> Example:
        return Example.from_bytes(self._rows[index]["tensors"], self._floor)

    @property
    def steps(self) -> int:
        """Steps an epoch; the last, incomplete one counts."""
        return -(-len(self.usable) // self._settings.batch)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """This process's share of each step of ``epoch``, from step ``start`` on."""
        order = list(self.usable)
        random.Random(f"{self._settings.seed}/{epoch}").shuffle(order)
        size = self._settings.batch
        # every process needs its share of each step, so the last step is filled up from the start
        order += order[: -len(order) % size] if len(order) >= size else (order * size)[: size - len(order)]
        for step in range(start, self.steps):
            mine = order[step * size : (step + 1) * size][self._rank :: self._processes]
            yield self.batch([(index, f"{self._settings.seed}/{epoch}/{index}") for index in mine])

    def batch(self, drawn: Sequence[tuple[int, str]]) -> Batch:
        """Rows by index, each with the seed that its candidates are drawn with."""
        return collate([self._drawn(self._example(index), seed) for index, seed in drawn], self._settings)

    def _drawn(self, example: Example, seed: str) -> Example:
        n = example.template.shape[0]
        if n <= self._settings.candidates:
            return example
        generator = torch.Generator().manual_seed(random.Random(seed).getrandbits(62))
        at = torch.randperm(n, generator=generator)[: self._settings.candidates].sort().values
        inputs = {
            rule: HeadInputs(i.keys[at], i.memory, i.query_keys, i.rule[at], i.extra[at]) for rule, i in example.inputs.items()
        }  # fmt: skip
        return Example(inputs, {name: label[at] for name, label in example.labels.items()}, example.template[at])


def collate(examples: Sequence[Example], settings: TrainSettings) -> Batch:
    """Pad examples to one batch."""

    def pad(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return pad_sequence(list(tensors), batch_first=True)

    inputs = [example.inputs[settings.rule] for example in examples]
    queries = pad([i.query_keys for i in inputs])
    lengths = torch.tensor([i.query_keys.shape[0] for i in inputs])
    # the columns of a smaller feature set are the first ones of a larger one
    columns = {"published": 0, "extended": len(EXTENDED)}.get(settings.feature_set)
    extra = [i.extra[:, :columns] for i in inputs]
    together = HeadInputs(
        keys=pad([i.keys for i in inputs]),
        memory=torch.stack([i.memory for i in inputs]),
        query_keys=queries,
        rule=pad([i.rule for i in inputs]),
        extra=pad(extra),
        query_padding=torch.arange(queries.shape[1])[None] >= lengths[:, None],
    )
    # Template tokens are left out of the published label's loss; an attention label is as true of them as of any other.
    valid = [~e.template if settings.label == "published" else torch.ones_like(e.template) for e in examples]
    return Batch(together, pad([e.labels[settings.label] for e in examples]), pad(valid))


def _standardise(head: ResidualHead, loader: Loader) -> None:
    """Set the head's feature statistics from the training data."""
    total = torch.zeros(head.features, dtype=torch.float64)
    square, count = torch.zeros_like(total), 0
    for start in range(0, len(loader.usable), 16):
        batch = loader.batch([(index, f"statistics/{index}") for index in loader.usable[start : start + 16]])
        phi = head.phi(batch.inputs)[batch.valid].double()
        total, square, count = total + phi.sum(0), square + phi.square().sum(0), count + phi.shape[0]
    mean = total / max(1, count)
    deviation = (square / max(1, count) - mean.square()).clamp_min(0).sqrt()
    head.shift.copy_(mean)
    # a feature that never changes says nothing: it is centred and left at its scale
    head.scale.copy_(torch.where(deviation > 1e-6, 1 / deviation.clamp_min(1e-6), torch.ones_like(deviation)))


class _Progress(BaseModel):
    """Where a run stands, beside what accelerate keeps."""

    epoch: int = 0
    step: int = 0
    """Steps done of this epoch."""
    best: float | None = None
    best_epoch: int = -1
    metrics: dict[str, float] = Field(default_factory=dict)
    loss_sum: float = 0.0
    finished: bool = False


class _Read(torch.nn.Module):
    """What is wrapped for several processes: the head's forward pass without its loss."""

    def __init__(self, head: ResidualHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, inputs: HeadInputs) -> tuple[torch.Tensor, torch.Tensor]:
        return self.head.read_out(inputs)


def train(
    train_rows: Rows,
    held_rows: Rows,
    examples: ExampleSettings,
    settings: TrainSettings,
    out: Path,
    validate: Callable[[ResidualHead], Held] | None = None,
    versions: dict[str, str] | None = None,
    wandb_project: str | None = None,
    cpu: bool = False,
    checkpoint_steps: int | None = None,
    stop_after: int | None = None,
) -> HeadConfig | None:
    """Train a head into the folder ``out``; goes on from its checkpoint when there is one.

    Args:
        validate: held-out result of a head (the next-turn KL); default: the loss on ``held_rows``.
        wandb_project: log to wandb under this project, offline without an API key; None: not at all.
        checkpoint_steps: save every so many steps, besides each epoch's end.
        stop_after: end after so many steps of this call, leaving the checkpoint (as an interruption would).

    Returns:
        The configuration of the best head; None when ``stop_after`` came first.

    Raises:
        ConfigError: no examples, or ``out`` holds a run with other settings.
    """
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    set_seed(settings.seed)
    accelerator = Accelerator(
        mixed_precision=settings.precision, cpu=cpu, log_with="wandb" if wandb_project else None, project_dir=str(out)
    )
    loader = Loader(train_rows, settings, examples.floor, accelerator.num_processes, accelerator.process_index)
    held = Loader(held_rows, settings, examples.floor)
    if not loader.usable:
        raise ConfigError("There are no training examples with evidence for this label; give more logs or another --label.")
    if validate is None and not held.usable:
        raise ConfigError("There are no held-out examples to stop by; give more groups, a larger --validation, or --model and --input.")
    _claim(out, settings, examples, accelerator)
    head = ResidualHead(_head_config(settings, examples, versions or {}))
    _standardise(head, loader)
    model = _Read(head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    steps = settings.epochs * loader.steps
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps, settings.warmup))
    model, optimizer = accelerator.prepare(model, optimizer)
    # The plain schedule counts steps; accelerate's own wrapper would count one a process.
    accelerator.register_for_checkpointing(schedule)
    progress = _resume(out, accelerator)
    if progress.finished:
        return load_best(out)
    if wandb_project:
        accelerator.init_trackers(wandb_project, config=settings.model_dump(), init_kwargs={"wandb": _wandb_options(out)})
    bar = tqdm(total=steps, initial=progress.epoch * loader.steps + progress.step, desc="training", disable=not accelerator.is_main_process)
    done = 0
    while progress.epoch < settings.epochs and not progress.finished:
        for batch in loader.epoch(progress.epoch, progress.step):
            batch = batch.to(accelerator.device)
            with accelerator.autocast():
                read = model(batch.inputs)
            loss = loss_of(head, read, batch, settings.label, settings.weights)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), settings.clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            progress.step += 1
            progress.loss_sum += float(accelerator.reduce(loss.detach(), "mean"))
            done += 1
            bar.update()
            if checkpoint_steps and progress.step % checkpoint_steps == 0:
                _save(out, accelerator, progress)
            if stop_after is not None and done >= stop_after:
                return None
        _end_epoch(progress, head, loader, held, settings, out, accelerator, validate)
        _save(out, accelerator, progress)
    bar.close()
    accelerator.end_training()
    return load_best(out)


def load_best(out: Path) -> HeadConfig:
    """The configuration of the finished head in ``out``."""
    return load_head_config(out)


def _end_epoch(
    progress: _Progress,
    head: ResidualHead,
    loader: Loader,
    held: Loader,
    settings: TrainSettings,
    out: Path,
    accelerator: Any,
    validate: Callable[[ResidualHead], Held] | None,
) -> None:
    result = Held(math.inf, {})
    if accelerator.is_main_process:
        head.eval()
        result = validate(head) if validate is not None else held_loss(head, held, settings, accelerator.device)
        head.train()
    value = float(accelerator.reduce(torch.tensor(result.value if accelerator.is_main_process else 0.0, device=accelerator.device), "sum"))
    metrics = {"train_loss": progress.loss_sum / max(1, loader.steps), "held_out": value, **result.metrics}
    accelerator.log(metrics, step=progress.epoch)
    better = progress.best is None or value < progress.best
    if better:
        progress.best, progress.best_epoch, progress.metrics = value, progress.epoch, metrics
    if accelerator.is_main_process:
        with (out / HISTORY_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"epoch": progress.epoch, **metrics}) + "\n")
        if better:
            head.config = head.config.model_copy(update={"metrics": {**metrics, "epoch": float(progress.epoch)}})
            save_head(head, out)
            write_card(out, head.config, settings, len(loader.usable), loader.dropped)
    progress.epoch, progress.step, progress.loss_sum = progress.epoch + 1, 0, 0.0
    progress.finished = progress.epoch >= settings.epochs or progress.epoch - 1 - progress.best_epoch >= settings.patience


_KEPT = (0.1, 0.25)
"""Shares of the candidates at which the kept share of the label is reported."""


@torch.no_grad()
def held_loss(head: ResidualHead, held: Loader, settings: TrainSettings, device: torch.device) -> Held:
    """Mean loss on the held-out examples, with the same candidates every time.

    Metrics: the share of the label's sum that the best-scored candidates hold, by the head, its rule alone, and the label itself.
    """
    losses: list[float] = []
    shares: defaultdict[str, float] = defaultdict(float)
    for index in held.usable:
        batch = held.batch([(index, f"held/{index}")]).to(device)
        read = head.read_out(batch.inputs)
        losses.append(float(loss_of(head, read, batch, settings.label, settings.weights)))
        orders = {"head": head.logits(batch.inputs, read[0]), "rule": batch.inputs.rule, "best": batch.label}
        for name, order in orders.items():
            for kept in _KEPT:
                top = order[0].topk(max(1, round(kept * order.shape[1]))).indices
                shares[f"{name}_share_at_{kept:g}"] += float(batch.label[0, top].sum() / batch.label.sum().clamp_min(1e-12))
    mean = sum(losses) / len(losses)
    return Held(mean, {"held_loss": mean} | {name: total / len(losses) for name, total in shares.items()})


def _rate(step: int, steps: int, warmup: float) -> float:
    rising = max(1, round(warmup * steps))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


def _head_config(settings: TrainSettings, examples: ExampleSettings, versions: dict[str, str]) -> HeadConfig:
    return HeadConfig(
        rule=settings.rule,
        feature_set=settings.feature_set,
        residual=settings.residual,
        floor=examples.floor,
        shape=examples.shape,
        layer_stride=examples.layer_stride,
        width=settings.width,
        label=settings.label,
        data_sha256=examples.data_sha256,
        versions=versions,
    )


def _claim(out: Path, settings: TrainSettings, examples: ExampleSettings, accelerator: Any) -> None:
    """Make ``out``, or check that the run in it has the same settings."""
    file = out / RUN_FILE
    wanted = {"settings": settings.model_dump(), "examples": examples.model_dump()}
    if file.exists() and json.loads(file.read_text(encoding="utf-8")) != wanted:
        raise ConfigError(f"{str(out)!r} holds a run with other settings; give another folder or delete it.")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        out.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
    accelerator.wait_for_everyone()


def _save(out: Path, accelerator: Any, progress: _Progress) -> None:
    """A checkpoint; the one before it stays until this one is whole."""
    partial, target = out / f"{CHECKPOINT}.partial", out / CHECKPOINT
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(partial))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (partial / "progress.json").write_text(progress.model_dump_json(), encoding="utf-8")
        old = out / f"{CHECKPOINT}.old"
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            target.rename(old)
        partial.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    accelerator.wait_for_everyone()


def _resume(out: Path, accelerator: Any) -> _Progress:
    for folder in (out / CHECKPOINT, out / f"{CHECKPOINT}.old"):
        if (folder / "progress.json").exists():
            accelerator.load_state(str(folder))
            return _Progress.model_validate_json((folder / "progress.json").read_bytes())
    return _Progress()


def _wandb_options(out: Path) -> dict[str, Any]:
    key = bool(os.environ.get("WANDB_API_KEY"))
    return {"dir": str(out), "mode": os.environ.get("WANDB_MODE", "online" if key else "offline")}
