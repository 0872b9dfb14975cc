"""Prints the learning rates of transformers' get_wsd_schedule as JSON: {MIN_LR_RATIO: {DECAY_TYPE: [RATE]}}.

    wsd.py WARMUP DECAY TOTAL COUNT MIN_LR_RATIO...
"""

import json
import sys

import torch
from transformers.optimization import get_wsd_schedule


def rates(decay_type, warmup, decay, total, min_lr_ratio, count):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = get_wsd_schedule(optimizer, warmup, decay, num_training_steps=total, decay_type=decay_type,
                                min_lr_ratio=min_lr_ratio)
    out = []
    for _ in range(count):
        out.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return out


def main():
    warmup, decay, total, count = (int(sys.argv[i]) for i in (1, 2, 3, 4))
    print(json.dumps({min_lr_ratio: {t: rates(t, warmup, decay, total, float(min_lr_ratio), count)
                              for t in ("linear", "cosine", "1-sqrt")} for min_lr_ratio in sys.argv[5:]}))


main()
