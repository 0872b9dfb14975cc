"""Host time that PyTorch's FSDP2 adds to a step with many small parameters: the peer of bench/fsdp_bench.cc.

    fsdp.py RANKS

Answers each request {"steps": N} on stdin with {"us": U, "check": C}: the median microseconds per parameter that
sharding adds to a forward and backward, and the sum of the first parameter's gradient.
"""

import sys
import time
from statistics import median

import torch
import torch.distributed as dist

import local_ranks

BLOCKS, BLOCK_PARAMETERS, WIDTH = 16, 8, 4


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        small = (torch.arange(WIDTH * WIDTH, dtype=torch.float32) * 7 % 16 - 8).div(800).view(WIDTH, WIDTH)
        self.weights = torch.nn.ParameterList([torch.eye(WIDTH) + small for _ in range(BLOCK_PARAMETERS)])

    def forward(self, x):
        for weight in self.weights:
            x = torch.nn.functional.linear(x, weight)
        return x


def step(model, x):
    model(x).sum().backward()
    model.zero_grad()


def seconds_of(work, *arguments):
    begin = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - begin


def make_worker(rank, ranks):
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (ranks,))
    sharded, plain = (torch.nn.Sequential(*(Block() for _ in range(BLOCKS))) for _ in range(2))
    for block in sharded:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    x = torch.ones(2, WIDTH) * (rank + 1)

    def work(request):
        sharded(x).sum().backward()
        check = next(sharded.parameters()).grad.full_tensor().double().sum().item()
        sharded.zero_grad()
        dist.barrier()
        added = [seconds_of(step, sharded, x) - seconds_of(step, plain, x) for _ in range(request["steps"])]
        return median(added) * 1e6 / (BLOCKS * BLOCK_PARAMETERS), check

    return work


def join_results(_, results):
    us, check = results[0]
    return {"us": us, "check": check}


if __name__ == "__main__":
    local_ranks.serve(int(sys.argv[1]), make_worker, (), join_results)
