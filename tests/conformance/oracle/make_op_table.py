"""Writes op_table.txt: the placements and bytes of PyTorch's DTensor for each operation and placements of its tensors.

    build/write_op_samples golden samples.json
    .venv/bin/python tests/conformance/oracle/make_op_table.py samples.json > tests/conformance/op_table.txt

The script runs on a fake process group of 4 with fake tensors, so that nothing is computed. It then simulates the four
ranks with the values of the samples, to find wrong results of PyTorch. Operations with equal behaviour share a block.
"""
import gc
import multiprocessing
import os
import sys
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.distributed.tensor._api as api
import torch.distributed.tensor._dispatch as dispatch
import torch.distributed.tensor._redistribute as redistribute
from torch._subclasses.fake_tensor import (DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode,
                                           UnsupportedFakeTensorException)
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import _mesh_resources, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import samples as reader

RANKS = 4
original = redistribute.redistribute_local_tensor


class Moved:
    """Bytes that a rank receives from the others with the best algorithm."""
    total = 0
    counts = False
    inside = False


def step_bytes(now, then, local, shape):
    """Bytes that the first rank receives. Reduce-scatters to uneven shards and gathers of them are padded."""
    local_bytes = local.numel() * local.element_size()
    if now.is_replicate() or then.is_partial() or local_bytes == 0:
        return 0
    largest = -(-shape[then.dim] // RANKS) if then.is_shard() else 0
    if now.is_partial():
        if not then.is_shard():
            return local_bytes * (RANKS - 1) // RANKS * 2
        return local_bytes // shape[then.dim] * largest * (RANKS - 1)
    if then.is_replicate():
        return local_bytes * (RANKS - 1)
    kept = local_bytes // shape[then.dim] * largest  # the shard of another dim
    return kept * (shape[now.dim] - local.size(now.dim)) // local.size(now.dim)


def counting(local, current, target, **options):
    if Moved.counts and current.placements != target.placements:
        (now,), (then,) = current.placements, target.placements
        Moved.total += step_bytes(now, then, local, current.shape)
    Moved.inside = True
    try:
        return original(local, current, target, **options)
    finally:
        Moved.inside = False


for module in (api, dispatch, redistribute):
    module.redistribute_local_tensor = counting
type(_mesh_resources).num_devices_per_host = staticmethod(lambda device_type: RANKS)  # one host, as in the tests


class OtherCollectives(TorchDispatchMode):
    """Counts the collectives that operations start on their own, beside redistributions."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # the operation is decomposed first
        if not Moved.inside and func.namespace in ("_c10d_functional", "c10d"):
            name = func._schema.name.split("::")[1]
            inputs = args[1] if name in ("allgather_", "_allgather_base_") else args[0]
            size = sum(one.numel() * one.element_size() for one in reader.flat_tensors(inputs))
            if name.startswith(("all_gather", "allgather", "_allgather")):
                Moved.total += size * (RANKS - 1)
            elif name.startswith(("all_reduce", "allreduce")):
                Moved.total += 2 * size * (RANKS - 1) // RANKS
            elif name.startswith(("reduce_scatter", "_reduce_scatter", "all_to_all", "alltoall")):
                Moved.total += size * (RANKS - 1) // RANKS
            elif name.startswith("recv"):
                Moved.total += size
        return func(*args, **(kwargs or {}))


def add_outs(sample, named):
    """Arguments for the out= tensors, with the placements of the results of the form without out=."""
    if "functional" in sample:
        results = reader.flat_tensors(reader.call(reader.find_op(sample["functional"]), named))
        for name, result in zip(sample["outs"], results):
            if isinstance(result, DTensor):
                named[name] = DTensor.from_local(torch.zeros_like(result._local_tensor), result.device_mesh, result.placements,
                                                 run_check=False, shape=result.shape, stride=result.stride())
            else:
                named[name] = torch.zeros_like(result)


def observed(sample, placements, mesh):
    """The placements of the results, and the bytes."""
    named = reader.arguments(sample, placements, lambda described, placement: reader.place_empty(described, mesh, placement))
    add_outs(sample, named)
    Moved.total, Moved.counts = 0, True
    try:
        with OtherCollectives():
            result = reader.call(reader.find_op(sample["op"]), named)
    finally:
        Moved.counts = False
    tensors = [] if result is None else reader.flat_tensors(result)
    return [reader.text_of(one.placements[0]) if isinstance(one, DTensor) else "-" for one in tensors]


def behaviour(sample, placements, mesh):
    """ "S(0) R 128", or "error"."""
    try:
        with torch.no_grad():
            try:
                with FakeTensorMode():
                    outputs = observed(sample, placements, mesh)
            except (DataDependentOutputException, UnsupportedFakeTensorException, DynamicOutputShapeException):
                outputs = observed(sample, placements, mesh)  # with memory; the fake group leaves its values undefined
        return " ".join(outputs + [str(Moved.total)])
    except Exception as error:
        if "--why" in sys.argv:
            print(f"{sample['op']} {placements}: {type(error).__name__} {str(error)[:300]}", file=sys.stderr)
        return "error"


def on_all_ranks(whole, placement, rank, size):
    return LocalTensor({r: reader.part(whole, placement, r, size) for r in range(size)})


def plain_results(sample):
    op = reader.find_op(sample["op"])
    plain = reader.arguments(sample, sample["placements"][0], lambda described, placement: reader.tensor_of(described).clone())
    with torch.no_grad():
        add_outs(sample, plain)
        return results_and(op, reader.call(op, plain), plain)


def is_wrong(sample, placements, mesh, wanted):
    """Whether a rank has another value than the plain operation, or raises an error when it has values."""
    if all(placement == "R" for placement in placements):
        return False
    op = reader.find_op(sample["op"])
    with torch.no_grad():
        try:
            with LocalTensorMode(RANKS):
                named = reader.arguments(sample, placements, lambda described, placement: reader.place(
                    described, mesh, placement, on_all_ranks))
                add_outs(sample, named)
                found = [one.full_tensor() if isinstance(one, DTensor) else one
                         for one in results_and(op, reader.call(op, named), named)]
        except Exception as error:
            if "--why" in sys.argv:
                print(f"values of {sample['op']} {placements}: {type(error).__name__} {str(error)[:300]}", file=sys.stderr)
            if "MaskBuffer" in str(error) or isinstance(error, NotImplementedError):
                return False  # not supported with simulated ranks
            return isinstance(error, RuntimeError) or "must be equal for all ranks" in str(error)
    return not all(equal(one, other, sample["tolerance"]) for one, other in zip(found, wanted, strict=True))


def results_and(op, results, named):
    """The results of an operation: the tensors that it returns, and the arguments that it writes."""
    if results is None:
        results = []
    written = [argument.name for argument in op._schema.arguments if argument.alias_info and argument.alias_info.is_write]
    return reader.flat_tensors([results, [named[name] for name in written if name in named]])


def equal(found, wanted, tolerance):
    if found is None or wanted is None:
        return found is wanted
    parts = found._local_tensors.values() if isinstance(found, LocalTensor) else [found]
    tolerance = max(tolerance, 1e-7)
    return all(one.shape == wanted.shape and one.dtype == wanted.dtype and torch.allclose(one, wanted, tolerance, tolerance, equal_nan=True)
               for one in parts)


def start():
    global mesh
    gc.disable()  # garbage collection would take most of the time
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))


def lines_of(sample):
    lines = []
    wanted = plain_results(sample) if sample["values"] else None
    for placements in sample["placements"]:
        seen = behaviour(sample, placements, mesh)
        if seen != "error" and sample["values"] and is_wrong(sample, placements, mesh, wanted):
            seen = "wrong"
        lines.append(f"{' '.join(placements)} -> {seen}")
    return tuple(lines)


def main():
    all_samples = reader.read(sys.argv[1])
    blocks = defaultdict(list)
    with multiprocessing.get_context("fork").Pool(os.cpu_count(), start) as pool:
        for i, (sample, lines) in enumerate(zip(all_samples, pool.imap(lines_of, all_samples, chunksize=8))):
            blocks[lines].append(f"{sample['op']}#{sample['index']}")
            if sys.stderr.isatty():
                print(f"\r{i + 1} of {len(all_samples)}", end="", file=sys.stderr)
    print("# What PyTorch", torch.__version__.split("+")[0], "does on a mesh of 4: placements of the tensor arguments ->")
    print("# placements of the results, bytes that come to a rank, 'error', or 'wrong' where a value is. Made by")
    print("# oracle/make_op_table.py. 'ops' lists those alike.")
    for lines, ops in blocks.items():
        print("\nops", " ".join(ops))
        print("\n".join(lines))


if __name__ == "__main__":
    main()
