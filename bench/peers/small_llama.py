"""Writes the small Llama of the benchmarks, with random weights: small_llama.py OUT_DIR."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(vocab_size=8192, hidden_size=256, intermediate_size=704, num_hidden_layers=4,
                             num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=2048,
                             tie_word_embeddings=False)).save_pretrained(sys.argv[1])
