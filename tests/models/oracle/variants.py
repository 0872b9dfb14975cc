"""Writes tiny random models with transformers, and checks models that Tessera wrote.

variants.py make DIR
    Writes a folder DIR/NAME for each variant, with config.json, model.safetensors and expected.safetensors. The last
    file has tokens [B, T] and for them: logits, loss (the sum over the next-token labels), balance (the load-balancing
    loss of experts, or 0), the gradients of the sum of both losses ("grad:" and the parameter's name), and the greedy
    continuation of the first row's first tokens.
variants.py same DIR
    Checks that transformers loads the same model from DIR/NAME/saved, which Tessera wrote from DIR/NAME, as from
    DIR/NAME. Prints the number of models.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config, Gemma3ForCausalLM, Gemma3ForConditionalGeneration
from transformers import Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

torch.set_num_threads(1)
PROMPT, CONTINUATION = 9, 16
# initializer_range is 0.1. At 0.2 transformers' own fp32 logits differ from its fp64 logits by up to 1.5e-5, so a
# comparison within 1e-5 is impossible. At 0.1 the rounding is well below 1e-5, and every variant still differs from its
# neighbours.
BASE = dict(vocab_size=67, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
            num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.1, tie_word_embeddings=False)
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]


def rope(kind, **values):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, **values}}


def gemma_rope(full, sliding):
    return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


LLAMAS = {
    "plain": {},
    "multi_head": dict(num_key_value_heads=6),
    "one_kv_head": dict(num_key_value_heads=1),
    "biases": dict(attention_bias=True, mlp_bias=True),
    "tied": dict(tie_word_embeddings=True),
    "head_dim": dict(head_dim=16),
    "gelu": dict(hidden_act="gelu_pytorch_tanh"),
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
QWEN2S = {
    "qwen2": {},
    "qwen2_tied": dict(tie_word_embeddings=True, num_key_value_heads=3),
    "qwen2_unused_window": dict(use_sliding_window=False, sliding_window=4, max_window_layers=0),
    "qwen2_window": dict(use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen2_layer_types": dict(use_sliding_window=True, sliding_window=6, layer_types=LAYERS),
    "qwen2_yarn": rope("yarn", factor=4.0, original_max_position_embeddings=16),
}
QWEN3S = {
    "qwen3": dict(head_dim=16),
    "qwen3_biases": dict(head_dim=8, attention_bias=True),
    "qwen3_tied": dict(head_dim=10, tie_word_embeddings=True, num_key_value_heads=1),
    "qwen3_window": dict(head_dim=8, use_sliding_window=True, sliding_window=4, max_window_layers=2),
    "qwen3_layer_types": dict(head_dim=8, use_sliding_window=True, sliding_window=6, layer_types=LAYERS),
}
EXPERTS = dict(head_dim=12, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=28)
MOES = {
    "qwen3_moe": {},
    "qwen3_moe_normed": dict(norm_topk_prob=True, attention_bias=True),
    "qwen3_moe_one": dict(num_experts_per_tok=1, tie_word_embeddings=True),
    "qwen3_moe_all": dict(num_experts_per_tok=6, num_experts=6),
    "qwen3_moe_mlp_only": dict(mlp_only_layers=[1], norm_topk_prob=True),
    "qwen3_moe_step": dict(decoder_sparse_step=2),
    "qwen3_moe_none": dict(decoder_sparse_step=4),
    "qwen3_moe_window": dict(use_sliding_window=True, sliding_window=5, hidden_act="gelu_pytorch_tanh"),
    "qwen3_moe_yarn": rope("yarn", factor=4.0, original_max_position_embeddings=16),
    "qwen3_moe_balanced": dict(output_router_logits=True, router_aux_loss_coef=0.3, norm_topk_prob=True),
}
GEMMA3 = dict(tie_word_embeddings=True, head_dim=12, query_pre_attn_scalar=12, sliding_window=6, layer_types=LAYERS,
              pad_token_id=0, bos_token_id=2, eos_token_id=1)
GEMMA3S = {
    "gemma3": {},
    "gemma3_untied": dict(tie_word_embeddings=False),
    "gemma3_scale": dict(query_pre_attn_scalar=3),
    "gemma3_final_cap": dict(final_logit_softcapping=0.7),
    "gemma3_attention_cap": dict(attn_logit_softcapping=0.3),
    "gemma3_both_caps": dict(attn_logit_softcapping=0.4, final_logit_softcapping=1.5, tie_word_embeddings=False),
    "gemma3_biases": dict(attention_bias=True, num_key_value_heads=6),
    "gemma3_global": dict(layer_types=["full_attention"] * 3),
    "gemma3_local": dict(layer_types=["sliding_attention"] * 3, sliding_window=3),
    "gemma3_bases": gemma_rope(dict(rope_type="default", rope_theta=500.0), dict(rope_type="default", rope_theta=50.0)),
    "gemma3_linear": gemma_rope(dict(rope_type="linear", rope_theta=1000.0, factor=8.0), None),
    "gemma3_pattern": dict(num_hidden_layers=7, layer_types=None),
    "gemma3_silu": dict(hidden_activation="silu"),
}
IMAGES = {"gemma3_with_images": {}, "gemma3_with_images_untied": dict(tie_word_embeddings=False)}
FAMILIES = [(LLAMAS, LlamaConfig, LlamaForCausalLM), (MISTRALS, MistralConfig, MistralForCausalLM),
            (QWEN2S, Qwen2Config, Qwen2ForCausalLM), (QWEN3S, Qwen3Config, Qwen3ForCausalLM),
            ({name: {**EXPERTS, **changes} for name, changes in MOES.items()}, Qwen3MoeConfig, Qwen3MoeForCausalLM),
            ({name: {**GEMMA3, **changes} for name, changes in GEMMA3S.items()}, Gemma3TextConfig, Gemma3ForCausalLM)]


def config_with_images(changes):
    text = {**BASE, **GEMMA3, **changes}
    vision = dict(model_type="siglip_vision_model", hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                  num_attention_heads=1, image_size=28, patch_size=14)
    return Gemma3Config(text_config=text, vision_config=vision, image_token_index=66, boi_token_index=65, eoi_token_index=64,
                        mm_tokens_per_image=4, tie_word_embeddings=text["tie_word_embeddings"])


def logits_of(model, tokens):
    text = model.config.get_text_config()
    # transformers reads attn_logit_softcapping of Gemma3, but does not pass it to attention.
    cap = getattr(text, "attn_logit_softcapping", None)
    return model(tokens, use_cache=False, **({"softcap": cap} if cap else {})).logits


def balance_loss(model, tokens):
    text = model.config.get_text_config()
    if not getattr(text, "output_router_logits", False):
        return 0.0
    return text.router_aux_loss_coef * model(tokens, use_cache=False).aux_loss


@torch.no_grad()
def continue_greedily(model, tokens):
    for _ in range(CONTINUATION):
        tokens = torch.cat([tokens, logits_of(model, tokens)[:, -1:].argmax(-1)], 1)
    return tokens[0, -CONTINUATION:]


def write(folder, model):
    # Biases and norms of new models are constant. Constant values would hide errors, so they are made random.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.eval()
    model.save_pretrained(folder)
    tokens = torch.randint(3, 64, (2, 24))
    logits = logits_of(model, tokens)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    balance = balance_loss(model, tokens)
    (loss + balance).backward()
    expected = {"tokens": tokens, "logits": logits.detach().contiguous(), "loss": loss.detach().reshape(1),
                "balance": torch.as_tensor(balance).detach().reshape(1).float(),
                "continuation": continue_greedily(model, tokens[:1, :PROMPT])}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            expected["grad:" + name] = parameter.grad.contiguous()
    save_file(expected, folder / "expected.safetensors")


def make(out):
    seed = 0
    for variants, config, model in FAMILIES:
        for name, changes in variants.items():
            torch.manual_seed(seed := seed + 1)
            write(out / name, model(config(**{**BASE, **changes}, attn_implementation="eager")))
    for name, changes in IMAGES.items():
        torch.manual_seed(seed := seed + 1)
        write(out / name, Gemma3ForConditionalGeneration._from_config(config_with_images(changes), attn_implementation="eager"))


def load(folder):
    images = AutoConfig.from_pretrained(folder).architectures == ["Gemma3ForConditionalGeneration"]
    kind = Gemma3ForConditionalGeneration if images else AutoModelForCausalLM
    model, loading_info = kind.from_pretrained(folder, output_loading_info=True)
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not loading_info[key], (folder, loading_info)
    return model


def settings(model):
    return {key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"}


def same(out):
    folders = sorted(path for path in out.iterdir() if path.is_dir())
    for folder in folders:
        original, found = load(folder), load(folder / "saved")
        assert type(original) is type(found) and settings(original) == settings(found), folder
        found = found.state_dict()
        assert list(found) == list(original.state_dict()), folder
        for name, tensor in original.state_dict().items():
            assert tensor.dtype == found[name].dtype and torch.equal(tensor, found[name]), (folder, name)
    print(len(folders))


{"make": make, "same": same}[sys.argv[1]](Path(sys.argv[2]))
