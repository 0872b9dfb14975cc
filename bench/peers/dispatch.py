"""torch.distributed.tensor on the same operations: the peer of bench/dispatch_bench.cc.

    dispatch.py RANKS

A request is {"op": NAME, "calls": N, "miss": BOOL}, where "miss" gives every call a new shape, so that DTensor's
dispatch cache misses. The answer is {"us": U, "check": C}: the microseconds that a DTensor adds to one call, and a
weighted sum of the result. For the operation "DeviceMesh slice", U is the time of mesh["rows"], and C is the size of
the slice. The backend is Gloo.
"""

import sys
import time
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import local_ranks


def values(*sizes):
    count = 1
    for size in sizes:
        count *= size
    return ((torch.arange(count) * 7 % 16 - 8).float() / 4).view(sizes)


def one(rows):
    return [values(rows, 4)]


def two(rows):
    return [values(rows, 4), values(rows, 4) + 1]


def product(rows):
    return [values(rows, 4), values(4, 4) + 1]


def layer(rows):
    return [values(rows, 4), values(4), values(4)]


def lookup(rows):
    return [torch.arange(rows) % 4, values(4, 4)]


def columns(rows):
    return [values(rows, 4), torch.arange(2)]


def forward_backward(a, b):
    a.grad = b.grad = None
    (a @ b).relu().sum().backward()
    return a.grad


# name: (function that makes the inputs, whether each input is replicated, the operation, whether it runs backward)
OPS = {
    "add": (two, (False, False), lambda a, b: torch.add(a, b), False),
    "relu": (one, (False,), lambda a: torch.relu(a), False),
    "mm": (product, (False, True), lambda a, b: torch.mm(a, b), False),
    "view": (one, (False,), lambda a: a.view(a.size(0) * 4), False),
    "relu_ in place": (one, (False,), lambda a: torch.relu_(a), False),
    "transpose": (one, (False,), lambda a: a.transpose(0, 1), False),
    "narrow": (one, (False,), lambda a: a.narrow(1, 1, 2), False),
    "sum": (one, (False,), lambda a: a.sum(1), False),
    "softmax": (one, (False,), lambda a: torch._softmax(a, 1, False), False),
    "cat": (two, (False, False), lambda a, b: torch.cat([a, b], 1), False),
    "layer_norm": (layer, (False, True, True), lambda x, w, b: torch.native_layer_norm(x, [4], w, b, 1e-5)[0], False),
    "embedding": (lookup, (False, True), lambda i, w: torch.embedding(w, i), False),
    "index_select": (columns, (False, True), lambda a, i: torch.index_select(a, 1, i), False),
    "_foreach_add": (two, (False, False), lambda a, b: torch._foreach_add([a, b], 1.0)[1], False),
    "(a@b).relu().sum() and backward": (product, (False, True), forward_backward, True),
}


def plain_inputs(op, rows):
    inputs, _, _, gradients = OPS[op]
    return [x.requires_grad_(gradients and x.is_floating_point()) for x in inputs(rows)]


def dtensor_inputs(op, rows, mesh):
    placements = [Replicate() if replicated else Shard(0) for replicated in OPS[op][1]]
    return [distribute_tensor(x, mesh, [p], src_data_rank=None) for x, p in zip(plain_inputs(op, rows), placements)]


def seconds_of(run, inputs, calls=1):
    begin = time.perf_counter()
    for _ in range(calls):
        run(*inputs)
    return time.perf_counter() - begin


def hit_overhead(op, mesh, calls):
    blocks, rows, run = 20, 2 * mesh.size(), OPS[op][2]
    sharded, plain = dtensor_inputs(op, rows, mesh), plain_inputs(op, rows // mesh.size())
    run(*sharded)
    each = calls // blocks
    return median(seconds_of(run, sharded, each) - seconds_of(run, plain, each) for _ in range(blocks)) * 1e6 / each


def miss_overhead(op, mesh, calls, first):
    with_dtensor, without = [], []
    for i in range(calls):
        rows = first + (i + 1) * mesh.size()
        sharded, plain = dtensor_inputs(op, rows, mesh), plain_inputs(op, rows // mesh.size())
        with_dtensor.append(seconds_of(OPS[op][2], sharded))
        without.append(seconds_of(OPS[op][2], plain))
    return (median(with_dtensor) - median(without)) * 1e6


def slice_time(mesh, calls):
    blocks, each = 20, calls // 20
    return median(seconds_of(lambda: mesh["rows"], (), each) for _ in range(blocks)) * 1e6 / each


def make_worker(_, ranks):
    mesh = dist.init_device_mesh("cpu", (ranks,))
    mesh_2d = dist.init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("rows", "columns"))
    next_rows = {}  # next new number of rows, per operation, so that shapes stay small

    def work(request):
        op, calls = request["op"], request["calls"]
        if op == "DeviceMesh slice":
            return slice_time(mesh_2d, calls), mesh_2d["rows"].size()
        with torch.set_grad_enabled(OPS[op][3]):
            dist.barrier()
            if request["miss"]:
                rows = next_rows.setdefault(op, 64)
                us = miss_overhead(op, mesh, calls, rows)
                next_rows[op] = rows + calls * ranks
            else:
                us = hit_overhead(op, mesh, calls)
            result = OPS[op][2](*dtensor_inputs(op, 2 * ranks, mesh)).full_tensor().detach().double().flatten()
        return us, result.dot(torch.arange(1, result.numel() + 1, dtype=torch.float64)).item()

    return work


def join_results(_, results):
    us, check = results[0]
    return {"us": us, "check": check}


if __name__ == "__main__":
    local_ranks.serve(int(sys.argv[1]), make_worker, (), join_results)
