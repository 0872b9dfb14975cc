"""Writes the seeds of tests/fuzz/corpus/{safetensors,gguf,gguf_folder}: small files, most of them valid. Run it from
the root of the source tree."""

import shutil

import gguf
import numpy as np
import safetensors.numpy

ROOT = "tests/fuzz/corpus/"

safetensors.numpy.save_file({}, ROOT + "safetensors/empty")
safetensors.numpy.save_file(
    {"a": np.ones((2, 3), np.float32), "b": np.zeros(3, np.bool_), "c": np.full((), 1, np.float16)},
    ROOT + "safetensors/three", metadata={"format": "pt"})

writer = gguf.GGUFWriter(ROOT + "gguf/typed", "llama")
writer.add_custom_alignment(32)
writer.add_bool("flag", True)
writer.add_array("words", ["a", "bc"])
writer.add_array("numbers", [1, -2])
writer.add_float64("ratio", 0.5)
for name, bytes_per_row in (("Q4_1", 20), ("Q8_0", 34), ("Q6_K", 210)):
    writer.add_tensor(name, np.ones((1, bytes_per_row), np.uint8), raw_dtype=gguf.GGMLQuantizationType[name])
writer.add_tensor("F16", np.ones(4, np.float16))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()


def write_model(path, tokenizer, architecture="llama"):
    """Writes a model with one layer. Its tokenizer is byte-level ("gpt2") or SentencePiece ("llama")."""
    hidden, ff, head, vocab = 32, 32, 16, 8
    out = gguf.GGUFWriter(path, architecture)
    out.add_block_count(1)
    out.add_embedding_length(hidden)
    out.add_feed_forward_length(ff)
    out.add_head_count(2)
    out.add_head_count_kv(1)
    out.add_context_length(64)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_freq_base(10000.0)
    out.add_tokenizer_model(tokenizer)
    out.add_token_list(["<unk>", "a", "b", "ab", "c", "<s>", "</s>", "x"])
    out.add_token_types([2 if tokenizer == "llama" else 1, 1, 1, 1, 1, 3, 3, 4])
    if tokenizer == "llama":
        out.add_token_scores([0.0, -1.0, -2.0, -0.5, -3.0, 0.0, 0.0, 0.0])
    else:
        out.add_tokenizer_pre("smollm")
        out.add_token_merges(["a b"])
    out.add_bos_token_id(5)
    out.add_eos_token_id(6)
    out.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    q8 = gguf.GGMLQuantizationType.Q8_0
    matrices = {"token_embd.weight": (vocab, hidden), "blk.0.attn_q.weight": (2 * head, hidden),
                "blk.0.attn_k.weight": (head, hidden), "blk.0.attn_v.weight": (head, hidden),
                "blk.0.attn_output.weight": (hidden, 2 * head), "blk.0.ffn_gate.weight": (ff, hidden),
                "blk.0.ffn_up.weight": (ff, hidden), "blk.0.ffn_down.weight": (hidden, ff)}
    for name, (rows, columns) in matrices.items():
        out.add_tensor(name, np.ones((rows, columns // 32 * 34), np.uint8), raw_dtype=q8)
    for name in ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"):
        out.add_tensor(name, np.ones(hidden, np.float32))
    if architecture == "gemma3":
        out.add_sliding_window(16)
        out.add_uint32("gemma3.attention.sliding_window_pattern", 2)
        out.add_float32("gemma3.rope.freq_base_swa", 500.0)
        out.add_float32("gemma3.final_logit_softcapping", 30.0)
        for name, width in (("attn_q_norm", head), ("attn_k_norm", head), ("post_attention_norm", hidden), ("post_ffw_norm", hidden)):
            out.add_tensor(f"blk.0.{name}.weight", np.ones(width, np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


write_model(ROOT + "gguf_folder/byte_level", "gpt2")
write_model(ROOT + "gguf_folder/sentence_piece", "llama")
write_model(ROOT + "gguf_folder/gemma3", "llama", "gemma3")
for seed in ("byte_level", "sentence_piece"):
    shutil.copy(ROOT + "gguf_folder/" + seed, ROOT + "gguf/" + seed)

with open(ROOT + "safetensors/three", "rb") as file:
    three = file.read()
for name, seed in (("cut_in_header", three[:60]), ("cut_in_data", three[:-3]), ("gap", three.replace(b"[0,24]", b"[0,25]")),
                   ("huge_header", b"\xff" * 8 + three[8:])):
    with open(ROOT + "safetensors/" + name, "wb") as file:
        file.write(seed)
