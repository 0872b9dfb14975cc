"""torch.distributed.checkpoint on local ranks: the peer of bench/checkpoint_bench.cc.

    checkpoint.py RANKS

The first request, {"op": "state", "weights": FILE}, makes the state: the tensors of a safetensors file and both moments
of AdamW, or 302 MB of moments if FILE is "". The answer is {"bytes": N}.

Each further request is {"op": NAME, "folder": DIR}. NAME is save (writes DIR/peer, with fsync), load (reads DIR/peer)
or gather (the full state dict on rank 0's CPU). The answer is {"seconds": S, "extra_bytes": B, "right": BOOL}: the time
of the slowest rank, the peak memory of a rank beyond its state and the result, and whether the values are correct.
"""

import json
import shutil
import struct
import sys
import threading
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._state_dict_utils import _gather_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import local_ranks

TENSORS, ROWS, COLUMNS = 72, 1024, 1024


def state_shapes(weights):
    if not weights:
        return {f"optim.state.w{i}.exp_avg": [ROWS, COLUMNS] for i in range(TENSORS)}
    with open(weights, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    shapes = {}
    for name in sorted(set(header) - {"__metadata__"}):
        for key in (f"model.{name}", f"optim.state.{name}.exp_avg", f"optim.state.{name}.exp_avg_sq"):
            shapes[key] = header[name]["shape"]
    return shapes


def make_state(rank, ranks, weights):
    mesh = init_device_mesh("cpu", (ranks,))
    state = {}
    for i, (name, shape) in enumerate(state_shapes(weights).items()):
        rows = torch.arange(shape[0]).chunk(ranks)
        shard = torch.full([len(rows[rank]) if rank < len(rows) else 0, *shape[1:]], float(i + 1))
        stride = torch.empty(shape, device="meta").stride()
        state[name] = DTensor.from_local(shard, mesh, [Shard(0)], shape=torch.Size(shape), stride=stride)
    return state


def resident_bytes():
    with open("/proc/self/status") as status:
        return 1024 * sum(int(line.split()[1]) for line in status if line.startswith(("RssAnon:", "RssShmem:")))


class PeakMemory:
    """Measures the largest increase of this process's resident memory since construction, by polling every 2 ms."""

    def __init__(self):
        self.before, self.peak, self.stopped = resident_bytes(), 0, False
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()

    def watch(self):
        while not self.stopped:
            self.peak = max(self.peak, resident_bytes())
            time.sleep(0.002)
        self.peak = max(self.peak, resident_bytes())

    def stop(self):
        self.stopped = True
        self.thread.join()
        return self.peak - self.before


def timed(action):
    dist.barrier()
    memory = PeakMemory()
    begin = time.perf_counter()
    result = action()
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "extra_bytes": memory.stop()}, result


def make_worker(rank, ranks):
    state = {}

    def work(request):
        if request["op"] == "state":
            state.clear()
            state.update(make_state(rank, ranks, request["weights"]))
            return {"bytes": sum(value.numel() * 4 for value in state.values())}
        folder = request["folder"] + "/peer"
        if request["op"] == "save":
            if rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            return timed(lambda: dcp.save(state, checkpoint_id=folder))[0]
        if request["op"] == "load":
            for value in state.values():
                value.to_local().zero_()
            answer, _ = timed(lambda: dcp.load(state, checkpoint_id=folder))
            answer["right"] = all(bool((value.to_local() == i + 1).all()) for i, value in enumerate(state.values()))
            return answer
        answer, whole = timed(lambda: _gather_state_dict(state, cpu_offload=True, ranks_only=(0,)))
        answer["right"] = len(whole) == (len(state) if rank == 0 else 0) and all(
            value.shape == state[key].shape for key, value in whole.items())
        answer["extra_bytes"] -= sum(value.nbytes for value in whole.values())
        return answer

    return work


def join_results(request, results):
    if request["op"] == "state":
        return results[0]
    return {"seconds": max(r["seconds"] for r in results), "extra_bytes": max(r["extra_bytes"] for r in results),
            "right": all(r.get("right", True) for r in results)}


if __name__ == "__main__":
    local_ranks.serve(int(sys.argv[1]), make_worker, (), join_results)
