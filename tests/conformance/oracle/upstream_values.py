"""Computes the results of PyTorch's DTensor on two Gloo ranks for the samples of write_op_samples.

    upstream_values.py samples.json results.json

results.json has an entry for each sample and choice of placements: the values of the full tensors, flattened, or null
if DTensor raises an error.
"""
import datetime
import json
import math
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import samples as reader


def values(sample, placements, mesh):
    try:
        named = reader.arguments(sample, placements,
                                 lambda described, placement: reader.place(described, mesh, placement))
        tensors = reader.flat_tensors(reader.call(reader.find_op(sample["op"]), named))
        full_tensors = [one.full_tensor() if isinstance(one, DTensor) else one for one in tensors]
    except Exception:  # PyTorch does not support these placements; both ranks raise
        return None
    return [numbers(one) for one in full_tensors if one is not None]


def numbers(tensor):
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.double()
    return [value if math.isfinite(value) else None for value in real.flatten().tolist()]


def run(rank, store, samples_file, results_file):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2,
                            timeout=datetime.timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (2,))
    with torch.no_grad():
        results = [[values(sample, placements, mesh) for placements in sample["placements"]]
                   for sample in reader.read(samples_file)]
    if rank == 0:
        with open(results_file, "w") as file:
            json.dump(results, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run, args=(os.path.join(folder, "store"), sys.argv[1], sys.argv[2]), nprocs=2)
