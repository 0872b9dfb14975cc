"""Writes the seeds of tests/fuzz/corpus/{pickle,zip,dcp_metadata}: small files that PyTorch writes, and some that
Tessera must refuse. Run it from the root of the source tree."""

import io
import os
import pickle
import tempfile
import zipfile
from collections import OrderedDict

import torch
import torch.distributed.checkpoint as dcp

ROOT = "tests/fuzz/corpus/"


def put(name, data):
    os.makedirs(os.path.dirname(ROOT + name), exist_ok=True)
    with open(ROOT + name, "wb") as stream:
        stream.write(data)


def saved(value, **options):
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def data_pkl(value, **options):
    with zipfile.ZipFile(io.BytesIO(saved(value, **options))) as archive:
        return archive.read("archive/data.pkl")


objects = {
    "ints": [0, 300, 70000, -1, 2**40], "float": 0.1, "text": "\u00e9", "bytes": b"\x00\xff", "none": None,
    "flags": (True, False), "set": {1}, "ordered": OrderedDict(a=1), "size": torch.Size([2]), 3: torch.float32,
    "long": tuple(range(5)), "device": torch.device("cpu"), "complex": 1j,
}
module = torch.nn.Linear(2, 1)
for protocol in (2, 3, 4, 5):
    put(f"pickle/objects{protocol}", data_pkl(objects, pickle_protocol=protocol))
put("pickle/module", data_pkl(module.state_dict()))
put("pickle/parameter", data_pkl(module.weight))
put("pickle/float8", data_pkl(torch.zeros(2, dtype=torch.uint8).view(torch.float8_e4m3fn)))
put("pickle/system", b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.")
put("pickle/cycle", b"\x80\x02]q\x00h\x00a.")
put("pickle/bomb", b"\x80\x02]q\x00" + b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(40)) + b".")

tied = torch.arange(6, dtype=torch.bfloat16)
put("zip/tensor", saved(torch.ones(2)))
put("zip/empty", saved(torch.empty(0, 3)))
put("zip/object", saved(7))
put("zip/bool", saved({"a": torch.tensor([True, False]), "b": torch.tensor(1, dtype=torch.uint16)}))
put("zip/views", saved([tied[1:3], tied.view(2, 3).t(), tied[0].expand(4), torch.nn.Parameter(tied)]))
packed = io.BytesIO()
with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
    archive.writestr("archive/data.pkl", data_pkl(7))
put("zip/deflated", packed.getvalue())
plain = io.BytesIO()
with zipfile.ZipFile(plain, "w") as archive:
    archive.writestr("a/data.pkl", data_pkl(7))
    with archive.open("a/large", "w", force_zip64=True) as stream:
        stream.write(b"x")
put("zip/zipfile", plain.getvalue())

with tempfile.TemporaryDirectory() as folder:
    state = {
        "w": torch.ones(2, 3), "step": torch.tensor(1.0), "nothing": torch.empty(0, 2), "n": 7,
        "opt": {"groups": [{"lr": 0.1, "t": torch.ones(1, dtype=torch.bfloat16)}]},
    }
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    with open(folder + "/.metadata", "rb") as stream:
        whole = stream.read()
    put("dcp_metadata/small", whole)
    metadata = pickle.loads(whole)
    metadata.storage_meta.checkpoint_id = "a/text"
    w = metadata.state_dict_metadata["w"]
    chunk = dcp.metadata.ChunkStorageMetadata
    w.chunks[:] = [chunk(torch.Size([0, 0]), torch.Size([1, 3])), chunk(torch.Size([1, 0]), torch.Size([1, 3]))]
    index = dcp.metadata.MetadataIndex
    metadata.storage_data[index("w", [1, 0])] = metadata.storage_data[index("w", [0, 0])]
    put("dcp_metadata/chunks", pickle.dumps(metadata, 2))
    w.chunks.pop()
    put("dcp_metadata/gap", pickle.dumps(metadata, 5))
    metadata.storage_data[index("w", [0, 0])].relative_path = "../out"
    put("dcp_metadata/outside", pickle.dumps(metadata, 3))
