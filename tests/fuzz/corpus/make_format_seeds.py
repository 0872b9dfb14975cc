"""Writes the seeds of tests/fuzz/corpus/{safetensors,gguf}: small valid files. Run it from the root of the source tree."""

import gguf
import numpy as np
import safetensors.numpy

ROOT = "tests/fuzz/corpus/"

safetensors.numpy.save_file({}, ROOT + "safetensors/empty")
safetensors.numpy.save_file(
    {"a": np.ones((2, 3), np.float32), "b": np.zeros(3, np.bool_), "c": np.full((), 1, np.float16)},
    ROOT + "safetensors/three", metadata={"format": "pt"})

writer = gguf.GGUFWriter(ROOT + "gguf/typed", "llama")
writer.add_custom_alignment(32)
writer.add_bool("flag", True)
writer.add_array("words", ["a", "bc"])
writer.add_array("numbers", [1, -2])
writer.add_float64("ratio", 0.5)
for name, bytes_per_row in (("Q4_1", 20), ("Q8_0", 34), ("Q6_K", 210)):
    writer.add_tensor(name, np.ones((1, bytes_per_row), np.uint8), raw_dtype=gguf.GGMLQuantizationType[name])
writer.add_tensor("F16", np.ones(4, np.float16))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
