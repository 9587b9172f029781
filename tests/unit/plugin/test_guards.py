"""Start-up guards: what is not supported is refused, one sentence each that says what to change; what we launch ourselves is not."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from types import SimpleNamespace

import pytest
from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from sglang.srt.mem_cache.registry import TreeCacheBuildContext
from sglang.srt.model_executor.cuda_graph_config import Backend, CudaGraphConfig, PhaseConfig
from sglang.srt.server_args import ServerArgs

from intentkv.config import Config
from intentkv.head import HeadConfig, ModelShape, ResidualHead, save_head
from intentkv_sglang import compat, guards, plugin
from intentkv_sglang.launcher import server_arguments

pytestmark = pytest.mark.unit

# Guard name -> flags that a user would give. Each goes through SGLang's own parser, so a flag that SGLang renames fails here.
FLAGS = {
    "multi-item scoring": ["--enable-mis"],
    "page size": ["--page-size", "16"],
    "radix cache off": ["--disable-radix-cache"],
    "hierarchical cache": ["--enable-hierarchical-cache"],
    "hierarchical sparse attention": ["--enable-hisparse"],
    "LMCache": ["--enable-lmcache"],
    "FlexKV": ["--enable-flexkv"],
    "unified memory pool": ["--enable-unified-memory"],
    "PD disaggregation": ["--disaggregation-mode", "prefill"],
    "speculative decoding": ["--speculative-algorithm", "EAGLE"],
    "streaming sessions": ["--enable-streaming-session"],
    "session radix cache": ["--enable-session-radix-cache"],
    "stripped thinking cache": ["--strip-thinking-cache"],
    "pipeline parallelism": ["--pp-size", "2"],
    "decode context parallelism": ["--dcp-size", "2"],
    "attention context parallelism": ["--attn-cp-size", "2"],
    "data-parallel attention": ["--enable-dp-attention"],
    "two-batch overlap": ["--enable-two-batch-overlap"],
    "PD multiplexing": ["--enable-pdmux"],
    "data parallelism in one server": ["--dp-size", "2"],
    "embedding models": ["--is-embedding"],
    "diffusion LLM": ["--dllm-algorithm", "LowConfidence"],
    "attention backend": ["--attention-backend", "flex_attention"],
    "different attention backends for prefill and decode": ["--decode-attention-backend", "flashinfer"],
    "full prefill CUDA graphs": ["--cuda-graph-backend-prefill", "full"],
    "block-scaled KV caches": ["--kv-cache-dtype", "nvfp4"],
}


@pytest.fixture(scope="module")
def parse():
    """Command line to parsed arguments, as SGLang reads them before it looks at the model."""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return lambda *flags: parser.parse_args(server_arguments("model", stock=False, extra=list(flags), cpu=True))


def one_sentence(text):
    """A capital, a full stop at the end and none before."""
    return re.fullmatch(r"[A-Z][^.!?\n]*(\.\d[^.!?\n]*)*\.", text.replace("==0.5.17", "")) is not None


def test_nothing_fires_on_what_we_launch(parse):
    assert guards.server_problems(parse()) == []


@pytest.mark.parametrize("name", FLAGS)
def test_each_guard_fires_alone(parse, name):
    """Catches: an attribute that SGLang does not have, so that the guard never fires; a message that does not say what to change."""
    (problem,) = guards.server_problems(parse(*FLAGS[name]))
    assert problem.startswith(f"IntentKV does not support {name}: ")
    assert one_sentence(problem)
    if name != "data parallelism in one server":
        assert FLAGS[name][0] in problem


def test_no_guard_is_left_out():
    assert {guard.name for guard in guards._SERVER_GUARDS} == FLAGS.keys()


@pytest.mark.parametrize("backend", ["triton", "flashinfer", "fa3"])
def test_backends_with_a_live_view(parse, backend):
    """By the one flag, or by both others, which leaves one backend for both phases too."""
    assert guards.server_problems(parse("--attention-backend", backend)) == []
    assert guards.server_problems(parse("--prefill-attention-backend", backend, "--decode-attention-backend", backend)) == []


@pytest.mark.parametrize("flag", ["--prefill-attention-backend", "--decode-attention-backend"])
def test_backends_of_one_phase(parse, flag):
    """SGLang makes one backend of two; the unknown one is named first."""
    problems = guards.server_problems(parse(flag, "flex_attention"))
    assert len(problems) == 2
    assert "--attention-backend torch_native, triton, flashinfer or fa3." in problems[0]
    (problem,) = guards.server_problems(parse(flag, "triton"))
    assert flag in problem


def test_full_prefill_graph_that_sglang_resolved(parse):
    """From --cuda-graph-config, or chosen for an architecture: only SGLang's resolved configuration tells."""
    args = parse()
    args.cuda_graph_config = CudaGraphConfig(prefill=PhaseConfig(backend=Backend.FULL))
    (problem,) = guards.server_problems(args)
    assert "full prefill CUDA graphs" in problem
    args.cuda_graph_config = CudaGraphConfig()
    assert guards.server_problems(args) == []


def test_several_problems_are_all_told(parse):
    assert len(guards.server_problems(parse("--page-size", "16", "--enable-lmcache", "--pp-size", "2"))) == 3


@pytest.mark.parametrize(("variable", "value"), [
    ("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", "1"),
    ("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", "True"),
    ("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "rust"),
])  # fmt: skip
def test_environment(monkeypatch, variable, value):
    assert guards.environment_problems() == []
    monkeypatch.setenv(variable, value)
    (problem,) = guards.environment_problems()
    assert variable in problem
    assert one_sentence(problem)


def test_version(monkeypatch):
    monkeypatch.setattr(compat, "sglang_version", lambda: "0.9.9")
    (problem,) = guards.environment_problems()
    assert "0.9.9" in problem
    assert "INTENTKV_ALLOW_UNTESTED_SGLANG" in problem
    assert problem.endswith(".")
    monkeypatch.setenv("INTENTKV_ALLOW_UNTESTED_SGLANG", "1")
    assert guards.environment_problems() == []


def test_private_signatures(monkeypatch):
    """A private function that was renamed, or lost a parameter, is named."""
    from sglang.srt.mem_cache.unified_cache.components.full_component import FullComponent
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    monkeypatch.setattr(FullComponent, "evict_component", lambda self, node, device_frees, target: None)
    monkeypatch.delattr(UnifiedRadixCache, "cache_unfinished_req")
    problems = compat.signature_problems()
    assert len(problems) == 2
    assert "UnifiedRadixCache.cache_unfinished_req" in problems[0]
    assert "FullComponent.evict_component has no parameter host_frees" in problems[1]


def context(**overrides):
    model = SimpleNamespace(is_encoder_decoder=False, attention_arch=AttentionArch.MHA)
    return SimpleNamespace(**{"is_hybrid_swa": False, "is_hybrid_ssm": False, "is_dsa": False, "model_config": model} | overrides)


@pytest.mark.parametrize("kind", [
    {"is_hybrid_swa": True},
    {"is_hybrid_ssm": True},
    {"is_dsa": True},
    {"model_config": SimpleNamespace(is_encoder_decoder=True)},
    {"model_config": SimpleNamespace(attention_arch=AttentionArch.MLA)},
])  # fmt: skip
def test_models(kind):
    assert guards.context_problems(context()) == []
    (problem,) = guards.context_problems(context(**kind))
    assert one_sentence(problem)


def test_the_context_is_what_sglang_builds():
    """Catches: an attribute that SGLang's context or model configuration does not have, so that a guard never fires."""
    fields = {field.name for field in dataclasses.fields(TreeCacheBuildContext)}
    assert {"is_hybrid_swa", "is_hybrid_ssm", "is_dsa", "model_config", "server_args", "params"} <= fields
    source = inspect.getsource(ModelConfig)
    assert "self.is_encoder_decoder =" in source
    assert "self.attention_arch = AttentionArch.MLA" in source


def test_missing_hooks(monkeypatch):
    """SGLang only logs a hook that fails; here nothing was hooked at all."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    problems = guards.hook_problems()
    assert len(problems) == len(compat.SCHEDULER_HOOKS)
    assert all(one_sentence(p.replace(target, "X")) for p, target in zip(problems, compat.SCHEDULER_HOOKS, strict=True))
    monkeypatch.setattr(HookRegistry, "_patched", set(compat.SCHEDULER_HOOKS[1:]))
    (problem,) = guards.hook_problems()
    assert compat.SCHEDULER_HOOKS[0] in problem


def test_fails_closed(monkeypatch, parse):
    """Decision D1: no cache is built unless every hook is in place, so a server never runs half a plugin."""
    with pytest.raises(guards.GuardError, match="did not apply the hook"):
        plugin.create_cache(context(server_args=parse()))
    with pytest.raises(guards.GuardError, match="page size"):
        plugin.create_cache(context(server_args=parse("--page-size", "16")))
    assert plugin._runtime is None


def test_require_names_the_first():
    guards.require([])
    with pytest.raises(guards.GuardError, match=r"^First\.$"):
        guards.require(["First.", "Second."])


def test_layers_that_are_not_plain_are_refused():
    import torch
    from sglang.srt.layers.radix_attention import RadixAttention

    def model(*layers):
        return torch.nn.ModuleList(layers)

    plain = RadixAttention(4, 8, 0.5, 2, 0)
    assert compat.attention_shape(model(plain, RadixAttention(4, 8, 0.5, 2, 1))) == (4, 8, 0.5)
    for broken, message in (
        (model(), "found 0 kinds"),
        (model(plain, RadixAttention(4, 16, 0.5, 2, 1)), "found 2 kinds"),
        (model(RadixAttention(4, 8, 0.5, 2, 0, logit_cap=30.0)), "logit capping"),
        (model(plain, RadixAttention(4, 8, 0.5, 2, 1, sliding_window_size=128)), "sliding-window or chunked"),
        (model(plain, RadixAttention(4, 8, 0.5, 2, 1, use_irope=True)), "sliding-window or chunked"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            compat.attention_shape(broken)
        assert one_sentence(str(caught.value))


def test_a_backend_without_a_live_view_is_refused():
    """SGLang may choose a backend by itself. Catches: a server whose attention reads dead slots."""

    class Other:
        pass

    class Wrapped:
        sees_live_slots_only = True

    (problem,) = guards.backend_problems(Other())
    assert "Other" in problem
    assert "--attention-backend" in problem
    assert one_sentence(problem)
    assert guards.backend_problems(Wrapped()) == []


def test_a_head_must_fit_the_model_and_the_ranks(tmp_path):
    """Catches: a head that scores another model's keys, or means of ranks that have unequally many heads, in silence."""
    shape = ModelShape(model_type="llama", layers=2, query_heads=4, kv_heads=2, head_dim=8)
    save_head(ResidualHead(HeadConfig(rule="assistant", shape=shape)), tmp_path / "head")
    config = Config(head=tmp_path / "head")
    hf = SimpleNamespace(model_type="llama", num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=32)
    args = SimpleNamespace(tp_size=1, device="cuda", get_model_config=lambda: SimpleNamespace(hf_config=hf))
    assert guards.head_problems(config, args) == []
    assert guards.head_problems(Config(), SimpleNamespace(tp_size=8)) == []
    for args.tp_size in (1, 2, 4):
        assert guards.head_problems(config, args) == [], "4 ranks: a KV head on two of them"
    (ranks,) = guards.head_problems(config, SimpleNamespace(**vars(args) | {"tp_size": 3}))
    assert "--tp-size" in ranks
    # SGLang pads there instead of giving a head to two ranks
    assert guards.head_problems(config, SimpleNamespace(**vars(args) | {"device": "cpu"})) == [ranks.replace("not 3", "not 4")]
    args.tp_size = 1
    hf.num_hidden_layers = 3
    (layers,) = guards.head_problems(config, args)
    assert "layers 2 (the model has 3)" in layers
    assert one_sentence(ranks)
    assert one_sentence(layers)
