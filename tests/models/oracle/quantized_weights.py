"""Writes NF4 weights of bitsandbytes, and a tiny Llama in GGUF with random blocks.

    quantized_weights.py FOLDER

FOLDER/nf4.safetensors has weights (NAME.weight) and what bitsandbytes makes of them: NAME.packed, NAME.absmax and the
dequantized NAME.values; with nested quantization of the scales NAME.twice.absmax and NAME.twice.values.
FOLDER/model.gguf is the Llama with blocks of Q4_K, Q6_K and Q8_0. FOLDER/folder is the same model as a Hugging Face
folder, with the values that the gguf package decodes.
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from bitsandbytes import functional
from safetensors.torch import save_file

folder = Path(sys.argv[1])
torch.manual_seed(7)
out = {}


def decoded(packed, state, absmax, shape):
    """Dequantizes NF4. bitsandbytes' dequantize_4bit gives the same values if each row consists of whole blocks; for
    other rows its values are up to 30 % wrong on CPUs with AVX-512."""
    codes = packed.flatten()
    codes = torch.stack([codes >> 4, codes & 15], 1).flatten().long()
    scales = absmax.repeat_interleave(state.blocksize)[: codes.numel()]
    values = (state.code[codes] * scales).view(shape)
    if shape[1] % state.blocksize == 0:
        assert torch.allclose(values, functional.dequantize_4bit(packed, state), rtol=1e-6, atol=1e-9)
    return values


for name, shape in (("even", (48, 96)), ("large", (512, 320)), ("broken", (6, 48))):
    weight = torch.randn(shape) * 0.02
    out[f"{name}.weight"] = weight
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    out[f"{name}.packed"] = packed.flatten()
    out[f"{name}.absmax"] = state.absmax
    out[f"{name}.values"] = decoded(packed, state, state.absmax, shape)
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    out[f"{name}.twice.absmax"] = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    out[f"{name}.twice.values"] = decoded(packed, state, out[f"{name}.twice.absmax"], shape)
out["code"] = state.code
save_file({key: value.contiguous().clone() for key, value in out.items()}, folder / "nf4.safetensors")

HIDDEN, INNER, HEADS, KV_HEADS, VOCAB, LAYERS = 256, 512, 4, 2, 32, 2
random = np.random.default_rng(7)
Q = gguf.GGMLQuantizationType


def blocks(kind, rows, columns):
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = random.integers(0, 256, (rows * columns // block, size), dtype=np.uint8)
    halves = {Q.Q4_K: (0, 2), Q.Q6_K: (208,), Q.Q8_0: (0,)}[kind]
    scale = {Q.Q4_K: 3e-4, Q.Q6_K: 2e-5, Q.Q8_0: 1e-3}[kind]
    for at in halves:
        data[:, at : at + 2] = (scale * (1 + random.random((len(data), 1)))).astype(np.float16).view(np.uint8)
    return data.reshape(rows, -1)


writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
values = {}


def add(ours, theirs, kind, rows, columns, heads=0):
    data = blocks(kind, rows, columns)
    writer.add_tensor(ours, data, raw_dtype=kind)
    decoded = gguf.quants.dequantize(data, kind).reshape(rows, columns)
    if heads:  # GGUF interleaves the rows of the two halves of a head
        decoded = decoded.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    values[theirs] = torch.from_numpy(np.ascontiguousarray(decoded))


def add_norm(ours, theirs):
    data = (1 + 0.1 * random.standard_normal(HIDDEN)).astype(np.float32)
    writer.add_tensor(ours, data)
    values[theirs] = torch.from_numpy(data)


add("token_embd.weight", "model.embed_tokens.weight", Q.Q8_0, VOCAB, HIDDEN)
add_norm("output_norm.weight", "model.norm.weight")
kv = HIDDEN // HEADS * KV_HEADS
for layer in range(LAYERS):
    ours, theirs = f"blk.{layer}.", f"model.layers.{layer}."
    add_norm(ours + "attn_norm.weight", theirs + "input_layernorm.weight")
    add(ours + "attn_q.weight", theirs + "self_attn.q_proj.weight", Q.Q4_K, HIDDEN, HIDDEN, HEADS)
    add(ours + "attn_k.weight", theirs + "self_attn.k_proj.weight", Q.Q4_K, kv, HIDDEN, KV_HEADS)
    add(ours + "attn_v.weight", theirs + "self_attn.v_proj.weight", Q.Q6_K, kv, HIDDEN)
    add(ours + "attn_output.weight", theirs + "self_attn.o_proj.weight", Q.Q4_K, HIDDEN, HIDDEN)
    add_norm(ours + "ffn_norm.weight", theirs + "post_attention_layernorm.weight")
    add(ours + "ffn_gate.weight", theirs + "mlp.gate_proj.weight", Q.Q4_K, INNER, HIDDEN)
    add(ours + "ffn_up.weight", theirs + "mlp.up_proj.weight", Q.Q8_0, INNER, HIDDEN)
    add(ours + "ffn_down.weight", theirs + "mlp.down_proj.weight", Q.Q6_K, HIDDEN, INNER)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
(folder / "folder").mkdir()
save_file(values, folder / "folder/model.safetensors")
config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
          "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
          "num_key_value_heads": KV_HEADS, "max_position_embeddings": 64, "torch_dtype": "float32",
          "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
(folder / "folder/config.json").write_text(json.dumps(config))
