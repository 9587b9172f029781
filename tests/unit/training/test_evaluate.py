"""The evaluation: hidden means hidden, oracles know best, numbers are what they say."""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest
import torch

from intentkv.config import Config, ConfigError
from intentkv.cuts import CutRules
from intentkv.head import HeadConfig, ModelShape, ResidualHead, load_head, save_head
from intentkv_training.evaluate import (
    ORACLES,
    RULES,
    Arm,
    Judge,
    NextTurnKL,
    Row,
    evaluate,
    find_cases,
    methods_of,
    summarise,
    table_of,
    write_summary,
)
from intentkv_training.examples import ExampleStore

pytestmark = pytest.mark.unit

CUTS = CutRules(window=1000, least_window=300, least_cut=200, least_history=50, least_future=20, future=60)


@pytest.fixture(scope="module")
def settings(example_folder):
    return ExampleStore(example_folder).settings()


@pytest.fixture(scope="module")
def cases(agents, frozen, settings):
    return find_cases([agents], frozen, CUTS, settings, "all", 3)[0]


@pytest.fixture(scope="module")
def head_folder(tmp_path_factory, frozen):
    """An untrained head: it is the rule, to the bit."""
    folder = tmp_path_factory.mktemp("heads") / "head"
    save_head(ResidualHead(HeadConfig(rule="assistant", shape=frozen.shape)), folder)
    return folder


def test_cases_keep_to_their_split(agents, frozen, settings):
    """Catches: training groups in a test set."""
    groups = {}
    for split in ("train", "validation", "test"):
        try:
            found, left_out = find_cases([agents], frozen, CUTS, settings, split, None)
        except ConfigError:
            found, left_out = [], Counter()
        groups[split] = {case.trajectory.group for case in found}
        assert left_out["broken lines"] == 0
    assert groups["train"]
    assert not groups["train"] & groups["test"] & groups["validation"]
    assert sum(map(len, groups.values())) == 4


def test_hidden_is_masked_to_minus_infinity(cases, frozen, tiny_model):
    """Oracle: transformers' own eager attention under an explicit 4-D mask on the whole sequence, where only rows behind the cut differ.

    Catches: positions that move up when others are hidden, a mask off by one, a future that sees itself, predictions of another token.
    """
    from transformers import AutoModelForCausalLM

    case = cases[0]
    cut, ids = case.cut.at, case.tokens.ids
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="eager")
    visible = torch.rand(2, cut, generator=torch.Generator().manual_seed(0)) > 0.5
    visible[1] = True
    found = frozen.predict(frozen.read(ids), ids, cut, visible, case.cut.scored)
    for row, seen in zip(found, visible, strict=True):
        allowed = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        allowed[cut:, :cut] &= seen
        mask = torch.zeros(1, 1, len(ids), len(ids)).masked_fill(~allowed, torch.finfo(torch.float32).min)
        with torch.no_grad():
            logits = model(torch.tensor([ids]), attention_mask=mask, use_cache=False).logits[0]
        expected = logits.log_softmax(-1)[[cut + k - 1 for k in case.cut.scored]]
        torch.testing.assert_close(row, expected, rtol=1e-3, atol=1e-3)


def test_judge(cases, frozen):
    """Everything visible costs nothing; hiding costs what the definitions say."""
    case = cases[0]
    judge = Judge(frozen, case, frozen.read(case.tokens.ids))
    everything = torch.ones(case.cut.at, dtype=torch.bool)
    some = everything.clone()
    some[20:-20:2] = False
    (kl, nll, dnll, top1), pruned = judge.judge(torch.stack([everything, some]))
    assert (kl, dnll, top1) == (pytest.approx(0, abs=1e-5), pytest.approx(0, abs=1e-5), 1)
    ids, scored = case.tokens.ids, case.cut.scored
    full, less = frozen.predict(frozen.read(ids), ids, case.cut.at, torch.stack([everything, some]), scored).double()
    said = torch.tensor([ids[case.cut.at + k] for k in scored])
    rows = torch.arange(len(scored))
    assert nll == pytest.approx(float(-full[rows, said].mean()), rel=1e-4)
    assert pruned[0] == pytest.approx(float((full.exp() * (full - less)).sum(-1).mean()), rel=1e-3)
    assert pruned[2] == pytest.approx(float((full - less)[rows, said].mean()), rel=1e-3, abs=1e-5)
    assert pruned[3] == pytest.approx(float((full.argmax(-1) == less.argmax(-1)).double().mean()))


def test_visible_keeps_the_best_and_the_forced():
    arm = Arm("x", torch.tensor([1.0, 4.0, 2.0, 3.0]), torch.tensor([1, 2, 3, 5]), torch.tensor([True, False, False, False, True, False]))
    assert arm.visible(0.5).tolist() == [True, False, True, False, True, True]
    assert arm.visible(1.0).all()


def test_arms(cases, frozen, head_folder, tmp_path):
    """Catches: arms that keep different numbers, an untrained head that is not its rule, an oracle worse than chance, rows made twice."""
    methods = methods_of(RULES, [head_folder], frozen, Config())
    rows = evaluate(cases[:1], frozen, methods, [0.1, 0.5], 4, tmp_path)
    rows = evaluate(cases[:2], frozen, methods, [0.1, 0.5], 4, tmp_path)
    assert len(rows) == 2 * 2 * (len(RULES) + 1 + len(ORACLES))
    assert len({(r.trajectory, r.arm, r.ratio) for r in rows}) == len(rows)
    by = {(r.trajectory, r.arm, r.ratio): r for r in rows}
    for case in cases[:2]:
        for ratio in (0.1, 0.5):
            rule, head = by[case.trajectory.id, "assistant", ratio], by[case.trajectory.id, "assistant-learned", ratio]
            same = {"arm": "", "score_ms": 0.0}
            assert rule.model_copy(update=same) == head.model_copy(update=same)
            assert rule.kept == by[case.trajectory.id, "oracle: energy", ratio].kept
    mean = {arm: sum(r.recall for r in rows if r.arm == arm) for arm in ("oracle: mass", "random")}
    assert mean["oracle: mass"] > mean["random"]
    summary = write_summary(rows, tmp_path, cases[:2], Counter(), frozen, "sha", "test", CUTS)
    assert [(gap.rule, gap.share) for gap in summary.gaps] == [("assistant", 0.0)] * 2
    assert json.loads((tmp_path / "summary.json").read_text())["trajectories"] == 2
    assert table_of(summary.arms).row_count == 2 * (len(RULES) + 1 + len(ORACLES))
    with pytest.raises(ConfigError, match="other arms"):
        evaluate(cases[:1], frozen, methods_of(["random"], [], frozen, Config()), [0.1], 1, tmp_path)


def row(arm, kl, trajectory):
    values = {"nll": 1.0, "dnll": kl, "top1": 1.0, "recall": 1.0}
    return Row(trajectory=trajectory, source="s", arm=arm, ratio=0.1, cut=9, kept=3, scored=4, kl=kl, **values)


def test_gap_closed():
    """Rule 0.5, best oracle 0.1, head 0.2: three quarters of the way."""
    arms = {"assistant": 0.5, "assistant-learned": 0.2, "oracle: mass": 0.3, "oracle: energy": 0.1, "oracle: value_energy": 0.15}
    summaries, (gap,) = summarise([row(arm, kl + d, t) for t, d in (("a", 0.05), ("b", -0.05)) for arm, kl in arms.items()], seed=0)
    assert gap.share == pytest.approx(0.75)
    assert gap.paired.mean == pytest.approx(-0.3)
    assert gap.paired.low == pytest.approx(gap.paired.high)
    assert {s.arm: s.kl.mean for s in summaries} == pytest.approx(arms)


def test_held_out_kl_is_that_of_the_evaluation(cases, frozen, settings, head_folder, tmp_path):
    """Catches: early stopping that watches something else than what is reported."""
    validate = NextTurnKL(cases[:2], frozen, settings, "assistant", "layered", [0.1, 0.25])
    held = validate(load_head(head_folder))
    rows = evaluate(cases[:2], frozen, methods_of(["assistant"], [], frozen, Config()), [0.1, 0.25], 1, tmp_path)
    kls = [r.kl for r in rows if r.arm == "assistant"]
    assert held.value == pytest.approx(sum(kls) / 4, rel=1e-3)
    assert set(held.metrics) == {"kl_at_0.1", "kl_at_0.25"}
    assert math.isfinite(held.value)


def test_a_head_of_another_model_is_refused(frozen, tmp_path):
    shape = ModelShape(model_type="qwen3", layers=9, query_heads=4, kv_heads=2, head_dim=16)
    save_head(ResidualHead(HeadConfig(rule="assistant", shape=shape)), tmp_path / "head")
    with pytest.raises(ConfigError, match="layers 9"):
        methods_of([], [tmp_path / "head"], frozen, Config())
