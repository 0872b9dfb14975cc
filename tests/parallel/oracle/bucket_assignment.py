"""Assigns random tensors to buckets with the function that PyTorch's DDP uses, and prints a JSON list of cases.

    bucket_assignment.py SEED COUNT

A case is {"items": [[bytes, dtype], ...], "first_limit": n, "limit": n, "buckets": [[position, ...], ...]}
"""

import json
import random
import sys

import torch
import torch.distributed as dist

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def main():
    draw = random.Random(int(sys.argv[1]))
    cases = []
    for _ in range(int(sys.argv[2])):
        names = [draw.choice(sorted(DTYPES)[: draw.randint(1, 3)]) for _ in range(draw.randint(1, 30))]
        tensors = [torch.empty(draw.randint(0, 300), dtype=DTYPES[name]) for name in names]
        limits = [draw.randint(1, 600), draw.randint(1, 2500)]
        buckets, _ = dist._compute_bucket_assignment_by_size(tensors, limits)
        items = [[t.numel() * t.element_size(), name] for t, name in zip(tensors, names)]
        cases.append({"items": items, "first_limit": limits[0], "limit": limits[1], "buckets": buckets})
    print(json.dumps(cases))


main()
