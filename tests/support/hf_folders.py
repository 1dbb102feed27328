"""Tiny Hugging Face models in folders of their own, with their tokenizers beside them."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.tokenization import Tokenizer


def write_model(folder: Path, tokenizer: Tokenizer, *, seed: int = 0, width: int = 32) -> Path:
    """Write a randomly initialised model of two layers and its tokenizer; return the folder."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.vocab_size,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            initializer_range=0.2,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    model.save_pretrained(folder)
    (folder / tokenizer.file_name).write_bytes(tokenizer.file_bytes)
    return folder
