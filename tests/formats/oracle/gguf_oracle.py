"""Compares Tessera with the gguf package.

    gguf_oracle.py blocks DIR   writes DIR/blocks.gguf, with random blocks of every type that Tessera decodes, and
                                DIR/wanted.safetensors, with the values that the gguf package decodes from them
    gguf_oracle.py check DIR    reads DIR/ours.gguf, which Tessera wrote from DIR/source.safetensors, and compares it
                                with the package's encoding
"""

import sys

import gguf
import numpy as np
import safetensors.numpy
from gguf import GGMLQuantizationType as Type

TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
ROWS, COLUMNS = 40, 512


def blocks(folder):
    random = np.random.default_rng(20240607)
    writer = gguf.GGUFWriter(folder + "/blocks.gguf", "llama")
    writer.add_custom_alignment(64)
    writer.add_string("text", "\u00e9 \u2581")
    wanted = {}
    for name in TYPES:
        block, size = gguf.GGML_QUANT_SIZES[Type[name]]
        data = random.integers(0, 256, (ROWS, COLUMNS // block * size), dtype=np.uint8)
        if name == "F32":
            data = data.view(np.float32)
        elif name == "F16":
            data = data.view(np.float16)
        with np.errstate(all="ignore"):
            wanted[name] = gguf.quants.dequantize(data, Type[name]).reshape(ROWS, COLUMNS).copy()
        writer.add_tensor(name, data, raw_dtype=Type[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    safetensors.numpy.save_file(wanted, folder + "/wanted.safetensors")


def check(folder):
    values = safetensors.numpy.load_file(folder + "/source.safetensors")["x"]
    reader = gguf.GGUFReader(folder + "/ours.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert fields == {
        "general.architecture": "llama",
        "count": 7,
        "small": -2.5,
        "flag": True,
        "words": ["a", "\u00e9"],
        "types": [1, -1],
    }, fields
    for tensor in reader.tensors:
        assert tensor.name == tensor.tensor_type.name and list(tensor.shape) == [96, 7], tensor
        ours = np.ascontiguousarray(tensor.data).view(np.uint8).reshape(7, -1)
        theirs = np.ascontiguousarray(gguf.quants.quantize(values, tensor.tensor_type)).view(np.uint8).reshape(7, -1)
        assert (ours == theirs).all(), f"{tensor.name}: {(ours != theirs).sum()} bytes differ"
    print(f"{len(reader.tensors)} tensors equal")


{"blocks": blocks, "check": check}[sys.argv[1]](sys.argv[2])
