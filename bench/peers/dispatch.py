"""torch.distributed.tensor on the same operations: the peer of bench/dispatch_bench.cc.

    dispatch.py

One rank, gloo, no gradients. Answers each request line {"op": NAME, "calls": N, "plain": BOOL, "miss": BOOL} with
{"seconds": S} for N calls, on DTensors or on plain tensors. "miss" gives every call a shape that was not seen before.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

OPS = {
    "add": lambda a, b: torch.add(a, b),
    "mm": lambda a, b: torch.mm(a, b),
    "relu": lambda a, b: torch.relu(a),
    "view": lambda a, b: a.view(16),
    "add_": lambda a, b: a.add_(b),
}


def main():
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    rows = 4  # of the next shape not seen before
    with torch.no_grad():
        for request in map(json.loads, sys.stdin):
            op = OPS[request["op"]]
            calls = request["calls"]
            if request.get("miss"):
                inputs = []
                for _ in range(calls):
                    rows += 1
                    a = torch.zeros(rows, 4)
                    inputs.append(a if request["plain"] else distribute_tensor(a, mesh, [Shard(0)], src_data_rank=None))
                begin = time.perf_counter()
                for a in inputs:
                    torch.relu(a)
                seconds = time.perf_counter() - begin
            else:
                a, b = torch.zeros(4, 4), torch.zeros(4, 4)
                if not request["plain"]:
                    second = Replicate() if request["op"] == "mm" else Shard(0)
                    a = distribute_tensor(a, mesh, [Shard(0)], src_data_rank=None)
                    b = distribute_tensor(b, mesh, [second], src_data_rank=None)
                op(a, b)
                begin = time.perf_counter()
                for _ in range(calls):
                    op(a, b)
                seconds = time.perf_counter() - begin
            print(json.dumps({"seconds": seconds}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
