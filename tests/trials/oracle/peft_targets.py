"""Finds the modules that PEFT adapts for values of target_modules, and writes an adapter in all file formats of PEFT.

    peft_targets.py FOLDER CASES_JSON

FOLDER/base is the base model. CASES_JSON is a list of values of target_modules. FOLDER/targets.json gets a list of
modules for each value, or null if PEFT refuses the value. The script also writes one adapter to three folders: safe
(adapter_model.safetensors), zip (adapter_model.bin) and legacy (adapter_model.bin in the format of torch.save before
1.6).
"""

import json
import os
import shutil
import sys

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoModelForCausalLM

folder, cases = sys.argv[1], json.loads(sys.argv[2])


def base():
    return AutoModelForCausalLM.from_pretrained(f"{folder}/base", dtype=torch.float32)


found = []
for case in cases:
    try:
        model = get_peft_model(base(), LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=case))
        names = {name.split(".lora_")[0] for name in get_peft_model_state_dict(model)}
        found.append(sorted(name.removeprefix("base_model.model.") for name in names))
    except ValueError:
        found.append(None)
json.dump(found, open(f"{folder}/targets.json", "w"))

model = get_peft_model(base(), LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "down_proj"]))
torch.manual_seed(1)
with torch.no_grad():
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.normal_(0, 0.2)
model.save_pretrained(f"{folder}/safe")
state = get_peft_model_state_dict(model)
for name, zipped in (("zip", True), ("legacy", False)):
    os.mkdir(f"{folder}/{name}")
    shutil.copy(f"{folder}/safe/adapter_config.json", f"{folder}/{name}")
    torch.save(state, f"{folder}/{name}/adapter_model.bin", _use_new_zipfile_serialization=zipped)
