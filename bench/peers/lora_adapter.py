"""Writes a PEFT LoRA adapter of rank 16 for all linear layers, with random values in both factors.

    lora_adapter.py MODEL_DIR OUT_DIR

Waits for a line on stdin, writes the adapter, and answers {"done": true}.
"""

import json
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

sys.stdin.readline()
torch.manual_seed(0)
model = get_peft_model(AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32),
                       LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
for name, parameter in model.named_parameters():
    if "lora_B" in name:
        torch.nn.init.normal_(parameter, std=0.01)
model.save_pretrained(sys.argv[2])
print(json.dumps({"done": True}), flush=True)
