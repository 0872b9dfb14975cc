"""torch.distributed over Gloo on local ranks: the peer of bench/collectives_bench.cc.

    collectives.py RANKS

A request is {"op": NAME, "count": FLOATS, "calls": N}. NAME is all_reduce, all_gather or reduce_scatter. The answer is
{"seconds": S}, the mean time of a call on the slowest rank. With "verify": true the answer is {"right": BOOL}, whether
a call gives the correct result.
"""

import sys
import time

import torch
import torch.distributed as dist

import local_ranks


def call(op, part, whole):
    if op == "all_reduce":
        dist.all_reduce(part)
    elif op == "all_gather":
        dist.all_gather_into_tensor(whole, part)
    else:
        dist.reduce_scatter_tensor(part, whole)


def values(rank, count):
    return torch.arange(count, dtype=torch.float32).remainder(1000) + rank


def verify(op, rank, ranks, count):
    part, whole = values(rank, count), values(rank, count * ranks)
    call(op, part, whole)
    if op == "all_gather":
        return torch.equal(whole, torch.cat([values(r, count) for r in range(ranks)]))
    if op == "all_reduce":
        return torch.equal(part, sum(values(r, count) for r in range(ranks)))
    return torch.equal(part, sum(values(r, count * ranks) for r in range(ranks))[rank * count:(rank + 1) * count])


def measure(op, ranks, count, calls):
    part, whole = torch.zeros(count), torch.zeros(count * ranks)
    for _ in range(2):
        call(op, part, whole)
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call(op, part, whole)
    return (time.perf_counter() - begin) / calls


def make_worker(rank, ranks):
    def work(request):
        op, count = request["op"], request["count"]
        return verify(op, rank, ranks, count) if request.get("verify") else measure(op, ranks, count, request["calls"])

    return work


def join_results(request, results):
    return {"right": all(results)} if request.get("verify") else {"seconds": max(results)}


if __name__ == "__main__":
    local_ranks.serve(int(sys.argv[1]), make_worker, (), join_results)
