"""Writes and reads files of torch.save and of torch.distributed.checkpoint (DCP): torch_oracle.py COMMAND DIR

    save       writes DIR/protocol{2,3,4,5}.pt and DIR/stream.pt, with everything that Tessera reads, and
               DIR/hostile/*.pt, which Tessera must refuse
    check      reads DIR/records.bin (records records in DIR/records.json) and DIR/model.pt, which Tessera wrote
    dcp        saves the checkpoint DIR/ck on two ranks, and the same values as full tensors in DIR/whole.pt
    dcp_read   reads the checkpoint DIR/ours, which Tessera wrote, and compares its values; also compares the metadata
               of DIR/ck with DIR/again, which Tessera wrote after it had read DIR/ck
    large      reads DIR/large.pt, whose first tensor has more than 4 GiB
"""

import json
import math
import os
import pickle
import sys
from collections import OrderedDict

import torch

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex128, torch.complex64, torch.complex32, torch.uint16, torch.uint32,
    torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
]


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def pattern(dtype, shape, seed):
    """Returns the same values as pattern() in torch_pattern.h."""
    count = math.prod(shape) * dtype.itemsize
    data = (torch.arange(count) * 37 + seed).remainder(2 if dtype == torch.bool else 251).to(torch.uint8)
    return data.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def same(a, b):
    def raw(tensor):
        tensor = tensor.detach().contiguous().reshape(-1)
        return tensor.view(torch.uint8) if tensor.numel() else torch.empty(0)
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))


def objects():
    return {
        "ints": [0, 255, 256, 65535, 65536, 2**31 - 1, 2**31, -1, -(2**31), -(2**31) - 1, 2**63 - 1, -(2**63)],
        "floats": [0.1, -0.0, math.inf, 5e-324], "text": "Gr\u00f6\u00dfe \u4e2d\U0001f600\n" + "x" * 300,
        "bytes": b"\x00\xff" * 200, "no_bytes": b"", "tuple": (1, "a", None, True, False), "unit": (),
        "nested": {"a": [{"b": ({"c": 1},)}]}, "set": {1}, 3: "three", (1, 2): "pair",
        "dtype": torch.bfloat16, "size": torch.Size([2, 3]), "device": torch.device("cpu"), "complex": 1 - 2j,
        "layout": torch.strided, "ordered": OrderedDict(a=1, b=2),
    }


def tensors():
    result = {}
    for dtype in DTYPES:
        for shape in ((2, 3), (), (0, 4)):
            result[f"{name_of(dtype)}.{len(shape)}.{math.prod(shape)}"] = pattern(dtype, shape, 3)
    return result


def save(folder):
    tied = pattern(torch.float32, (4, 5), 7)
    for protocol in (2, 3, 4, 5):
        everything = {
            "tensors": tensors(), "objects": objects(), "transposed": tied.t(), "narrow": tied[1:3, 2:4], "tied": [tied, tied],
            "parameter": torch.nn.Parameter(tied), "frozen": torch.nn.Parameter(tied, requires_grad=False),
            "expanded": tied[0, 0].expand(1000, 1000), "module": torch.nn.Linear(2, 1).state_dict(),
            "many": {f"name.{i}": i for i in range(20000)},
        }
        torch.save(everything, f"{folder}/protocol{protocol}.pt", pickle_protocol=protocol)
    with open(folder + "/stream.pt", "wb") as stream:
        torch.save({"tensors": tensors()}, stream)
    os.mkdir(folder + "/hostile")

    class Evil:
        def __init__(self, function, *args):
            self.reduction = function, args

        def __reduce__(self):
            return self.reduction

    hostile = {
        "system": Evil(os.system, "true"), "eval": Evil(eval, "1"), "getattr": Evil(getattr, 1, "real"),
        "big_integer": 2**70, "sparse": torch.eye(2).to_sparse(), "conjugate": torch.ones(2, dtype=torch.cfloat).conj(),
        "quantised": torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8), "frozenset": frozenset([1]),
        "function": os.path.join,
    }
    for name, value in hostile.items():
        torch.save({"value": value}, f"{folder}/hostile/{name}.pt")
    torch.save({"value": 1}, f"{folder}/hostile/legacy.pt", _use_new_zipfile_serialization=False)
    cycle = []
    cycle.append(cycle)
    torch.save({"value": cycle}, f"{folder}/hostile/cycle.pt")


def load(stream):
    return torch.load(stream, weights_only=True)


def check(folder):
    import io
    with open(folder + "/records.json") as stream:
        records = json.load(stream)
    with open(folder + "/records.bin", "rb") as stream:
        data = stream.read()
    end = 0
    for record in records:
        assert record["offset"] == end
        end += record["length"]
        value = load(io.BytesIO(data[record["offset"]:end]))
        if "dtype" in record:
            expected = pattern(getattr(torch, record["dtype"]), record["shape"], record["seed"])
            assert same(value, expected), record
            assert value.requires_grad == record["grad"] and value.is_contiguous(), record
            if record["shape"]:  # our record must be about as long as PyTorch's
                written = io.BytesIO()
                torch.save(expected, written)
                assert abs(len(written.getvalue()) - record["length"]) <= 64, (record, len(written.getvalue()))
        else:
            expected = {"lr": 0.1, "betas": (0.9, 0.95), "fused": None, "params": [0, 1, 70000], "maximize": False,
                      "name": "Gr\u00f6\u00dfe", "raw": b"\x00\xff", "big": -(2**63), "set": {1, 2}, 3: "three", "none": b"",
                      "ordered": OrderedDict(a=1)}[record["object"]]
            assert value == expected and type(value) is type(expected), (record, value)
    assert end == len(data)
    model = load(folder + "/model.pt")
    assert list(model) == ["w", "tied", "nested"] and model["w"].requires_grad and not model["tied"].requires_grad
    assert same(model["w"], pattern(torch.bfloat16, (64, 32), 1))
    assert model["w"].data_ptr() == model["tied"].data_ptr()
    assert same(model["nested"]["b"][0], pattern(torch.float8_e4m3fn, (3,), 2)) and model["nested"]["b"][1] == 7
    assert same(torch.load(folder + "/model.pt", weights_only=True, mmap=True)["w"], model["w"])
    print(f"{len(records)} records equal")


def whole_values():
    values = {
        "model.w": pattern(torch.float32, (5, 3), 1), "model.e": pattern(torch.bfloat16, (1,), 2),
        "model.columns": pattern(torch.int32, (4, 5), 3), "model.replicated": pattern(torch.float8_e5m2, (3, 2), 4),
        "model.plain": pattern(torch.int64, (4,), 5), "model.Gr\u00f6\u00dfe": pattern(torch.bool, (3,), 6),
        "model.nothing": pattern(torch.float32, (0, 3), 7), "opt.step": pattern(torch.float32, (), 8),
    }
    for i in range(150):
        values[f"model.layers.{i}.a_rather_long_name_so_that_the_metadata_has_frames"] = pattern(torch.float16, (3, 2), i)
    return values


def dcp_rank(rank, folder):
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    values = whole_values()
    model = {}
    for name, value in values.items():
        key = name.removeprefix("model.")
        if not name.startswith("model."):
            continue
        if key in ("plain", "Gr\u00f6\u00dfe"):
            model[key] = value
        else:
            placement = Shard(1) if key == "columns" else Replicate() if key in ("replicated", "nothing") else Shard(0)
            local = value
            if placement.is_shard():
                chunks = value.chunk(2, placement.dim)
                local = chunks[rank] if rank < len(chunks) else value.narrow(placement.dim, 0, 0)
            model[key] = DTensor.from_local(local, mesh, [placement], shape=value.shape, stride=value.stride())
    state = {
        "model": model, "opt": {"step": values["opt.step"], "param_groups": [{"lr": 0.1, "params": [0, 1], "t": torch.ones(1)}]},
        "n": 7, "tuple": (1, "a"), "none": None, "lst": [torch.ones(2), 5],
    }
    dcp.save(state, checkpoint_id=folder + "/ck")
    dist.barrier()
    dist.destroy_process_group()


def dcp(folder):
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                dcp_rank(rank, folder)
                code = 0
            except BaseException:
                import traceback
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    assert all(os.waitpid(pid, 0)[1] == 0 for pid in pids)
    torch.save(whole_values(), folder + "/whole.pt")


def read_metadata(path):
    with open(path, "rb") as stream:
        return pickle.load(stream)


def dcp_read(folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    theirs, ours = read_metadata(folder + "/ck/.metadata"), read_metadata(folder + "/again")
    assert theirs == ours
    assert list(theirs.state_dict_metadata) == list(ours.state_dict_metadata)
    assert list(theirs.storage_data) == list(ours.storage_data)
    assert [key.index for key in theirs.storage_data] == [key.index for key in ours.storage_data]
    assert theirs.planner_data == ours.planner_data and theirs.storage_meta == ours.storage_meta
    state = {}
    _load_state_dict(state, storage_reader=dcp.FileSystemReader(folder + "/ours"), planner=_EmptyStateDictLoadPlanner(),
                     no_dist=True)
    assert list(state) == ["model", "n"] and state["n"] == 7, state
    assert same(state["model"]["w"], pattern(torch.bfloat16, (5, 3), 1))
    assert same(state["model"]["s"], pattern(torch.float32, (), 2))
    assert same(state["model"]["Gr\u00f6\u00dfe"], pattern(torch.float8_e4m3fn, (3,), 3))
    target = {"model": {"w": torch.zeros(5, 3, dtype=torch.bfloat16)}}
    dcp.load(target, checkpoint_id=folder + "/ours", no_dist=True)
    assert same(target["model"]["w"], pattern(torch.bfloat16, (5, 3), 1))
    print(f"{len(theirs.storage_data)} records equal")


def large(folder):
    loaded = torch.load(folder + "/large.pt", weights_only=True, mmap=True)
    assert loaded["large"].shape == ((1 << 32) + 1000,) and loaded["large"][-3:].tolist() == [0, 7, 0]
    assert same(loaded["after"], pattern(torch.float32, (3, 4), 1)) and loaded["n"] == 3
    print("large file equal")


{"save": save, "check": check, "dcp": dcp, "dcp_read": dcp_read, "large": large}[sys.argv[1]](sys.argv[2])
