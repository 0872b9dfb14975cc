"""Writes a tiny random Llama with the tokenizer of another folder: tiny_llama.py OUT_DIR TOKENIZER_DIR."""

import shutil
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

out, tokenizer = map(Path, sys.argv[1:])
torch.manual_seed(7)
config = LlamaConfig(vocab_size=49152, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=6,
                     num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False, initializer_range=0.1,
                     bos_token_id=1, eos_token_id=2)
LlamaForCausalLM(config).save_pretrained(out)
for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
    if (tokenizer / name).exists():
        shutil.copy(tokenizer / name, out / name)
