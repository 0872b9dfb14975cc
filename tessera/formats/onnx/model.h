// ONNX model files: a graph with its initializers, inside the file or in a second file next to it.
//
//   onnx::write_model("model.onnx", graph);
//   onnx::write_model("model.onnx", graph, {.external_from_bytes = 1024});     // and model.onnx.data
//
// Each file appears whole or not at all. Layout on disk: docs/format/onnx.md. Errors: kIo when the disk refuses, kShape
// for a graph without outputs, kConfig for invalid options and for a model of 2 GiB or more without its external data,
// which protobuf cannot hold. Tensors are copied to the CPU one at a time. No communication.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>

#include "tessera/formats/onnx/graph.h"

namespace tessera::onnx {

struct WriteOptions {
  // Initializers of at least this many bytes are written to PATH.data. Default: none.
  int64_t external_from_bytes = std::numeric_limits<int64_t>::max();
  // Alignment of the initializers in PATH.data, a power of two. Readers that map the file need whole pages.
  int64_t alignment_bytes = 4096;
};

// Replaces the file PATH. After an interruption PATH may be missing; it never exists with the data of another model.
void write_model(const std::filesystem::path& path, const Graph& graph, const WriteOptions& options = {});

// The bytes of a model without external data.
std::string model_bytes(const Graph& graph);

}  // namespace tessera::onnx
