"""A random model of modest size whose every log-probability depends on what attention reads, and a tokenizer for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from intentkv_sglang.vision import ensure_torchvision_imports

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCABULARY = 40960
MARKERS = ("<|im_start|>", "<|im_end|>")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """ChatML markers, one token a byte, and words that no text spells, as many as the model has embeddings."""
    from transformers import PreTrainedTokenizerFast

    spelled = [*MARKERS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = [f"w{number}" for number in range(VOCABULARY - len(spelled))]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(spelled + words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    start, end = MARKERS
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=start, eos_token=end, pad_token=end, model_max_length=8192)


def make_model(folder: Path, seed: int = 0) -> Path:
    """Write a random Qwen3 in bfloat16: 4 layers, 8 query and 2 KV heads of 128.

    Its attention is peaked and outweighs the token's own embedding, so that a wrong key shows in every token: with more than half of a
    prefix dead, reading all of it moves a log-probability by 0.7 in the mean, 5 % of the live keys too many or too few by 0.16 to 0.22,
    and computing in bfloat16 by 0.02 (on a CPU).
    """
    ensure_torchvision_imports()
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, heads, dim = 512, 8, 128
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=dim,
        max_position_embeddings=8192,
        # A tied one would repeat the newest token with certainty, whatever attention reads.
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        model.model.embed_tokens.weight.normal_()
        # Logits then have a standard deviation of 2.
        model.lm_head.weight.normal_(std=2 * hidden**-0.5)
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.fill_(2)
            layer.self_attn.v_proj.weight.normal_(std=hidden**-0.5)
            layer.self_attn.o_proj.weight.normal_(std=2 * (heads * dim) ** -0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
