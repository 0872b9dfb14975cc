"""Writes op_table.txt: what PyTorch's DTensor does for each operation and each choice of input placements. A line has
the placements of the results and the bytes that a rank receives.

    build/write_op_samples golden samples.json
    .venv/bin/python tests/conformance/oracle/make_op_table.py samples.json > tests/conformance/op_table.txt

The script runs on a fake process group of 4 with fake tensors, so that nothing is computed. It then simulates the four
ranks with the values of the samples, to find wrong results of PyTorch. Operations with equal outcomes share a block.
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


class Traffic:
    """Bytes that a rank receives from the others, if each collective uses the best algorithm."""
    total = 0
    is_counting = False
    in_redistribution = False


def redistribution_bytes(now, then, local, shape):
    """Returns the bytes that rank 0 receives in a redistribution. For uneven shards, reduce-scatter and all-gather are
    padded."""
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
    new_shard = local_bytes // shape[then.dim] * largest  # after an all-to-all to a shard of another dim
    return new_shard * (shape[now.dim] - local.size(now.dim)) // local.size(now.dim)


def counting(local, current, target, **options):
    if Traffic.is_counting and current.placements != target.placements:
        (now,), (then,) = current.placements, target.placements
        Traffic.total += redistribution_bytes(now, then, local, current.shape)
    Traffic.in_redistribution = True
    try:
        return original(local, current, target, **options)
    finally:
        Traffic.in_redistribution = False


for module in (api, dispatch, redistribute):
    module.redistribute_local_tensor = counting
type(_mesh_resources).num_devices_per_host = staticmethod(lambda device_type: RANKS)  # one host, as in the tests


class OtherCollectives(TorchDispatchMode):
    """Counts the collectives that operations start themselves, in addition to redistributions."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # lets DTensor decompose the operation first
        if not Traffic.in_redistribution and func.namespace in ("_c10d_functional", "c10d"):
            name = func._schema.name.split("::")[1]
            inputs = args[1] if name in ("allgather_", "_allgather_base_") else args[0]
            size = sum(one.numel() * one.element_size() for one in reader.flat_tensors(inputs))
            if name.startswith(("all_gather", "allgather", "_allgather")):
                Traffic.total += size * (RANKS - 1)
            elif name.startswith(("all_reduce", "allreduce")):
                Traffic.total += 2 * size * (RANKS - 1) // RANKS
            elif name.startswith(("reduce_scatter", "_reduce_scatter", "all_to_all", "alltoall")):
                Traffic.total += size * (RANKS - 1) // RANKS
            elif name.startswith("recv"):
                Traffic.total += size
        return func(*args, **(kwargs or {}))


def add_outs(sample, named):
    """Adds arguments for the out= tensors. Their placements are those of the results of the functional variant."""
    if "functional" in sample:
        results = reader.flat_tensors(reader.call(reader.find_op(sample["functional"]), named))
        for name, result in zip(sample["outs"], results):
            if isinstance(result, DTensor):
                named[name] = DTensor.from_local(torch.zeros_like(result._local_tensor), result.device_mesh, result.placements,
                                                 run_check=False, shape=result.shape, stride=result.stride())
            else:
                named[name] = torch.zeros_like(result)


def result_placements(sample, placements, mesh):
    """Runs the operation and returns the placements of its results. Sets Traffic.total."""
    named = reader.arguments(sample, placements, lambda described, placement: reader.place_empty(described, mesh, placement))
    add_outs(sample, named)
    Traffic.total, Traffic.is_counting = 0, True
    try:
        with OtherCollectives():
            result = reader.call(reader.find_op(sample["op"]), named)
    finally:
        Traffic.is_counting = False
    tensors = [] if result is None else reader.flat_tensors(result)
    return [reader.text_of(one.placements[0]) if isinstance(one, DTensor) else "-" for one in tensors]


def outcome_of(sample, placements, mesh):
    """Returns the placements of the results and the bytes, such as "S(0) R 128", or "error"."""
    try:
        with torch.no_grad():
            try:
                with FakeTensorMode():
                    outputs = result_placements(sample, placements, mesh)
            except (DataDependentOutputException, UnsupportedFakeTensorException, DynamicOutputShapeException):
                outputs = result_placements(sample, placements, mesh)  # with real tensors; their values are undefined
        return " ".join(outputs + [str(Traffic.total)])
    except Exception as error:
        if "--why" in sys.argv:
            print(f"{sample['op']} {placements}: {type(error).__name__} {str(error)[:300]}", file=sys.stderr)
        return "error"


def on_all_ranks(full, placement, rank, size):
    return LocalTensor({r: reader.local_tensor(full, placement, r, size) for r in range(size)})


def plain_results(sample):
    op = reader.find_op(sample["op"])
    plain = reader.arguments(sample, sample["placements"][0], lambda described, placement: reader.tensor_of(described).clone())
    with torch.no_grad():
        add_outs(sample, plain)
        return all_results(op, reader.call(op, plain), plain)


def is_wrong(sample, placements, mesh, expected):
    """Returns whether a rank gets a value that differs from the plain operation, or raises an error with real
    values."""
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
                         for one in all_results(op, reader.call(op, named), named)]
        except Exception as error:
            if "--why" in sys.argv:
                print(f"values of {sample['op']} {placements}: {type(error).__name__} {str(error)[:300]}", file=sys.stderr)
            if "MaskBuffer" in str(error) or isinstance(error, NotImplementedError):
                return False  # not supported with simulated ranks
            return isinstance(error, RuntimeError) or "must be equal for all ranks" in str(error)
    return not all(equal(one, other, sample["tolerance"]) for one, other in zip(found, expected, strict=True))


def all_results(op, results, named):
    """Returns all results of an operation: the tensors that it returns, and the arguments that it writes."""
    if results is None:
        results = []
    written = [argument.name for argument in op._schema.arguments if argument.alias_info and argument.alias_info.is_write]
    return reader.flat_tensors([results, [named[name] for name in written if name in named]])


def equal(found, expected, tolerance):
    if found is None or expected is None:
        return found is expected
    parts = found._local_tensors.values() if isinstance(found, LocalTensor) else [found]
    tolerance = max(tolerance, 1e-7)
    return all(one.shape == expected.shape and one.dtype == expected.dtype
               and torch.allclose(one, expected, tolerance, tolerance, equal_nan=True) for one in parts)


def start():
    global mesh
    gc.disable()  # garbage collection would take most of the time
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))


def lines_of(sample):
    lines = []
    expected = plain_results(sample) if sample["values"] else None
    for placements in sample["placements"]:
        outcome = outcome_of(sample, placements, mesh)
        if outcome != "error" and sample["values"] and is_wrong(sample, placements, mesh, expected):
            outcome = "wrong"
        lines.append(f"{' '.join(placements)} -> {outcome}")
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
    print("# placements of the results and bytes that a rank receives, or 'error', or 'wrong' for wrong values.")
    print("# oracle/make_op_table.py writes this file. 'ops' lists operations with equal lines.")
    for lines, ops in blocks.items():
        print("\nops", " ".join(ops))
        print("\n".join(lines))


if __name__ == "__main__":
    main()
