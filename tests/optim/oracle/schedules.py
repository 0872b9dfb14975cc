"""Prints the learning rates of transformers' schedules as one JSON object.

    schedules.py WARMUP TOTAL MIN_LR_RATIO COUNT

The keys are cosine, linear and constant. Each value is a list of the learning rates of steps 0 to COUNT - 1, for a base
learning rate of 1.
"""

import json
import sys

import torch
from transformers.optimization import (get_constant_schedule_with_warmup, get_cosine_with_min_lr_schedule_with_warmup,
                                       get_linear_schedule_with_warmup)


def rates(make, count):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = make(optimizer)
    out = []
    for _ in range(count):
        out.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return out


def main():
    warmup, total, count = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[4])
    min_lr_ratio = float(sys.argv[3])
    print(json.dumps({
        "cosine": rates(lambda o: get_cosine_with_min_lr_schedule_with_warmup(o, warmup, total, min_lr_rate=min_lr_ratio), count),
        "linear": rates(lambda o: get_linear_schedule_with_warmup(o, warmup, total), count),
        "constant": rates(lambda o: get_constant_schedule_with_warmup(o, warmup), count),
    }))


main()
