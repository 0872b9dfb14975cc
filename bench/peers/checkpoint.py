"""torch.distributed.checkpoint on local ranks: the peer of bench/checkpoint_bench.cc.

    checkpoint.py RANKS

Answers each request line {"op": NAME, "folder": DIR} with {"seconds": S}, the time on the slowest rank, and load and
gather with {"right": BOOL} too. op is save (as DIR/theirs, synced), load (of what was saved) or gather (to rank 0's CPU).
"""

import shutil
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._state_dict_utils import _gather_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import local_ranks

TENSORS, ROWS, COLUMNS = 72, 1024, 1024


def make_state(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    state = {}
    for i in range(TENSORS):
        part = torch.full((ROWS // ranks, COLUMNS), float(i + 1))
        state[f"optim.state.w{i}.exp_avg"] = DTensor.from_local(part, mesh, [Shard(0)])
    return state


def timed(action):
    dist.barrier()
    begin = time.perf_counter()
    result = action()
    return time.perf_counter() - begin, result


def make_worker(rank, ranks):
    state = make_state(rank, ranks)

    def work(request):
        folder = request["folder"] + "/theirs"
        if request["op"] == "save":
            if rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            return {"seconds": timed(lambda: dcp.save(state, checkpoint_id=folder))[0]}
        if request["op"] == "load":
            for value in state.values():
                value.to_local().zero_()
            seconds, _ = timed(lambda: dcp.load(state, checkpoint_id=folder))
            right = all(bool((value.to_local() == i + 1).all()) for i, value in enumerate(state.values()))
            return {"seconds": seconds, "right": right}
        seconds, whole = timed(lambda: _gather_state_dict(state, cpu_offload=True, ranks_only=(0,)))
        right = all(value.shape == (ROWS, COLUMNS) for value in whole.values()) and len(whole) == (TENSORS if rank == 0 else 0)
        return {"seconds": seconds, "right": right}

    return work


def joined(request, results):
    return {"seconds": max(r["seconds"] for r in results), "right": all(r.get("right", True) for r in results)}


if __name__ == "__main__":
    local_ranks.serve(int(sys.argv[1]), make_worker, (), joined)
