"""Writes op_table.txt: for each operation and placements of its tensors, what PyTorch's DTensor gives and moves.

    build/write_op_samples golden samples.json
    .venv/bin/python tests/conformance/oracle/make_op_table.py samples.json > tests/conformance/op_table.txt

Runs on a fake process group of 4 with fake tensors: nothing is computed. Operations that behave alike share a block.
"""
import sys
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.distributed.tensor._api as api
import torch.distributed.tensor._dispatch as dispatch
import torch.distributed.tensor._redistribute as redistribute
from torch._subclasses.fake_tensor import (DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode,
                                           UnsupportedFakeTensorException)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import samples as reader

RANKS = 4
original = redistribute.redistribute_local_tensor


class Moved:
    """Bytes that the best algorithm brings to a rank from the others."""
    total = 0
    inside = False


def step_bytes(current, target, local_bytes, shards):
    if current.is_replicate() or target.is_partial():
        return 0
    if current.is_partial():
        whole = local_bytes
        return whole * (RANKS - 1) // RANKS * (1 if target.is_shard() else 2)
    if target.is_replicate():
        return local_bytes * (RANKS - 1)
    return local_bytes * (RANKS - 1) // RANKS  # to another dim


def counting(local, current, target, **options):
    if current.placements != target.placements:
        (now,), (then,) = current.placements, target.placements
        Moved.total += step_bytes(now, then, local.numel() * local.element_size(), RANKS)
    Moved.inside = True
    try:
        return original(local, current, target, **options)
    finally:
        Moved.inside = False


for module in (api, dispatch, redistribute):
    module.redistribute_local_tensor = counting


class OtherCollectives(TorchDispatchMode):
    """Those that operations start on their own, beside redistributions."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not Moved.inside and func.namespace in ("_c10d_functional", "c10d_functional", "c10d"):
            name = func._schema.name
            size = args[0].numel() * args[0].element_size() if isinstance(args[0], torch.Tensor) else 0
            if "all_gather" in name:
                Moved.total += size * (RANKS - 1)
            elif "all_reduce" in name or name.endswith("allreduce_"):
                Moved.total += 2 * size * (RANKS - 1) // RANKS
            elif "reduce_scatter" in name or "all_to_all" in name:
                Moved.total += size * (RANKS - 1) // RANKS
        return result


def observed(sample, placements, mesh):
    """Placements of the results, and the bytes."""
    named = reader.arguments(sample, placements, lambda described, placement: reader.place_empty(described, mesh, placement))
    if "functional" in sample:
        functional = reader.find_op(sample["functional"])
        results = reader.flat_tensors(reader.call(functional, named))
        for name, result in zip(sample["outs"], results):
            named[name] = DTensor.from_local(torch.empty_like(result._local_tensor), mesh, result.placements,
                                             run_check=False, shape=result.shape, stride=result.stride())
    Moved.total = 0
    with OtherCollectives():
        result = reader.call(reader.find_op(sample["op"]), named)
    return [reader.text_of(one.placements[0]) if isinstance(one, DTensor) else "-" for one in reader.flat_tensors(result)]


def behaviour(sample, placements, mesh):
    """ "S(0) R 128", or "error"."""
    try:
        with torch.no_grad():
            try:
                with FakeTensorMode():
                    outputs = observed(sample, placements, mesh)
            except (DataDependentOutputException, UnsupportedFakeTensorException, DynamicOutputShapeException):
                outputs = observed(sample, placements, mesh)  # with memory, and what the group that does nothing leaves in it
        return " ".join(outputs + [str(Moved.total)])
    except Exception as error:
        if "--why" in sys.argv:
            print(f"{sample['op']} {placements}: {type(error).__name__} {str(error)[:300]}", file=sys.stderr)
        return "error"


def main():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    blocks = defaultdict(list)
    for sample in reader.read(sys.argv[1]):
        lines = tuple(f"{' '.join(placements)} -> {behaviour(sample, placements, mesh)}" for placements in sample["placements"])
        blocks[lines].append(f"{sample['op']}#{sample['index']}")
    print("# What PyTorch", torch.__version__.split("+")[0], "does on a mesh of 4: placements of the tensor arguments ->")
    print("# placements of the results, bytes that come to a rank; made by oracle/make_op_table.py. 'ops' lists those alike.")
    for lines, ops in blocks.items():
        print("\nops", " ".join(ops))
        print("\n".join(lines))


if __name__ == "__main__":
    main()
