"""Generates with dynamic RoPE scaling beyond max_position_embeddings in transformers: dynamic_rope.py DIR

Writes a tiny Llama to DIR/model, and to DIR/continuations.json a list of {"prompt", "tokens"} with its greedy
continuations. They use the KV cache. The model is loaded again for each prompt, because dynamic RoPE keeps state.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)
NEW_TOKENS = 40
out = Path(sys.argv[1])
torch.manual_seed(11)
config = LlamaConfig(vocab_size=67, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
                     max_position_embeddings=32, initializer_range=0.15, bos_token_id=None, eos_token_id=None,
                     rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0})
LlamaForCausalLM(config).save_pretrained(out / "model")
results = []
for length in (5, 31, 32, 33, 50):
    prompt = [(7 * i * i + 3 * i + length) % 64 + 3 for i in range(length)]
    model = AutoModelForCausalLM.from_pretrained(out / "model").eval()
    generated = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, use_cache=True, pad_token_id=0)
    results.append({"prompt": prompt, "tokens": generated[0, length:].tolist()})
(out / "continuations.json").write_text(json.dumps(results))
