"""Small models with random weights, saved as vLLM reads them."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

VOCABULARY = 1024


def save_tiny_llama(folder: Path) -> Path:
    """Four layers, four KV heads of 32: 256 KiB of bf16 KV per block of 128 tokens."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, head_dim=32, max_position_embeddings=4096,
        initializer_range=0.06, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    return _save(LlamaForCausalLM, config, folder)


def save_tiny_gemma(folder: Path) -> Path:
    """Gemma 2: every other layer sees a window of 256 tokens."""
    config = Gemma2Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, head_dim=32, max_position_embeddings=4096,
        sliding_window=256, initializer_range=0.06, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return _save(Gemma2ForCausalLM, config, folder)


def _save(kind: Any, config: Any, folder: Path) -> Path:
    torch.manual_seed(7)
    kind(config).to(torch.float32).save_pretrained(folder)
    _save_tokenizer(folder)
    return folder


def _save_tokenizer(folder: Path) -> None:
    words = {"<unk>": 0, "<s>": 1, "</s>": 2}
    words |= {f"w{i}": i for i in range(len(words), VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    fast.save_pretrained(folder)
