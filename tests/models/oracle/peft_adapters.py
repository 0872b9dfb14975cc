"""Loads adapters that Tessera wrote into PEFT, and writes adapters with PEFT.

    peft_adapters.py FOLDER CASES_JSON

FOLDER has the base model in base, and tokens.safetensors with tokens and labels. CASES_JSON is a list of arguments of
PEFT's LoraConfig. For case I, FOLDER also has ours_I, an adapter, and merged_I, the base model with this adapter merged
into its weights; Tessera wrote both.

For each case the script writes theirs_I, an adapter of PEFT with random values, and answer_I.safetensors: the logits
and the adapter gradients of ours_I (ours.logits, ours.grad.NAME) and of theirs_I (theirs.logits, theirs.grad.NAME), and
the logits of merged_I (merged.logits).
"""

import json
import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)
folder, cases = sys.argv[1], json.loads(sys.argv[2])
inputs = load_file(f"{folder}/tokens.safetensors")


def load_base(name="base"):
    return AutoModelForCausalLM.from_pretrained(f"{folder}/{name}", dtype=torch.float32, attn_implementation="eager").eval()


def measure(model, prefix, out):
    logits = model(inputs["tokens"]).logits
    out[f"{prefix}.logits"] = logits.detach().contiguous()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten(), reduction="sum").backward()
    names = get_peft_model_state_dict(model)
    parameters = dict(model.named_parameters())
    for name in names:
        for parameter_name in (name.replace(".weight", ".default.weight"), name + ".default.weight"):
            if parameter_name in parameters:
                out[f"{prefix}.grad.{name}"] = parameters[parameter_name].grad.contiguous()


for i, case in enumerate(cases):
    out = {}
    measure(PeftModel.from_pretrained(load_base(), f"{folder}/ours_{i}", is_trainable=True).eval(), "ours", out)
    with torch.no_grad():
        out["merged.logits"] = load_base(f"merged_{i}")(inputs["tokens"]).logits.contiguous()
    torch.manual_seed(i)
    theirs = get_peft_model(load_base(), LoraConfig(task_type="CAUSAL_LM", **case)).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
            elif "magnitude" in name:
                parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(f"{folder}/theirs_{i}")
    measure(theirs, "theirs", out)
    save_file(out, f"{folder}/answer_{i}.safetensors")
