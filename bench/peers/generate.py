"""Greedy generation by transformers: the peer of bench/generate_bench.cc.

    generate.py MODEL_DIR DTYPE MODE

DTYPE is float32 or bfloat16, the dtype of the model. MODE is one of:
    generate                       calls model.generate(), as users do
    loop                           calls the model with its KV cache in a minimal loop
    float32, bfloat16, int8, int4  like loop, with weights rounded as by `tessera generate --dtype`; gives the
                                   tokens that our engine must generate

A request is {"prompts": [[ID]], "new": N}, with prompts of equal length. The answer is {"prompt_seconds",
"decode_seconds", "tokens": [[ID]]}: the time until every sequence has its first new token, the time from then to the
last token, and the tokens.
"""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging


def round_to_int8(weight):
    """Rounds to 8 bits with a scale per row."""
    step = weight.abs().amax(1, keepdim=True) / 127
    return (weight / step.where(step > 0, 1)).round().clamp(-127, 127) * step


def round_to_int4(weight):
    """Rounds to 4 bits with a scale and a minimum per block of 32."""
    blocks = weight.unflatten(1, (-1, 32))
    minimum = blocks.amin(2, keepdim=True)
    step = ((blocks.amax(2, keepdim=True) - minimum) / 15).half().float()
    minimum = minimum.half().float()
    codes = ((blocks - minimum) / step.where(step > 0, 1)).round().clamp(0, 15)
    return (codes * step + minimum).flatten(1)


@torch.no_grad()
def round_weights(model, mode):
    if mode == "bfloat16":
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    if mode not in ("int8", "int4"):
        return
    model.lm_head.weight = torch.nn.Parameter(round_to_int8(model.lm_head.weight))  # a copy: the tied embedding stays
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.weight.copy_((round_to_int8 if mode == "int8" else round_to_int4)(module.weight))


@torch.inference_mode()
def generate_in_loop(model, prompts, new):
    cache = DynamicCache(config=model.config)
    new_tokens, begin = [], time.perf_counter()
    tokens = prompts
    for _ in range(new):
        logits = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        tokens = logits[:, -1].argmax(-1, keepdim=True)
        new_tokens.append(tokens)
        if len(new_tokens) == 1:
            first = time.perf_counter()
    return first - begin, time.perf_counter() - first, torch.cat(new_tokens, 1)


class TokenTimes:
    """A streamer for model.generate() that records times: of the prompts, and then of each step's tokens."""

    def __init__(self):
        self.times = []

    def put(self, _):
        self.times.append(time.perf_counter())

    def end(self):
        pass


@torch.inference_mode()
def generate_with_transformers(model, prompts, new):
    streamer, begin = TokenTimes(), time.perf_counter()
    tokens = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=new,
                            min_new_tokens=new, pad_token_id=0, streamer=streamer)
    return streamer.times[1] - begin, streamer.times[-1] - streamer.times[1], tokens[:, prompts.size(1):]


def main():
    folder, dtype, mode = sys.argv[1:4]
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None
    round_weights(model, mode)
    for request in map(json.loads, sys.stdin):
        prompts = torch.tensor(request["prompts"])
        run = generate_with_transformers if mode == "generate" else generate_in_loop
        prompt_seconds, decode_seconds, tokens = run(model, prompts, request["new"])
        print(json.dumps({"prompt_seconds": prompt_seconds, "decode_seconds": decode_seconds,
                          "tokens": tokens.tolist()}), flush=True)


main()
