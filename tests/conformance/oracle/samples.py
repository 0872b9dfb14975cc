"""Reads the samples that write_op_samples writes: operations, their arguments, and input placements to test."""
import json

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

DTYPES = {"double": torch.float64, "float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16,
          "long": torch.int64, "int": torch.int32, "bool": torch.bool, "complex": torch.complex128,
          "float8_e4m3fn": torch.float8_e4m3fn}


def read(path):
    with open(path) as file:
        return json.load(file)


def find_op(name):
    packet, _, overload = name.split("::")[1].partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def parse(text):
    if text == "R":
        return Replicate()
    if text.startswith("S("):
        return Shard(int(text[2:-1]))
    return Partial(text[2:-1])


def tensor_of(described):
    dtype = DTYPES[described["dtype"]]
    data = described["data"]
    if dtype.is_complex:
        values = torch.tensor(data, dtype=torch.float64).reshape(-1, 2)
        tensor = torch.view_as_complex(values.contiguous())
    else:
        wide = torch.float64 if dtype.is_floating_point else dtype
        tensor = torch.tensor(data, dtype=wide).to(dtype)
    return tensor.reshape(described["shape"])


def place_empty(described, mesh, placement):
    """Makes a DTensor with the correct global and local shapes. Its values are not those of the sample."""
    shape = torch.Size(described["shape"])
    strides = torch.empty(shape, device="meta").stride()
    shape_placement = Replicate() if placement.is_partial() else placement
    local_shape, _ = compute_local_shape_and_global_offset(shape, mesh, [shape_placement])
    local = torch.zeros(local_shape, dtype=DTYPES[described["dtype"]])
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=shape, stride=strides)


def partial_value(full, op, rank, size):
    """Returns this rank's local value of a Partial tensor. The values of the ranks differ, and reduce to `full`."""
    if not (full.is_floating_point() or full.is_complex()):
        return full - 3 * (size - 1) if rank == 0 else torch.full_like(full, 3)
    weight = 1 + 0.25 * (size // 2) - 0.5 * ((size - 1) // 2) if rank == 0 else (-0.25 if rank % 2 else 0.5)
    if op == "sum":
        return full * weight
    if op == "avg":
        return full * (weight * size)
    below = ((torch.arange(full.numel()) + rank) % size).to(full.dtype).reshape(full.shape) * 0.5
    return full - below if op == "max" else full + below


def local_tensor(full, placement, rank, size):
    """Returns this rank's local tensor."""
    if placement.is_partial():
        return partial_value(full, placement.reduce_op, rank, size)
    if not placement.is_shard():
        return full.clone()
    extent = full.size(placement.dim)
    each = -(-extent // size)
    begin = min(each * rank, extent)
    return full.narrow(placement.dim, begin, min(each, extent - begin)).clone(memory_format=torch.contiguous_format)


def place(described, mesh, placement, make_local=local_tensor):
    """Makes a DTensor with the values of the sample."""
    full = tensor_of(described)
    local = make_local(full, placement, mesh.get_local_rank(), mesh.size())
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=full.shape, stride=full.stride())


def arguments(sample, placements, make):
    """Returns the arguments by name. `make(described, placement)` makes each tensor, with the next of `placements`."""
    remaining = iter(placements)

    def value(described):
        if isinstance(described, dict) and "tensor" in described:
            return make(described["tensor"], parse(next(remaining)))
        if isinstance(described, dict) and "list" in described:
            return [value(one) for one in described["list"]]
        if isinstance(described, dict) and "dtype" in described:
            return DTYPES[described["dtype"]]
        if isinstance(described, dict) and "float" in described:
            return float(described["float"])
        return described

    return {name: value(described) for name, described in sample["args"]}


def call(op, named):
    positional, keywords = [], {}
    for argument in op._schema.arguments:
        if argument.name not in named:
            continue
        if argument.kwarg_only:
            keywords[argument.name] = named[argument.name]
        else:
            positional.append(named[argument.name])
    return op(*positional, **keywords)


def flat_tensors(result):
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, (list, tuple)):
        return [tensor for one in result for tensor in flat_tensors(one)]
    return [None] if result is None else []


def text_of(placement):
    text = str(placement)
    return "MaskP" if text.startswith("MaskP") else text.replace(" ", "").replace(".0)", ")")
