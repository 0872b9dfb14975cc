"""Greedy continuations and logits by transformers: generate.py MODEL_DIR REQUEST.json.

REQUEST: {"prompts": [[ids], ...], "max_new_tokens": N}. Prints one JSON object: {"continuations": [[ids], ...]}; with
"logits_to": PATH in the request the logits of the first prompt are written there as safetensors.
"""

import json
import sys

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)  # on a busy machine several threads wait for one another longer than they compute
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
