"""What a head is trained to minimise."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import BaseModel, ConfigDict, Field

from intentkv.head import HeadInputs, ResidualHead
from intentkv_training.labels import Label


class LossWeights(BaseModel):
    """Weight of each term; 0 leaves it out."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    regression: float = Field(default=0.0, ge=0)
    """Huber loss on the logarithm of the label, up to a constant an example: only the order and the ratios matter."""
    listwise: float = Field(default=0.0, ge=0)
    """Cross entropy between the label's distribution over candidates and the softmax of the logits: what is large must be large."""
    bce: float = Field(default=0.0, ge=0)
    """Binary cross entropy of the positives (the published loss's first term)."""
    ranking: float = Field(default=0.0, ge=0)
    """Pairwise margin between positives and the negatives that score highest."""
    retain: float = Field(default=0.0, ge=0)
    """Squared distance of the mean keep probability from ``keep``."""
    memory: float = Field(default=0.0, ge=0)
    """Mean square of the cross-attention read-out."""
    keep: float = Field(default=0.25, gt=0, lt=1)
    """Share of the candidates that counts as positive where the label is no class, and that should be kept."""
    margin: float = Field(default=1.0, gt=0)
    """Of the ranking term, in logits."""


def default_weights(label: Label) -> LossWeights:
    """Weights for a label: the published four terms for the published one, listwise for the others (docs/log.md has the sweep)."""
    if label == "published":
        return LossWeights(bce=1.0, ranking=0.5, retain=0.1, memory=1e-4)
    return LossWeights(listwise=1.0)


@dataclass(frozen=True)
class Batch:
    """B evictions of one step, padded to one number n of candidates."""

    inputs: HeadInputs
    """With a leading dimension B."""
    label: torch.Tensor
    """[B, n] float32: 0 or 1 for the published label, else at least 0."""
    valid: torch.Tensor
    """[B, n] bool: False at padding and at tokens that are left out."""

    def to(self, device: torch.device | str) -> Batch:
        """The same on another device."""
        return Batch(self.inputs.to(device), self.label.to(device), self.valid.to(device))


_HUBER = 1.0
_HARD = 4
"""Negatives a positive in the ranking term."""


def loss_of(head: ResidualHead, read: tuple[torch.Tensor, torch.Tensor], batch: Batch, label: Label, weights: LossWeights) -> torch.Tensor:
    """The weighted loss of a batch: a scalar.

    Args:
        head: its configuration says what a logit is; ``read`` is what it gave for the batch (see :meth:`ResidualHead.read_out`).
    """
    residual, context = read
    logits = head.logits(batch.inputs, residual).float()
    valid = batch.valid
    count = valid.sum(1).clamp_min(1)
    positive = batch.label > 0.5 if label == "published" else _best(batch.label, valid, weights.keep)
    total = logits.new_zeros(())
    if weights.regression:
        wanted = torch.log(batch.label.clamp_min(0) + head.config.floor)
        error = logits - wanted
        shift = (error.masked_fill(~valid, 0).sum(1) / count)[:, None]
        huber = torch.nn.functional.huber_loss(error - shift, torch.zeros_like(error), reduction="none", delta=_HUBER)
        total = total + weights.regression * (huber.masked_fill(~valid, 0).sum(1) / count).mean()
    if weights.listwise:
        share = batch.label.masked_fill(~valid, 0)
        share = share / share.sum(1, keepdim=True).clamp_min(1e-12)
        logp = logits.masked_fill(~valid, float("-inf")).log_softmax(1).masked_fill(~valid, 0)
        total = total - weights.listwise * (share * logp).sum(1).mean()
    if weights.bce:
        bce = torch.nn.functional.binary_cross_entropy_with_logits(logits, positive.float(), reduction="none")
        total = total + weights.bce * (bce.masked_fill(~valid, 0).sum(1) / count).mean()
    if weights.ranking:
        total = total + weights.ranking * _hard_negatives(logits, positive & valid, ~positive & valid, weights.margin)
    if weights.retain:
        kept = torch.sigmoid(logits).masked_fill(~valid, 0).sum(1) / count
        total = total + weights.retain * (kept - weights.keep).square().mean()
    if weights.memory:
        total = total + weights.memory * context.square().mean()
    return total


def _best(label: torch.Tensor, valid: torch.Tensor, share: float) -> torch.Tensor:
    """The top ``share`` of each row's valid entries: [B, n] bool."""
    order = label.masked_fill(~valid, float("-inf")).argsort(1, descending=True)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(label.shape[1], device=label.device).expand_as(order))
    return rank < (share * valid.sum(1, keepdim=True)).ceil()


def _hard_negatives(logits: torch.Tensor, positive: torch.Tensor, negative: torch.Tensor, margin: float) -> torch.Tensor:
    """Mean hinge between each positive and its row's highest-scored negatives."""
    hardest = logits.masked_fill(~negative, float("-inf")).topk(min(_HARD, logits.shape[1]), 1).values
    gap = margin - logits[:, :, None] + hardest[:, None, :]
    pairs = positive[:, :, None] & torch.isfinite(hardest)[:, None, :]
    return gap.clamp_min(0).masked_fill(~pairs, 0).sum() / pairs.sum().clamp_min(1)
