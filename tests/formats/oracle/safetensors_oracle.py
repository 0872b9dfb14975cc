"""Writes and reads files with the safetensors package.

    safetensors_oracle.py write DIR   writes DIR/theirs.safetensors, with a tensor of every dtype; element i is i % 2
    safetensors_oracle.py check DIR   reads the sharded files that Tessera wrote to DIR and compares the same values
"""

import json
import sys

import torch
from safetensors import safe_open
from safetensors.torch import save_file

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}


def expected(dtype):
    return (torch.arange(15) % 2).reshape(3, 5).to(dtype)


def write(folder):
    tensors = {name: expected(dtype) for name, dtype in DTYPES.items()}
    save_file(tensors, folder + "/theirs.safetensors", metadata={"format": "pt"})


def check(folder):
    with open(folder + "/model.safetensors.index.json") as stream:
        index = json.load(stream)
    assert sorted(index["weight_map"]) == sorted(DTYPES)
    assert index["metadata"]["total_size"] == sum(15 * dtype.itemsize for dtype in DTYPES.values())
    assert len(set(index["weight_map"].values())) > 1
    for name, file in index["weight_map"].items():
        with safe_open(folder + "/" + file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            tensor = opened.get_tensor(name)
            assert tensor.dtype == DTYPES[name] and torch.equal(tensor.float(), expected(DTYPES[name]).float()), name
    print(f"{len(DTYPES)} tensors equal")


{"write": write, "check": check}[sys.argv[1]](sys.argv[2])
