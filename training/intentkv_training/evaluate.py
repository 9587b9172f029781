"""What eviction costs in prediction, offline: rules, rules with a trained head, and oracles that see the future.

Each held-out conversation is cut once behind a tool or user message. A method scores the history as the server would at that moment, the
lowest-scored positions are hidden, and the recorded continuation is read teacher-forced. Needs torch and transformers only.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import BaseModel
from rich.table import Table
from tqdm import tqdm

from intentkv import __version__
from intentkv.budgets import HistoryRatio
from intentkv.config import Config, ConfigError, load_config
from intentkv.cuts import Cut, CutRules, find_cut
from intentkv.head import HeadInputs, ResidualHead, load_head
from intentkv.intervals import Interval, bootstrap
from intentkv.methods import Method, build_method
from intentkv.selection import top_positions
from intentkv.trajectories import Broken, Trajectory, read_trajectories
from intentkv_training.examples import ExampleSettings, candidates, head_inputs, session_turns, split_of
from intentkv_training.labels import future_attention
from intentkv_training.model import FrozenModel, Reading
from intentkv_training.session import Tokens, Turn, tokenise, turns
from intentkv_training.trainer import Held

RULES = ("random", "streamingllm", "snapkv", "intentkv", "assistant")
ORACLES = ("mass", "energy", "value_energy")
RATIOS = (0.1, 0.2, 0.25, 0.5)
ROWS_FILE, SUMMARY_FILE = "rows.jsonl", "summary.json"


class Case(NamedTuple):
    """A conversation and the place where its past is evicted from."""

    trajectory: Trajectory
    tokens: Tokens
    """Up to the end of what is read."""
    cut: Cut


def find_cases(
    files: Iterable[Path], model: FrozenModel, rules: CutRules, settings: ExampleSettings, split: str, limit: int | None
) -> tuple[list[Case], Counter[str]]:
    """Usable conversations of a split, in the order given, and why others were left out.

    Args:
        split: ``train``, ``validation``, ``test`` or ``all``.

    Raises:
        ConfigError: none is usable.
    """
    cases: list[Case] = []
    left_out: Counter[str] = Counter()
    for item in read_trajectories(files):
        if isinstance(item, Broken):
            left_out["broken lines"] += 1
            continue
        if split not in ("all", split_of(item.group, settings)):
            left_out["another split"] += 1
            continue
        tokens = tokenise(item, model, settings.tools).until(min(rules.window, model.context))
        cut = find_cut(tokens.messages, rules)
        if cut is None or not any(s.start == cut.at and s.role == "assistant" for s in tokens.messages):
            left_out["no usable cut"] += 1
            continue
        kept = replace(tokens, ids=tokens.ids[: cut.end], messages=tuple(s for s in tokens.messages if s.start < cut.end))
        cases.append(Case(item, kept, cut))
        if limit is not None and len(cases) == limit:
            break
    if not cases:
        raise ConfigError(f"No conversation of split {split!r} is usable ({dict(left_out)}); give more logs or shorter --least-window.")
    return cases, left_out


class Row(BaseModel):
    """One conversation under one arm."""

    trajectory: str
    source: str
    arm: str
    ratio: float
    """Share of the history that stays."""
    cut: int
    """Tokens before the place of eviction."""
    kept: int
    """History tokens that stayed."""
    scored: int
    """Tokens behind the cut that are predicted."""
    kl: float
    """Mean KL(full ‖ pruned) over the scored tokens, nats."""
    nll: float
    """Negative log-likelihood of the recorded tokens, nats a token."""
    dnll: float
    """Change of the negative log-likelihood of the recorded tokens against the full cache."""
    top1: float
    """Share of scored tokens whose most likely token is that of the full cache."""
    recall: float
    """Share of the continuation's attention to the history and forced tokens that falls on kept ones."""
    score_ms: float = 0.0
    """Time to score the history at the cut (the torch reference, not the server's kernels)."""


class Arm(NamedTuple):
    """One way to score the history of a case."""

    name: str
    scores: torch.Tensor
    """[n] float32 of ``history``."""
    history: torch.Tensor
    """[n] int64 positions to choose from."""
    forced: torch.Tensor
    """[cut] bool: what stays in any case."""
    score_ms: float = 0.0

    def visible(self, ratio: float) -> torch.Tensor:
        """[cut] bool: what stays when ``ratio`` of the history is kept."""
        keep = HistoryRatio(ratio).keep_count(self.history.shape[0], int(self.forced.sum()))
        visible = self.forced.clone()
        visible[self.history[top_positions(self.scores.cpu(), keep)]] = True
        return visible


@dataclass
class Judge:
    """Measures keep-sets of one case against the full cache."""

    model: FrozenModel
    case: Case
    past: Reading

    def __post_init__(self) -> None:
        cut = self.case.cut
        self._full = self._predict(torch.ones(1, cut.at, dtype=torch.bool))[0]
        at = torch.tensor([cut.at + k for k in cut.scored])
        self._next = torch.tensor(self.case.tokens.ids)[at].to(self.model.device)
        self._nll = -self._full.gather(1, self._next[:, None]).mean()

    def _predict(self, visible: torch.Tensor) -> torch.Tensor:
        return self.model.predict(self.past, self.case.tokens.ids, self.case.cut.at, visible, self.case.cut.scored)

    def judge(self, visible: torch.Tensor) -> list[tuple[float, float, float, float]]:
        """(KL, NLL, change of NLL, top-1 agreement) of each row of ``visible`` ([B, cut] bool)."""
        results = []
        for pruned in self._predict(visible):
            kl = (self._full.exp() * (self._full - pruned)).sum(-1).mean()
            nll = -pruned.gather(1, self._next[:, None]).mean()
            same = (pruned.argmax(-1) == self._full.argmax(-1)).float().mean()
            results.append((float(kl), float(nll), float(nll - self._nll), float(same)))
        return results


def _turn_at(found: Iterator[Turn], cut: int) -> Turn:
    for turn in found:
        if turn.answer.start == cut:
            return turn
    raise ValueError("the cut is not in front of an assistant turn")


def _arm(name: str, method: Method, case: Case, reading: Reading, model: FrozenModel) -> Arm:
    """A method's scores, served turn by turn up to the cut."""
    if method.aggregator is None:
        raise ConfigError(f"Method {name!r} evicts nothing; leave it out.")
    turn = _turn_at(turns(case.tokens, reading, model.parser, method.queries, [method.aggregator]), case.cut.at)
    forced = method.forced.mask(turn.prompt)
    history = torch.nonzero(~forced).flatten()
    at = history.to(model.device)
    started = _clock(model.device)
    scores = method.aggregator.score(turn.state, at, turn.captured, turn.keys, turn.prompt)
    return Arm(name, scores, history, forced[: case.cut.at], 1000 * (_clock(model.device) - started))


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _oracles(case: Case, reading: Reading, like: Arm) -> Iterator[Arm]:
    future = future_attention(reading, case.cut.at, [case.cut.at + k for k in case.cut.scored])
    for name in ORACLES:
        scores: torch.Tensor = getattr(future, name)
        yield Arm(f"oracle: {name}", scores[like.history.to(scores.device)], like.history, like.forced)


def evaluate_case(case: Case, model: FrozenModel, methods: dict[str, Method], ratios: Sequence[float], batch: int) -> list[Row]:
    """All arms at all ratios on one case."""
    reading = model.read(case.tokens.ids)
    arms = [_arm(name, method, case, reading, model) for name, method in methods.items()]
    default = Arm("", torch.empty(0), *_default_history(case, model))
    arms += _oracles(case, reading, default)
    mass = future_attention(reading, case.cut.at, [case.cut.at + k for k in case.cut.scored]).mass.cpu()
    judge = Judge(model, case, reading)
    jobs = [(arm, ratio, arm.visible(ratio)) for ratio in ratios for arm in arms]
    rows = []
    for start in range(0, len(jobs), batch):
        some = jobs[start : start + batch]
        for (arm, ratio, visible), result in zip(some, judge.judge(torch.stack([job[2] for job in some])), strict=True):
            kl, nll, dnll, top1 = result
            rows.append(
                Row(
                    trajectory=case.trajectory.id,
                    source=case.trajectory.source,
                    arm=arm.name,
                    ratio=ratio,
                    cut=case.cut.at,
                    kept=int(visible.sum() - arm.forced.sum()),
                    scored=len(case.cut.scored),
                    kl=kl,
                    nll=nll,
                    dnll=dnll,
                    top1=top1,
                    recall=float(mass[visible].sum() / mass.sum()),
                    score_ms=arm.score_ms,
                )
            )
    return rows


def _default_history(case: Case, model: FrozenModel) -> tuple[torch.Tensor, torch.Tensor]:
    """What a method without further forced tokens chooses from, and what always stays."""
    length = case.cut.at + len(case.tokens.generation_prompt)
    prompt = model.parser.parse(case.tokens.ids[:length], 0)
    history = candidates(prompt)
    forced = torch.ones(case.cut.at, dtype=torch.bool)
    forced[history] = False
    return history, forced


def methods_of(names: Sequence[str], heads: Sequence[Path], model: FrozenModel, config: Config) -> dict[str, Method]:
    """Rules by name, and one method for each head, named after its method (and its folder, when two heads have one method).

    Raises:
        ConfigError: an unknown method, or a head that does not fit the model.
    """
    methods = {name: build_method(name, load_config(method=name)) for name in names}
    for folder in heads:
        head = load_head(folder).config
        problem = head.problem(model.shape, config.layer_stride)
        if problem is not None:
            raise ConfigError(problem)
        name = head.method if head.method not in methods else f"{head.method} ({folder.name})"
        methods[name] = build_method(head.method, load_config(method=head.method, head=folder))
    return methods


# ---- Summary ----


class ArmSummary(BaseModel):
    """An arm at one budget: means of its rows, intervals over conversations; the fields are those of :class:`Row`."""

    arm: str
    ratio: float
    n: int
    """Conversations."""
    kl: Interval | None
    nll: float
    dnll: Interval | None
    top1: Interval | None
    recall: Interval | None
    score_ms: float
    """Median."""


class GapClosed(BaseModel):
    """How much of the way from a rule to the best oracle its head goes, in KL."""

    rule: str
    arm: str
    ratio: float
    paired: Interval | None
    """KL of rule + head minus KL of the rule, over trajectories; negative is better."""
    share: float
    """1: as good as the oracle; 0: as the rule."""


class Summary(BaseModel):
    """``summary.json``: where the numbers come from, and the numbers."""

    command: list[str]
    versions: dict[str, str]
    device: str
    model: str
    data_sha256: str
    split: str
    cuts: CutRules
    trajectories: int
    sources: dict[str, int]
    left_out: dict[str, int]
    seed: int
    arms: list[ArmSummary]
    gaps: list[GapClosed]


def summarise(rows: Sequence[Row], seed: int) -> tuple[list[ArmSummary], list[GapClosed]]:
    """Means with bootstrap intervals over trajectories, and what each head gains on its rule."""
    keys = list(dict.fromkeys((row.arm, row.ratio) for row in rows))
    by_key = {key: [row for row in rows if (row.arm, row.ratio) == key] for key in keys}
    arms = [
        ArmSummary(
            arm=arm,
            ratio=ratio,
            n=len(mine),
            kl=bootstrap([row.kl for row in mine], seed),
            nll=statistics.fmean(row.nll for row in mine),
            dnll=bootstrap([row.dnll for row in mine], seed),
            top1=bootstrap([row.top1 for row in mine], seed),
            recall=bootstrap([row.recall for row in mine], seed),
            score_ms=statistics.median(row.score_ms for row in mine),
        )
        for (arm, ratio), mine in by_key.items()
    ]
    gaps = []
    for arm, ratio in keys:
        rule = arm.split("-learned")[0]
        if "-learned" not in arm or (rule, ratio) not in by_key:
            continue
        base, head = by_key[rule, ratio], by_key[arm, ratio]
        best = min(statistics.fmean(row.kl for row in by_key[f"oracle: {name}", ratio]) for name in ORACLES)
        before, after = statistics.fmean(row.kl for row in base), statistics.fmean(row.kl for row in head)
        paired = bootstrap([h.kl - b.kl for h, b in zip(head, base, strict=True)], seed)
        gaps.append(GapClosed(rule=rule, arm=arm, ratio=ratio, paired=paired, share=(before - after) / max(before - best, 1e-9)))
    return arms, gaps


def table_of(arms: Sequence[ArmSummary]) -> Table:
    """For the terminal, best first within each budget."""
    table = Table(box=None)
    for column in ("kept", "arm", "n", "KL [95 %]", "ΔNLL [95 %]", "top-1", "recall"):
        table.add_column(column, justify="left" if column == "arm" else "right", no_wrap=True)
    for arm in sorted(arms, key=lambda a: (a.ratio, a.kl.mean if a.kl else 0.0)):
        if arm.kl and arm.dnll and arm.top1 and arm.recall:
            table.add_row(
                f"{arm.ratio:.0%}",
                arm.arm,
                str(arm.n),
                f"{arm.kl.mean:.3f} [{arm.kl.low:.3f}, {arm.kl.high:.3f}]",
                f"{arm.dnll.mean:+.3f} [{arm.dnll.low:+.3f}, {arm.dnll.high:+.3f}]",
                f"{arm.top1.mean:.3f}",
                f"{arm.recall.mean:.3f}",
            )
    return table


def evaluate(
    cases: Sequence[Case], model: FrozenModel, methods: dict[str, Method], ratios: Sequence[float], batch: int, out: Path
) -> list[Row]:
    """Rows of all cases; each case's are written to ``out/rows.jsonl`` when they are there, and not computed again.

    Args:
        methods: by the name of their arm; the oracles are added.
        ratios: shares of the history that stay.
        batch: keep-sets read at a time.

    Raises:
        ConfigError: ``out`` holds results of other arms.
    """
    file = out / ROWS_FILE
    out.mkdir(parents=True, exist_ok=True)
    rows = [Row.model_validate_json(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    wanted = {(arm, ratio) for arm in [*methods, *(f"oracle: {name}" for name in ORACLES)] for ratio in ratios}
    if {(row.arm, row.ratio) for row in rows} - wanted:
        raise ConfigError(f"{str(out)!r} holds results of other arms; give another folder or delete it.")
    done = {row.trajectory for row in rows}
    for case in tqdm(cases, desc="evaluating", unit="trajectory"):
        if case.trajectory.id in done:
            continue
        fresh = evaluate_case(case, model, methods, ratios, batch)
        with file.open("a", encoding="utf-8") as stream:
            stream.writelines(row.model_dump_json() + "\n" for row in fresh)
        rows += fresh
    return rows


def write_summary(
    rows: Sequence[Row], out: Path, cases: Sequence[Case], left_out: Counter[str], model: FrozenModel, sha: str, split: str, rules: CutRules
) -> Summary:
    """``out/summary.json``."""
    import transformers

    arms, gaps = summarise(rows, seed=0)
    device = torch.cuda.get_device_name() if model.device.type == "cuda" else platform.processor() or platform.machine()
    summary = Summary(
        command=sys.argv,
        versions={"intentkv": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        device=device,
        model=Path(model.name).name,
        data_sha256=sha,
        split=split,
        cuts=rules,
        trajectories=len(cases),
        sources=dict(Counter(case.trajectory.source for case in cases)),
        left_out=dict(left_out),
        seed=0,
        arms=arms,
        gaps=gaps,
    )
    (out / SUMMARY_FILE).write_text(json.dumps(summary.model_dump(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return summary


# ---- Early stopping ----


class NextTurnKL:
    """Held-out KL of a head, for early stopping: features and the past are computed once."""

    def __init__(
        self, cases: Sequence[Case], model: FrozenModel, settings: ExampleSettings, rule: str, feature_set: str, ratios: Sequence[float]
    ) -> None:
        self._ratios = ratios
        self._held: list[tuple[Judge, HeadInputs, Arm]] = []
        for case in tqdm(cases, desc="held-out features", unit="trajectory"):
            reading = model.read(case.tokens.ids, settings.layer_stride)
            turn = _turn_at(session_turns(case.tokens, reading, model, settings), case.cut.at)
            history, forced = _default_history(case, model)
            inputs = head_inputs(turn, history, rule, feature_set, settings)  # type: ignore[arg-type]
            reading.queries = []
            self._held.append((Judge(model, case, reading), inputs, Arm("", inputs.rule, history, forced)))

    def __call__(self, head: ResidualHead) -> Held:
        """Mean KL over cases and ratios."""
        device = next(head.parameters()).device
        found: dict[float, list[float]] = {ratio: [] for ratio in self._ratios}
        for judge, inputs, arm in self._held:
            scores = head.scores(inputs.to(device))
            visible = torch.stack([arm._replace(scores=scores).visible(ratio) for ratio in self._ratios])
            for ratio, result in zip(self._ratios, judge.judge(visible), strict=True):
                found[ratio].append(result[0])
        means = {f"kl_at_{ratio:g}": statistics.fmean(values) for ratio, values in found.items()}
        return Held(statistics.fmean(means.values()), means)
