"""Each loss term against its formula, one row at a time; padding counts for nothing."""

from __future__ import annotations

import pytest
import torch

from intentkv.head import HeadConfig, HeadInputs, ModelShape, ResidualHead
from intentkv_training.losses import Batch, LossWeights, default_weights, loss_of

pytestmark = pytest.mark.unit

N = (9, 6)
"""Valid candidates of the two rows; the rest is padding."""


@pytest.fixture(scope="module")
def head():
    shape = ModelShape(model_type="x", layers=1, query_heads=1, kv_heads=1, head_dim=4)
    return ResidualHead(HeadConfig(rule="assistant", feature_set="published", residual="additive", shape=shape))


@pytest.fixture
def case(head):
    """(batch, residual, context): random, with garbage where it is padding."""
    generator = torch.Generator().manual_seed(0)
    rule, residual = torch.rand(2, 12, generator=generator), torch.randn(2, 12, generator=generator)
    label = torch.rand(2, 12, generator=generator)
    valid = torch.arange(12)[None] < torch.tensor(N)[:, None]
    context = torch.randn(2, 12, 128, generator=generator)
    zeros = torch.zeros(2, 12, 4)
    batch = Batch(HeadInputs(zeros, zeros[:, 0], zeros[:, :0], rule, zeros[..., :0]), label, valid)
    return batch, residual, context


def rows(batch, residual):
    for i, n in enumerate(N):
        yield (batch.inputs.rule + residual)[i, :n].double(), batch.label[i, :n].double()


def value(head, case, label="energy", **weights):
    batch, residual, context = case
    return float(loss_of(head, (residual, context), batch, label, LossWeights(**weights)))


def test_regression(head, case):
    expected = []
    for logits, label in rows(*case[:2]):
        error = logits - torch.log(label + head.config.floor)
        error = (error - error.mean()).abs()
        expected.append(torch.where(error <= 1, error.square() / 2, error - 0.5).mean())
    assert value(head, case, regression=1) == pytest.approx(float(sum(expected) / 2), rel=1e-5)


def test_listwise(head, case):
    expected = [-(label / label.sum() * logits.log_softmax(0)).sum() for logits, label in rows(*case[:2])]
    assert value(head, case, listwise=2) == pytest.approx(float(sum(expected)), rel=1e-5)


def test_bce_and_retain(head, case):
    bce, retain = 0.0, 0.0
    for logits, label in rows(*case[:2]):
        p = torch.sigmoid(logits)
        bce -= float(torch.where(label > 0.5, p.log(), (1 - p).log()).mean()) / 2
        retain += float((p.mean() - 0.25) ** 2) / 2
    assert value(head, case, "published", bce=1) == pytest.approx(bce, rel=1e-5)
    assert value(head, case, "published", retain=1) == pytest.approx(retain, rel=1e-4)


@pytest.mark.parametrize("label_name", ["published", "energy"])
def test_ranking(head, case, label_name):
    """Each positive against the four negatives of its row that score highest."""
    total, pairs = 0.0, 0
    for logits, label in rows(*case[:2]):
        best = -(-len(label) // 4)
        positive = label > 0.5 if label_name == "published" else label >= label.sort(descending=True).values[best - 1]
        hardest = logits[~positive].sort(descending=True).values[:4]
        for p in logits[positive]:
            total += float((1 - p + hardest).clamp_min(0).sum())
            pairs += len(hardest)
    assert value(head, case, label_name, ranking=1) == pytest.approx(total / pairs, rel=1e-5)


def test_defaults_per_label():
    assert default_weights("published").bce > 0
    assert default_weights("value_energy").listwise > 0
