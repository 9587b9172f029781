"""The residual head: its size, its start, its order-preserving forms, and its folder."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from intentkv.config import ConfigError, load_config
from intentkv.head import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    HeadConfig,
    HeadInputs,
    ModelShape,
    ResidualHead,
    load_head,
    packaged_head,
    save_head,
)
from intentkv.methods import build_method, method_problem

pytestmark = pytest.mark.unit


def shape_of(dim=16, kv_heads=2):
    return ModelShape(model_type="llama", layers=3, query_heads=4, kv_heads=kv_heads, head_dim=dim)


def make_head(feature_set="layered", residual="log", dim=16, rule="assistant", trained=True, seed=0):
    torch.manual_seed(seed)
    head = ResidualHead(HeadConfig(rule=rule, feature_set=feature_set, residual=residual, shape=shape_of(dim)))
    if trained:
        torch.nn.init.normal_(head.output.weight, std=0.5)
        torch.nn.init.normal_(head.output.bias)
    return head


def inputs_of(head, n=30, queries=5, seed=1):
    generator = torch.Generator().manual_seed(seed)
    dim = head.config.shape.head_dim
    extra = torch.randn(n, head.config.extra_features, generator=generator)
    rule = torch.rand(n, generator=generator)
    return HeadInputs(
        torch.randn(n, dim, generator=generator), torch.randn(dim, generator=generator), torch.randn(queries, dim, generator=generator),
        rule, extra,
    )  # fmt: skip


def test_parameters_as_published():
    """methods.md: 214,274 at D = 128. Catches: a bias more or less, another width, statistics that became parameters."""
    head = make_head("published", "additive", dim=128)
    assert sum(p.numel() for p in head.parameters()) == 214_274
    assert all(p.requires_grad for p in head.parameters())


@pytest.mark.parametrize("residual", ["additive", "log"])
@pytest.mark.parametrize("feature_set", ["published", "extended", "layered"])
@pytest.mark.parametrize("dim", [8, 24, 64, 128])
def test_starts_as_the_rule_to_the_bit(dim, feature_set, residual):
    """Catches: an output layer that is not zero, a log form that rounds. Gradients must flow all the same."""
    head = make_head(feature_set, residual, dim, trained=False)
    inputs = inputs_of(head)
    assert torch.equal(head.scores(inputs), inputs.rule)
    batch = inputs.batched()
    head.logits(batch, head.read_out(batch)[0]).square().mean().backward()
    assert head.output.weight.grad.abs().sum() > 0


def test_log_form_orders_as_its_logits():
    """Serving compares scores, training logits. Catches: forms that disagree, a rule of zero that cannot rise."""
    head = make_head()
    inputs = inputs_of(head)
    inputs.rule[:10] = 0
    batch = inputs.batched()
    logits = head.logits(batch, head.read_out(batch)[0])[0]
    scores = head.scores(inputs)
    torch.testing.assert_close(torch.log(scores + head.config.floor), logits, rtol=1e-3, atol=1e-3)
    assert scores[:10].unique().numel() > 1


def test_no_current_query_and_no_candidates():
    head = make_head()
    assert torch.isfinite(head.scores(inputs_of(head, queries=0))).all()
    assert head.scores(inputs_of(head, n=0)).shape == (0,)


def test_padding_says_nothing():
    """A batch of unequal examples gives each what it gives alone. Catches: padded query keys that are attended."""
    head = make_head()
    short, long = inputs_of(head, 12, 3, seed=2), inputs_of(head, 12, 7, seed=3)
    pad = torch.zeros(4, 16)
    batch = HeadInputs(
        torch.stack([short.keys, long.keys]), torch.stack([short.memory, long.memory]),
        torch.stack([torch.cat([short.query_keys, pad + 9]), long.query_keys]), torch.stack([short.rule, long.rule]),
        torch.stack([short.extra, long.extra]), torch.tensor([[False] * 3 + [True] * 4, [False] * 7]),
    )  # fmt: skip
    together, _ = head.read_out(batch)
    for row, alone in zip(together, (short, long), strict=True):
        torch.testing.assert_close(row, head.read_out(alone.batched())[0][0], rtol=1e-4, atol=1e-5)


def test_folder_round_trip(tmp_path):
    head = make_head()
    head.shift.normal_()
    save_head(head, tmp_path / "head")
    loaded = load_head(tmp_path / "head")
    assert loaded.config == head.config
    inputs = inputs_of(head)
    assert torch.equal(loaded.scores(inputs), head.scores(inputs))


def broken(folder, how):
    if how == "no folder":
        return folder / "nowhere"
    if how == "no weights":
        (folder / WEIGHTS_FILE).unlink()
    if how == "weights are text":
        (folder / WEIGHTS_FILE).write_text("no tensors")
    if how == "config is no JSON":
        (folder / CONFIG_FILE).write_text("{")
    if how == "config of something else":
        (folder / CONFIG_FILE).write_text('{"model_type": "llama"}')
    if how == "another schema":
        config = json.loads((folder / CONFIG_FILE).read_text())
        (folder / CONFIG_FILE).write_text(json.dumps(config | {"schema_version": "intentkv-head/9"}))
    if how == "a tensor of another shape":
        weights = load_file(folder / WEIGHTS_FILE)
        save_file(weights | {"key.weight": torch.zeros(3, 3)}, folder / WEIGHTS_FILE)
    if how == "a tensor missing":
        weights = load_file(folder / WEIGHTS_FILE)
        del weights["alpha"]
        save_file(weights, folder / WEIGHTS_FILE)
    return folder


@pytest.mark.parametrize("how", [
    "no folder", "no weights", "weights are text", "config is no JSON", "config of something else", "another schema",
    "a tensor of another shape", "a tensor missing",
])  # fmt: skip
def test_broken_heads_are_one_sentence(tmp_path, how):
    """Catches: a traceback from safetensors, JSON or pydantic; a head loaded in part."""
    save_head(make_head(), tmp_path / "head")
    with pytest.raises(ConfigError) as caught:
        load_head(broken(tmp_path / "head", how))
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize(("change", "word"), [
    ({"head_dim": 32}, "head_dim"), ({"kv_heads": 4}, "kv_heads"), ({"layers": 4}, "layers"), ({"model_type": "qwen3"}, "model_type"),
])  # fmt: skip
def test_another_model_is_refused(change, word):
    config = make_head().config
    assert config.problem(shape_of(), 1) is None
    sentence = config.problem(shape_of().model_copy(update=change), 1)
    assert word in sentence
    assert sentence.endswith(".")
    assert "layer_stride" in config.problem(shape_of(), 2)


def test_a_learned_method_needs_its_head(tmp_path):
    """Start fails with one sentence, before any server. Catches: a server that serves the rule alone in silence."""
    save_head(make_head(rule="assistant"), tmp_path / "head")
    with pytest.raises(ConfigError, match="needs a trained head"):
        load_config(method="assistant-learned")
    with pytest.raises(ConfigError, match="belongs to method 'assistant-learned'"):
        load_config(method="intentkv-learned", head=tmp_path / "head")
    with pytest.raises(ConfigError, match="no readable"):
        load_config(head=tmp_path / "nothing")
    config = load_config(method="assistant-learned", head=tmp_path / "head")
    assert build_method(config.method, config).queries.decode
    assert method_problem("assistant", config) is None


def test_the_default_model_has_its_head(tmp_path, monkeypatch):
    """Catches: a packaged head given to a model it was not trained for."""
    from typer.testing import CliRunner

    from intentkv import cli

    monkeypatch.setattr("intentkv.head.PACKAGED", tmp_path)
    served = []
    monkeypatch.setattr(cli, "_serve", lambda context, model, settings, stock: served.append((model, settings.head)))
    command = ["serve", "--method", "assistant-learned"]
    assert CliRunner().invoke(cli.app, command).exit_code == 2, "there is none yet"
    save_head(make_head(), tmp_path / "assistant-learned")
    assert CliRunner().invoke(cli.app, command).exit_code == 0
    assert served == [(None, tmp_path / "assistant-learned")]
    assert CliRunner().invoke(cli.app, [*command, "--model", "other"]).exit_code == 2


@pytest.mark.parametrize("method", ["assistant-learned", "intentkv-learned"])
def test_heads_of_the_default_model(method):
    """Catches: a head in the package that no longer fits the code's features, or another model."""
    folder = packaged_head(method)
    assert folder is not None
    head = load_head(folder)
    shape = ModelShape(model_type="llama", layers=30, query_heads=9, kv_heads=3, head_dim=64)
    assert head.config.method == method
    assert head.config.problem(shape, layer_stride=1) is None
    assert float(head.output.weight.abs().max()) > 0, "it is untrained"
