"""Prints the greedy continuations of prompts by transformers: generate.py MODEL_DIR REQUEST.json

REQUEST is {"prompts": [[ID]], "max_new_tokens": N}. Prints {"continuations": [[ID]]}. With "logits_to": PATH in the
request it also writes the logits of the first prompt to PATH, as safetensors.
"""

import json
import sys

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)  # with several threads on a busy machine, waiting takes longer than computing
directory, request_path = sys.argv[1:]
request = json.load(open(request_path))
model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
continuations = []
with torch.no_grad():
    for prompt in request["prompts"]:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, use_cache=True, pad_token_id=0,
                             max_new_tokens=request["max_new_tokens"])
        continuations.append(out[0, len(prompt):].tolist())
    if "logits_to" in request:
        logits = model(torch.tensor([request["prompts"][0]])).logits
        save_file({"logits": logits.contiguous()}, request["logits_to"])
print(json.dumps({"continuations": continuations}))
