"""Greedy generation by transformers: the peer of bench/generate_bench.cc.

    generate.py MODEL_DIR DTYPE HOW

DTYPE: float32 or bfloat16. HOW: `generate`, as users call it, `loop`, the leanest loop over the model and its cache, or
one of float32, bfloat16, int8, int4: the loop, with weights rounded as `tessera generate --dtype` keeps them, for the
tokens to expect. Answers each line {"prompts": [[ID]], "new": N}, prompts of one length, with
{"prompt_seconds", "decode_seconds", "tokens": [[ID]]}: to the first new token of all, and from there to the last.
"""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging


def in_steps_of_rows(weight):
    step = weight.abs().amax(1, keepdim=True) / 127
    return (weight / step.where(step > 0, 1)).round().clamp(-127, 127) * step


def in_steps_of_blocks(weight):
    blocks = weight.unflatten(1, (-1, 32))
    least = blocks.amin(2, keepdim=True)
    step = ((blocks.amax(2, keepdim=True) - least) / 15).half().float()
    least = least.half().float()
    codes = ((blocks - least) / step.where(step > 0, 1)).round().clamp(0, 15)
    return (codes * step + least).flatten(1)


@torch.no_grad()
def round_weights(model, how):
    if how == "bfloat16":
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    if how not in ("int8", "int4"):
        return
    model.lm_head.weight = torch.nn.Parameter(in_steps_of_rows(model.lm_head.weight))  # tied: the embedding stays
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.weight.copy_((in_steps_of_rows if how == "int8" else in_steps_of_blocks)(module.weight))


@torch.inference_mode()
def by_loop(model, prompts, new):
    cache = DynamicCache(config=model.config)
    made, begin = [], time.perf_counter()
    tokens = prompts
    for _ in range(new):
        logits = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        tokens = logits[:, -1].argmax(-1, keepdim=True)
        made.append(tokens)
        if len(made) == 1:
            first = time.perf_counter()
    return first - begin, time.perf_counter() - first, torch.cat(made, 1)


class Clock:
    """A streamer: sees the prompts, then each step's tokens."""

    def __init__(self):
        self.times = []

    def put(self, _):
        self.times.append(time.perf_counter())

    def end(self):
        pass


@torch.inference_mode()
def by_generate(model, prompts, new):
    clock, begin = Clock(), time.perf_counter()
    tokens = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=new,
                            min_new_tokens=new, pad_token_id=0, streamer=clock)
    return clock.times[1] - begin, clock.times[-1] - clock.times[1], tokens[:, prompts.size(1):]


def main():
    folder, dtype, how = sys.argv[1:4]
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None
    round_weights(model, how)
    for request in map(json.loads, sys.stdin):
        prompts = torch.tensor(request["prompts"])
        run = by_generate if how == "generate" else by_loop
        prompt_seconds, decode_seconds, tokens = run(model, prompts, request["new"])
        print(json.dumps({"prompt_seconds": prompt_seconds, "decode_seconds": decode_seconds,
                          "tokens": tokens.tolist()}), flush=True)


main()
