// ONNX model files: a graph, its initializers inside the file or in one beside it.
//
//   onnx::write_model("model.onnx", graph);
//   onnx::write_model("model.onnx", graph, {.external_from_bytes = 1024});     // and model.onnx.data
//
// Each file appears whole. Layout on disk: docs/format/onnx.md. Errors: kIo when the disk refuses, kShape for a graph
// without outputs, kConfig for options and for a model of 2 GiB or more beside its external data, which protobuf cannot
// hold. Tensors are brought to the CPU one at a time. No communication.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>

#include "tessera/formats/onnx/graph.h"

namespace tessera::onnx {

struct WriteOptions {
  // Initializers of at least this many bytes go into PATH.data; default: none.
  int64_t external_from_bytes = std::numeric_limits<int64_t>::max();
  // Of their places in it, a power of two; readers that map the file want pages.
  int64_t alignment_bytes = 4096;
};

// Replaces what is at PATH. An interruption leaves no model, never one beside the data of another.
void write_model(const std::filesystem::path& path, const Graph& graph, const WriteOptions& options = {});

// The bytes of a model without external data.
std::string model_bytes(const Graph& graph);

}  // namespace tessera::onnx
