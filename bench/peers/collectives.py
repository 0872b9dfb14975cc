"""torch.distributed over Gloo on local ranks: the peer of bench/collectives_bench.cc.

    collectives.py RANKS

Answers each request line {"op": NAME, "count": FLOATS, "calls": N} with {"seconds": S}, the mean time of a call on the
slowest rank, and with "verify": true with {"right": BOOL}. op is all_reduce, all_gather or reduce_scatter.
"""

import json
import os
import sys
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

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


def rank_main(rank, ranks, store, requests, answers):
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    while (request := requests.get()) is not None:
        op, count = request["op"], request["count"]
        if request.get("verify"):
            answers.put(verify(op, rank, ranks, count))
        else:
            answers.put(measure(op, ranks, count, request["calls"]))
    dist.destroy_process_group()


def main():
    ranks = int(sys.argv[1])
    context = mp.get_context("spawn")
    requests, answers = [context.Queue() for _ in range(ranks)], context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=rank_main, args=(r, ranks, folder + "/store", requests[r], answers), daemon=True)
                     for r in range(ranks)]
        for process in processes:
            process.start()
        for request in map(json.loads, sys.stdin):
            for queue in requests:
                queue.put(request)
            results = [answers.get() for _ in range(ranks)]
            print(json.dumps({"right": all(results)} if request.get("verify") else {"seconds": max(results)}), flush=True)
        for queue in requests:
            queue.put(None)
        for process in processes:
            process.join(10)


if __name__ == "__main__":
    main()
