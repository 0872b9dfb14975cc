"""Checks, loads and runs every ONNX model of DIR/models.json: onnx_oracle.py DIR. DIR/tensors.safetensors has the
inputs ("NAME/INPUT") and the expected outputs ("NAME//expected")."""

import json
import sys

import numpy as np
import onnx
import onnxruntime
from safetensors import safe_open

# Expected dtypes of the initializers. Their values alternate between 0 and 1.
DTYPES = {
    "Double": np.float64, "Half": np.float16, "Long": np.int64, "Int": np.int32, "Short": np.int16, "Char": np.int8,
    "Byte": np.uint8, "Bool": np.bool_, "UInt16": np.uint16, "UInt32": np.uint32, "UInt64": np.uint64,
    "ComplexFloat": np.complex64,
}


def dims(value):
    return [dim.dim_value if dim.HasField("dim_value") else None for dim in value.type.tensor_type.shape.dim]


def check_file(path):
    onnx.checker.check_model(path, full_check=True)
    with open(path, "rb") as stream:
        ours = stream.read()
    model = onnx.ModelProto()
    model.ParseFromString(ours)
    assert model.SerializeToString(deterministic=True) == ours, "protobuf serializes the model to other bytes"
    # The sizes in our model must equal those that onnx infers, except where onnx infers none.
    declared = {value.name: dims(value) for value in [*model.graph.value_info, *model.graph.output]}
    without_shapes = onnx.ModelProto()
    without_shapes.CopyFrom(model)
    del without_shapes.graph.value_info[:]
    for value in without_shapes.graph.output:
        value.type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(without_shapes, strict_mode=True, data_prop=True).graph
    for value in [*inferred.value_info, *inferred.output]:
        if value.type.tensor_type.HasField("shape"):
            inferred_dims = dims(value)
            assert len(inferred_dims) == len(declared[value.name]), (value.name, inferred_dims, declared[value.name])
            for a, b in zip(inferred_dims, declared[value.name]):
                assert a is None or b is None or a == b, (value.name, inferred_dims, declared[value.name])
    for node in model.graph.node:
        assert node.output[0] in declared, node.output
    return model


def check_initializers(path, folder):
    for tensor in onnx.load(path).graph.initializer:
        if tensor.name in DTYPES:
            values = onnx.numpy_helper.to_array(tensor)
            assert values.dtype == DTYPES[tensor.name], (tensor.name, values.dtype)
            assert (values == np.arange(900) % 2).all(), tensor.name


def run(path, inputs):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return session.run(None, inputs)[0]


def check(folder):
    onnxruntime.set_default_logger_severity(4)
    with open(folder + "/models.json") as stream:
        models = json.load(stream)
    with safe_open(folder + "/tensors.safetensors", framework="np") as tensors:
        for entry in models:
            path = f"{folder}/{entry['name']}.onnx"
            try:
                model = check_file(path)
                check_initializers(path, folder)
                inputs = {name: tensors.get_tensor(f"{entry['name']}/{name}") for name in entry["inputs"]}
                if not entry["runs"]:
                    try:
                        actual = run(path, inputs)
                    except Exception as error:
                        assert "onnxruntime" in type(error).__module__, error
                        continue
                    raise AssertionError(f"ran, with a result of {actual.shape}")
                expected = tensors.get_tensor(entry["name"] + "//expected")
                actual = run(path, inputs)
                assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), (actual.dtype, actual.shape)
                if "MatMul" in [node.op_type for node in model.graph.node]:
                    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
                else:
                    np.testing.assert_array_equal(actual, expected)
                for size, declared in zip(actual.shape, dims(model.graph.output[0])):
                    assert declared in (None, size), (actual.shape, dims(model.graph.output[0]))
            except Exception as error:
                raise AssertionError(f"{entry['name']}: {error}") from error
    print(f"{len(models)} models right")


check(sys.argv[1])
