"""Makes random variants of config.json for all model families, and loads them with transformers.

    config_spellings.py DIR SEED COUNT [CASES]

Makes COUNT configurations of tiny models and reads further ones from the file CASES (lines of {"weights", "config"}).
Writes:
    DIR/WEIGHTS/               model folders with the weights that the cases load
    DIR/cases.jsonl            a line per case: {"weights", "config" (a string)}, with "row" (of logprobs) and
                               "dtype" (may be empty), or with "error"
    DIR/expected.safetensors   tokens [1, T] and logprobs [rows, T, V]
A case has an "error" if transformers refuses the configuration, does not find all weights, or gives logits that are not
finite.
"""

import copy
import json
import random
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config, Gemma3TextConfig, LlamaConfig, MistralConfig
from transformers import Qwen2Config, Qwen3Config, Qwen3MoeConfig
from transformers.utils import logging

torch.set_num_threads(1)
logging.set_verbosity(logging.CRITICAL)
logging.disable_progress_bar()
LENGTH, VOCABULARY, LAYERS = 24, 67, 3
DROP = object()
BASE = dict(vocab_size=VOCABULARY, hidden_size=48, intermediate_size=80, num_hidden_layers=LAYERS, num_attention_heads=4,
            num_key_value_heads=2, head_dim=12, max_position_embeddings=64, initializer_range=0.1)
GEMMA3 = dict(query_pre_attn_scalar=12, sliding_window=6, pad_token_id=0, bos_token_id=2, eos_token_id=1)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=28)
VISION = dict(model_type="siglip_vision_model", hidden_size=8, intermediate_size=8, num_hidden_layers=1,
              num_attention_heads=1, image_size=28, patch_size=14)

# For each family: its configuration class, and the keys with which its weights are made. `full` weights have biases and
# an untied head; `lean` weights have neither.
FAMILIES = {
    "llama": (LlamaConfig, dict(attention_bias=True, mlp_bias=True)),
    "mistral": (MistralConfig, dict(sliding_window=5)),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, dict(attention_bias=True)),
    "qwen3_moe": (Qwen3MoeConfig, dict(attention_bias=True, **EXPERTS)),
    "gemma3_text": (Gemma3TextConfig, dict(attention_bias=True, **GEMMA3)),
    "gemma3": (Gemma3Config, dict(attention_bias=True, **GEMMA3)),
}


def config_of(family, changes):
    kind, own = FAMILIES[family]
    text = {**BASE, **own, **changes}
    if family != "gemma3":
        return kind(**text)
    tied = text["tie_word_embeddings"]
    return kind(text_config=text, vision_config=VISION, image_token_index=66, boi_token_index=65, eoi_token_index=64,
                mm_tokens_per_image=4, tie_word_embeddings=tied)


def write_weights(out):
    seed = 0
    for family in FAMILIES:
        for name, changes in {"full": dict(tie_word_embeddings=False),
                              "lean": dict(tie_word_embeddings=True, attention_bias=False, mlp_bias=False)}.items():
            torch.manual_seed(seed := seed + 1)
            model = AutoModelForCausalLM.from_config(config_of(family, changes), dtype=torch.float32)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim == 1:
                        parameter.add_(torch.randn_like(parameter) * 0.3)
            model.save_pretrained(out / f"{family}-{name}")


# Random configurations.

WRONG = [None, DROP, "x", [], {}, True, -1, 0, 1.5]
ROPE_TYPES = ["default", "linear", "dynamic", "yarn", "llama3"] * 4 + ["longrope", "su", "mrope", "proportional", None, 7]


class Draws(random.Random):
    """Random choices of one case. `care` is the share of values that are chosen from likely valid ones."""
    care = 0.9


def often(rng, *likely):
    return rng.choice(likely) if rng.random() < rng.care else rng.choice(WRONG)


def flag(rng):
    return rng.choice([True, False]) if rng.random() < rng.care else rng.choice([None, DROP, 1, 0, "true", [], {}])


def seldom(rng, usual, *others):
    return usual if rng.random() < rng.care / 2 else rng.choice(others)


def draw_rope(rng):
    """Returns a dict of RoPE settings, most of the time with all required keys."""
    kind = rng.choice(ROPE_TYPES)
    out = {}
    for key in rng.choice([["rope_type"], ["rope_type"], ["type"], ["rope_type", "type"], []]):
        out[key] = kind if rng.random() < 0.85 else rng.choice(ROPE_TYPES)
    keys = {"rope_theta": lambda: often(rng, 500.0, 10000, 1e6), "factor": lambda: often(rng, 2, 4.0, 8.0, 1, 0.5)}
    if kind in ("yarn", "llama3") or rng.random() < 0.15:
        keys["original_max_position_embeddings"] = lambda: often(rng, 8, 16, 32, 64, 16.0)
    if kind == "llama3" or rng.random() < 0.1:
        keys |= {"low_freq_factor": lambda: often(rng, 1.0, 1, 2), "high_freq_factor": lambda: often(rng, 4.0, 4, 8)}
    if kind == "yarn" or rng.random() < 0.1:
        optional = {"attention_factor": lambda: often(rng, 1.7, 0.5, 1, 0.0), "beta_fast": lambda: often(rng, 8.0, 32, 4),
                    "beta_slow": lambda: often(rng, 2.0, 1), "mscale": lambda: often(rng, 0.7, 1.0, 0),
                    "mscale_all_dim": lambda: often(rng, 1.3, 1.0, 0), "truncate": lambda: flag(rng)}
        keys |= {key: optional[key] for key in rng.sample(sorted(optional), rng.randint(0, 4))}
    if rng.random() < 0.08:
        keys["partial_rotary_factor"] = lambda: often(rng, 1.0, 1, 0.5)
    if rng.random() < 0.05:
        keys["a_key_of_nobody"] = lambda: 3
    for key, draw in keys.items():
        if rng.random() < (0.6 if key == "rope_theta" else 0.93):
            value = draw()
            if value is not DROP:
                out[key] = value
    return out


def draw_rope_field(rng, nested):
    chance = rng.random()
    if chance < 0.2:
        return rng.choice([None, {}, DROP, None, {}, DROP, [], "", 0, False, "linear", [1], 3])
    if chance < 0.2 + nested:
        out = {}
        for kind in ("full_attention", "sliding_attention"):
            if rng.random() < 0.85:
                out[kind] = draw_rope(rng) if rng.random() < 0.85 else rng.choice([None, {}, "x", []])
        if rng.random() < 0.1:
            out |= draw_rope(rng)
        return out
    return draw_rope(rng)


def draw_layer_types(rng):
    kinds = ["full_attention", "sliding_attention"]
    if rng.random() < 0.65:
        return [rng.choice(kinds) for _ in range(LAYERS)]
    return rng.choice([None, DROP, [], ["full_attention"] * LAYERS, ["sliding_attention"] * LAYERS, ["full_attention"] * 2,
                       ["attention"] * LAYERS, ["attention", "sliding_attention", "full_attention"], ["mamba"] * LAYERS,
                       ["chunked_attention"] * LAYERS, "full_attention", [1, 2, 3], [None] * LAYERS, {}])


def common_keys(rng, family):
    windows = {"sliding_window": lambda: often(rng, 3, 5, 64, 5.0, None, 1)}
    layers = {"layer_types": lambda: draw_layer_types(rng)}
    switch = {"use_sliding_window": lambda: flag(rng), "max_window_layers": lambda: often(rng, 0, 1, 2, 3, 28)}
    out = {
        "rope_theta": lambda: often(rng, 500.0, 10000, 1e6, 0.5),
        "rope_scaling": lambda: draw_rope_field(rng, 0.05),
        "rope_parameters": lambda: draw_rope_field(rng, 0.7 if family.startswith("gemma3") else 0.07),
        "max_position_embeddings": lambda: often(rng, 8, 16, 23, 24, 64),
        "original_max_position_embeddings": lambda: often(rng, 8, 16, 64, 16.0),
        "partial_rotary_factor": lambda: often(rng, 1.0, 1, 0.5),
        "rms_norm_eps": lambda: often(rng, 1e-6, 1e-5, 0.1),
        "head_dim": lambda: often(rng, 12, 12, 12, 8),
        "num_key_value_heads": lambda: often(rng, 2, 2, 2, 4, 3, "2"),
        "num_attention_heads": lambda: often(rng, 4, 4, 4, 2, 3, 4.0),
        "num_hidden_layers": lambda: seldom(rng, 3, 2, 1, 4, 3.0, "3", None, True, 0),
        "vocab_size": lambda: seldom(rng, 67, 66, 68, 67.0, "67", None),
        "hidden_size": lambda: seldom(rng, 48, 24, 48.0, "48", None),
        "intermediate_size": lambda: seldom(rng, 80, 40, 80.0, "80", None),
        "hidden_act": lambda: often(rng, "silu", "swish", "gelu_pytorch_tanh", "gelu", "relu", "gelu_new", ""),
        "attention_bias": lambda: flag(rng),
        "tie_word_embeddings": lambda: flag(rng),
        "attention_dropout": lambda: often(rng, 0.0, 0, 0.1),
        "initializer_range": lambda: often(rng, 0.02, 0.5, 1.0),
        "dtype": lambda: often(rng, "float32", "bfloat16", "float16", "float64", "float", "half", "torch.bfloat16", "auto",
                               "int8", None),
        "torch_dtype": lambda: often(rng, "float32", "bfloat16", "float16", "double", "torch.float16", None),
        "architectures": lambda: rng.choice([[rng.choice(ARCHITECTURES)], None, [], DROP, "LlamaForCausalLM", [1],
                                             [architecture(family), "Another"], ["LlamaModel"], {}]),
        "model_type": lambda: rng.choice([family, family, rng.choice(list(FAMILIES)), DROP, None, "ministral", "phi3", 3]),
        "is_causal": lambda: rng.choice([True, False, None, DROP, 1]),
        "quantization_config": lambda: rng.choice([None, {}, {"quant_method": "gptq", "bits": 4}, {"load_in_4bit": True}, [], "x"]),
        "per_layer_config": lambda: rng.choice([None, {}, {"0": {"rms_norm_eps": 0.1}}, {"1": {"sliding_window": 3}}]),
        "transformers_weights": lambda: rng.choice([None, "model.safetensors", "other.safetensors"]),
        "configuration_files": lambda: rng.choice([None, [], ["config.json"], ["config.4.0.0.json"]]),
        "text_config": lambda: rng.choice([None, {}, {"hidden_size": 8}]),
        "bos_token_id": lambda: rng.choice([None, 1, 66, -1, 500, DROP, [1], "1"]),
        "eos_token_id": lambda: rng.choice([None, 1, [1, 2], [], -1, 500, DROP, "1"]),
        "pad_token_id": lambda: rng.choice([None, 0, 66, -1, 500, DROP, "0"]),
        "pretraining_tp": lambda: rng.choice([1, 2, None, "1"]),
        "use_cache": lambda: flag(rng),
        "auto_map": lambda: rng.choice([None, {}, {"AutoModel": "modeling.X"}, []]),
        "id2label": lambda: rng.choice([None, {}, {"0": "a", "1": "b"}]),
        "num_labels": lambda: rng.choice([None, 2, 3]),
        "transformers_version": lambda: rng.choice(["4.37.0", "5.0.0", None]),
        "return_dict": lambda: rng.choice([True, None]),
        "torchscript": lambda: rng.choice([True, False, None]),
        "chunk_size_feed_forward": lambda: rng.choice([0, 1, None]),
        "output_hidden_states": lambda: rng.choice([True, False, None]),
        "_attn_implementation": lambda: rng.choice(["eager", "sdpa", None]),
        "attn_implementation": lambda: rng.choice(["eager", "sdpa", None]),
        **windows, **layers, **switch,
    }
    if family == "llama":
        out["mlp_bias"] = lambda: flag(rng)
    if family == "qwen3_moe":
        out |= {"num_experts": lambda: often(rng, 4, 4, 2, 5, 0, "4"), "num_local_experts": lambda: often(rng, 4, 4, 2, 0),
                "num_experts_per_tok": lambda: often(rng, 1, 2, 3, 4, 5), "norm_topk_prob": lambda: flag(rng),
                "decoder_sparse_step": lambda: often(rng, 1, 2, 4), "mlp_only_layers": lambda: rng.choice(
                    [[], [0], [1, 2], [0, 1, 2], [7], None, DROP, "0", 0, [-1], ["0"]]),
                "moe_intermediate_size": lambda: often(rng, 28, 28, 20), "output_router_logits": lambda: flag(rng),
                "router_aux_loss_coef": lambda: often(rng, 0.1, 0)}
    if family.startswith("gemma3"):
        out |= {"hidden_activation": lambda: often(rng, "gelu_pytorch_tanh", "silu", "gelu", "relu"),
                "query_pre_attn_scalar": lambda: often(rng, 12, 3, 256, 7.5),
                "final_logit_softcapping": lambda: often(rng, 1.5, 30, None),
                "attn_logit_softcapping": lambda: often(rng, 0.5, 30.0, None),
                "use_bidirectional_attention": lambda: flag(rng),
                "rope_local_base_freq": lambda: often(rng, 50.0, 10000, None),
                "sliding_window_pattern": lambda: often(rng, 1, 2, 3, 6),
                "_sliding_window_pattern": lambda: often(rng, 1, 2, 6)}
    return out


ARCHITECTURES = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM",
                 "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"]


def architecture(family):
    return dict(zip(FAMILIES, ARCHITECTURES))[family]


# Keys that are drawn more often than others, because they have several spellings.
LIKELY = ["rope_theta", "rope_scaling", "rope_parameters", "rope_scaling", "rope_parameters", "max_position_embeddings",
          "original_max_position_embeddings", "layer_types", "sliding_window", "use_sliding_window", "tie_word_embeddings",
          "num_experts", "num_local_experts", "rope_local_base_freq", "sliding_window_pattern", "dtype", "torch_dtype"]


def put(target, key, value):
    if value is DROP:
        target.pop(key, None)
    else:
        target[key] = copy.deepcopy(value)


def draw_case(rng):
    rng.care = rng.choice([0.97, 0.97, 0.75])
    family = rng.choice(list(FAMILIES))
    name = rng.choice(["full", "lean"])
    own = dict(FAMILIES[family][1])
    text = {**BASE, **own, "tie_word_embeddings": name == "lean"}
    if name == "lean":
        text |= {"attention_bias": False, "mlp_bias": False} if "attention_bias" in own else {}
    top = {"architectures": [architecture(family)], "model_type": family}
    if family == "gemma3":
        config = {**top, "text_config": text, "vision_config": VISION, "image_token_index": 66, "boi_token_index": 65,
                  "eoi_token_index": 64, "mm_tokens_per_image": 4, "tie_word_embeddings": name == "lean"}
        text["model_type"] = "gemma3_text"
    else:
        config = text
        config |= top
    draws = common_keys(rng, family)
    likely = [key for key in LIKELY if key in draws]
    for _ in range(rng.randint(1, 5)):
        key = rng.choice(likely) if rng.random() < 0.6 else rng.choice(sorted(draws))
        target = config["text_config"] if family == "gemma3" and rng.random() < 0.8 else config
        if isinstance(target, dict):
            put(target, key, draws[key]())
        if not isinstance(config.get("text_config", {}), dict):
            break
    return {"weights": f"{family}-{name}", "config": json.dumps(config)}


# The result of transformers for each case.

class Oracle:
    def __init__(self, out):
        self.out, self.rows, self.row_of_config = out, [], {}
        self.tokens = torch.randint(3, 64, (1, LENGTH), generator=torch.Generator().manual_seed(7))

    def run(self, case):
        folder = self.out / "drawn"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(case["config"])
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            config._name_or_path = ""
            dtype = getattr(config, "dtype", None)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"dtype {dtype}")
            key = json.dumps([case["weights"], type(config).__name__, config.to_dict(), config.__dict__], sort_keys=True, default=str)
            if key not in self.row_of_config:
                self.row_of_config[key] = self.logprobs(case["weights"], config)
            return {"row": self.row_of_config[key], "dtype": str(dtype or "").removeprefix("torch.")}
        except Exception as error:  # any exception of transformers means that it refuses the case
            return {"error": f"{type(error).__name__}: {error}"[:200]}

    @torch.no_grad()
    def logprobs(self, weights, config):
        model, notes = AutoModelForCausalLM.from_pretrained(self.out / weights, config=config, dtype=torch.float32,
                                                            output_loading_info=True, trust_remote_code=False,
                                                            attn_implementation="eager")
        if notes["missing_keys"] or notes["mismatched_keys"]:
            raise ValueError(f"missing {sorted(notes['missing_keys'])[:2]} {sorted(notes['mismatched_keys'])[:2]}")
        model.eval()
        text = model.config.get_text_config()
        # transformers reads attn_logit_softcapping of Gemma3, but does not pass it to attention. Tessera applies it.
        cap = getattr(text, "attn_logit_softcapping", None) if "gemma3" in weights else None
        logits = model(self.tokens, use_cache=False, return_dict=True, **({"softcap": cap} if cap else {})).logits
        values = torch.log_softmax(logits.double(), -1).float()[0]
        if not torch.isfinite(values).all():
            raise ValueError("logits that are not finite")
        self.rows.append(values)
        return len(self.rows) - 1


def main(out, seed, count, cases_file):
    write_weights(out)
    rng = Draws(seed)
    cases = [json.loads(line) for line in Path(cases_file).read_text().splitlines() if line.strip()] if cases_file else []
    cases += [draw_case(rng) for _ in range(count)]
    oracle = Oracle(out)
    with open(out / "cases.jsonl", "w") as file:
        for case in cases:
            file.write(json.dumps({**case, **oracle.run(case)}) + "\n")
    save_file({"tokens": oracle.tokens, "logprobs": torch.stack(oracle.rows)}, out / "expected.safetensors")
    print(len(cases), len(oracle.rows))


main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else "")
