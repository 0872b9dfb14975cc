"""Loads adapters of Tessera's into PEFT, and makes some of PEFT's own.

    peft_adapters.py FOLDER CASES_JSON

FOLDER has base (a Hugging Face folder), ours_I (an adapter), merged_I (a Hugging Face folder) and tokens.safetensors
(tokens, labels that follow them). CASES_JSON: the arguments of LoraConfig of PEFT's own adapter I. Writes
answer_I.safetensors: ours.logits, ours.grad.NAME of every adapter tensor by its name in the file, merged.logits,
theirs.logits, theirs.grad.NAME, and theirs_I, PEFT's adapter with drawn values.
"""

import json
import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)
folder, cases = sys.argv[1], json.loads(sys.argv[2])
given = load_file(f"{folder}/tokens.safetensors")


def base(name="base"):
    return AutoModelForCausalLM.from_pretrained(f"{folder}/{name}", dtype=torch.float32, attn_implementation="eager").eval()


def measure(model, prefix, out):
    logits = model(given["tokens"]).logits
    out[f"{prefix}.logits"] = logits.detach().contiguous()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), given["labels"].flatten(), reduction="sum").backward()
    names = get_peft_model_state_dict(model)
    parameters = dict(model.named_parameters())
    for name in names:
        for inside in (name.replace(".weight", ".default.weight"), name + ".default.weight"):
            if inside in parameters:
                out[f"{prefix}.grad.{name}"] = parameters[inside].grad.contiguous()


for i, case in enumerate(cases):
    out = {}
    measure(PeftModel.from_pretrained(base(), f"{folder}/ours_{i}", is_trainable=True).eval(), "ours", out)
    with torch.no_grad():
        out["merged.logits"] = base(f"merged_{i}")(given["tokens"]).logits.contiguous()
    torch.manual_seed(i)
    theirs = get_peft_model(base(), LoraConfig(task_type="CAUSAL_LM", **case)).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
            elif "magnitude" in name:
                parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(f"{folder}/theirs_{i}")
    measure(theirs, "theirs", out)
    save_file(out, f"{folder}/answer_{i}.safetensors")
