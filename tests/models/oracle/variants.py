"""Writes tiny random models of transformers, with tokens and their logits: variants.py OUT_DIR.

Each variant is a folder OUT_DIR/NAME with config.json, model.safetensors and expected.safetensors: tokens [B, T], logits, and
loss (the sum over the next-token labels).
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

# initializer_range: at 0.2 the fp32 logits of transformers are themselves up to 1.5e-5 off its fp64 ones, which leaves no room
# for a comparison within 1e-5; at 0.1 rounding is well below it and every variant still differs from its neighbours.
BASE = dict(vocab_size=67, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
            num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1, tie_word_embeddings=False)


def rope(kind, **values):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, **values}}


LLAMAS = {
    "plain": {},
    "multi_head": dict(num_key_value_heads=6),
    "one_kv_head": dict(num_key_value_heads=1),
    "biases": dict(attention_bias=True, mlp_bias=True),
    "tied": dict(tie_word_embeddings=True),
    "head_dim": dict(head_dim=16),
    "theta": rope("default"),
    "linear": rope("linear", factor=3.0),
    "dynamic": dict(max_position_embeddings=16, **rope("dynamic", factor=2.5)),
    "dynamic_short": rope("dynamic", factor=2.5),
    "yarn": rope("yarn", factor=4.0, original_max_position_embeddings=16),
    "yarn_mscale": rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=1.3, beta_fast=8.0,
                        beta_slow=2.0, truncate=False),
    "yarn_attention_factor": rope("yarn", factor=4.0, original_max_position_embeddings=16, attention_factor=1.7),
    "llama3": rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
}
MISTRALS = {
    "mistral": dict(sliding_window=None),
    "mistral_window": dict(sliding_window=5),
    "mistral_tied": dict(sliding_window=7, tie_word_embeddings=True, head_dim=12),
}


def write(out, name, model):
    # Biases and norms of fresh models are 0 and 1, which would hide mistakes with them.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.eval()
    model.save_pretrained(out / name)
    tokens = torch.randint(0, model.config.vocab_size, (2, 24))
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    save_file({"tokens": tokens, "logits": logits.contiguous(), "loss": loss.reshape(1)}, out / name / "expected.safetensors")


def main():
    out = Path(sys.argv[1])
    for seed, (name, changes) in enumerate({**LLAMAS, **MISTRALS}.items()):
        torch.manual_seed(seed)
        config, model = (MistralConfig, MistralForCausalLM) if name in MISTRALS else (LlamaConfig, LlamaForCausalLM)
        write(out, name, model(config(**{**BASE, **changes}, attn_implementation="eager")))


main()
