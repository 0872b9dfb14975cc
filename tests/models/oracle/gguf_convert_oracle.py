"""Checks conversions between Hugging Face folders and GGUF with transformers: gguf_convert_oracle.py COMMAND ARGUMENTS

real GGUF DIR
    Tessera has converted GGUF to the folder DIR. Its weights must equal bitwise those that transformers decodes from
    GGUF. Its answer to a chat must be the known answer.
decoded GGUF DIR
    Like real, for a DIR in another dtype, without the chat.
make DIR
    Writes DIR/VARIANT/hf for each variant: a tiny random model with a tokenizer.
same DIR
    Tessera has converted DIR/VARIANT/hf to DIR/VARIANT/model.gguf, and this file to the folder DIR/VARIANT/back.
    transformers must load the same weights from model.gguf, and give the same logits for back as for hf. Prints the
    rope_scaling of each back.
"""

import json
import os
import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

torch.set_num_threads(2)

VARIANTS = {
    "plain": dict(num_key_value_heads=4, tie_word_embeddings=True),
    "biases": dict(num_key_value_heads=2, attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    "llama3": dict(
        num_key_value_heads=1, head_dim=32, tie_word_embeddings=False, max_position_embeddings=512,
        rope_parameters=dict(rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0,
                             high_freq_factor=4.0, original_max_position_embeddings=64)),
    "yarn": dict(
        num_key_value_heads=2, tie_word_embeddings=False, max_position_embeddings=512,
        rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=128)),
    "linear": dict(
        num_key_value_heads=2, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=2.0)),
}
# transformers does not read every key from GGUF and uses its own defaults instead: for the head size of Qwen3, the
# width of Qwen3-MoE's experts, the rotary base of Gemma3's sliding layers and the scale of Gemma3's attention scores.
# The variants therefore have these defaults.
QWEN2S = {
    "qwen2": dict(num_key_value_heads=2, tie_word_embeddings=False),
    "qwen2_yarn": dict(
        num_key_value_heads=4, tie_word_embeddings=True, max_position_embeddings=512,
        rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=128)),
}
QWEN3S = {"qwen3": dict(num_key_value_heads=2, head_dim=128, tie_word_embeddings=True)}
QWEN3_MOES = {"qwen3_moe": dict(num_key_value_heads=2, head_dim=32, num_experts=4, num_experts_per_tok=2,
                                moe_intermediate_size=768, norm_topk_prob=True, tie_word_embeddings=False)}
GEMMA3 = dict(num_key_value_heads=1, head_dim=256, query_pre_attn_scalar=256, sliding_window=16)
GEMMA3S = {
    "gemma3": dict(num_hidden_layers=7, final_logit_softcapping=8.0),
    "gemma3_pattern": dict(
        num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, tie_word_embeddings=False,
        rope_parameters=dict(full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6),
                             sliding_attention=dict(rope_type="default", rope_theta=500.0))),
}
FAMILIES = [(VARIANTS, LlamaConfig, LlamaForCausalLM), (QWEN2S, Qwen2Config, Qwen2ForCausalLM),
            (QWEN3S, Qwen3Config, Qwen3ForCausalLM), (QWEN3_MOES, Qwen3MoeConfig, Qwen3MoeForCausalLM),
            ({name: {**GEMMA3, **changes} for name, changes in GEMMA3S.items()}, Gemma3TextConfig, Gemma3ForCausalLM)]


def load_gguf(gguf):
    folder, name = os.path.split(gguf)
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)


def real(gguf, folder):
    ours = AutoModelForCausalLM.from_pretrained(folder)
    theirs = load_gguf(gguf).state_dict()
    assert ours.dtype == torch.float32 and sorted(ours.state_dict()) == sorted(theirs)
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # The ids below are those that the model's authors publish for this chat.
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert prompt["input_ids"][0, :3].tolist() == [1, 9690, 198] and prompt["input_ids"][0, -3:].tolist() == [520, 9531, 198]
    answer = tokenizer.decode(ours.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1]:])
    assert answer == "The capital of France is Paris.<|im_end|>", answer
    print(f"{len(theirs)} tensors equal")


def decoded(gguf, folder):
    ours, theirs = AutoModelForCausalLM.from_pretrained(folder).state_dict(), load_gguf(gguf).state_dict()
    assert sorted(ours) == sorted(theirs)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name].to(tensor.dtype)), name
    print(f"{len(theirs)} tensors equal")


def make(parent, changes, config_class, model_class):
    folder = parent + "/hf"
    torch.manual_seed(7)
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {"Ġt": 256, "he": 257, "Ġthe": 258, "<s>": 259, "</s>": 260}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("Ġ", "t"), ("h", "e"), ("Ġt", "he")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{{ messages[0]['content'] }}"
    fast.save_pretrained(folder)
    model = model_class(config_class(**{**dict(
        vocab_size=272, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        bos_token_id=259, eos_token_id=260, initializer_range=0.2), **changes}))
    for parameter in model.parameters():  # also norms and biases, which are constant in a new model
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)


def same(parent, changes, config_class, model_class):
    folder, gguf, back = parent + "/hf", parent + "/model.gguf", parent + "/back"
    ids = torch.randint(0, 272, (2, 100), generator=torch.Generator().manual_seed(3))
    original = AutoModelForCausalLM.from_pretrained(folder).eval()
    returned = AutoModelForCausalLM.from_pretrained(back).eval()
    assert returned.dtype == torch.float32
    with torch.no_grad():
        logits = original(ids).logits
        assert logits.std() > 0.1
        torch.testing.assert_close(returned(ids).logits, logits, rtol=2e-5, atol=2e-5)
    loaded = load_gguf(gguf).state_dict()
    for name, tensor in original.state_dict().items():
        if name not in loaded:  # transformers' GGUF reader does not support biases in Llama models
            assert model_class is LlamaForCausalLM and name.endswith(".bias"), name
        elif model_class is Gemma3ForCausalLM and "norm" in name:  # GGUF stores these weights plus 1, in fp32
            torch.testing.assert_close(loaded[name], tensor, rtol=0, atol=1e-6)
        else:
            assert torch.equal(loaded[name], tensor), name
    first, second = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(back)
    text = "the theme\u00e9 </s> 12"
    assert first(text).input_ids == second(text).input_ids and first.chat_template == second.chat_template
    assert (second.bos_token, second.eos_token) == ("<s>", "</s>")
    with open(back + "/config.json") as stream:
        scaling = json.load(stream)["rope_scaling"]
    print(os.path.basename(parent), scaling and scaling["rope_type"])


def each_variant(check):
    def run(folder):
        for variants, *classes in FAMILIES:
            for name, changes in variants.items():
                check(folder + "/" + name, changes, *classes)

    return run


{"real": real, "decoded": decoded, "make": each_variant(make), "same": each_variant(same)}[sys.argv[1]](*sys.argv[2:])
