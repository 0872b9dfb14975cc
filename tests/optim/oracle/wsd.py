"""Prints the learning rates of transformers' get_wsd_schedule as one JSON object, by floor and decay type.

    wsd.py WARMUP DECAY TOTAL COUNT MIN_LR_RATIO...
"""

import json
import sys

import torch
from transformers.optimization import get_wsd_schedule


def rates(decay_type, warmup, decay, total, floor, count):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = get_wsd_schedule(optimizer, warmup, decay, num_training_steps=total, decay_type=decay_type,
                                min_lr_ratio=floor)
    out = []
    for _ in range(count):
        out.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return out


def main():
    warmup, decay, total, count = (int(sys.argv[i]) for i in (1, 2, 3, 4))
    print(json.dumps({floor: {t: rates(t, warmup, decay, total, float(floor), count)
                              for t in ("linear", "cosine", "1-sqrt")} for floor in sys.argv[5:]}))


main()
