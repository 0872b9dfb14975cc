#include "tessera/formats/onnx/model.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <bit>
#include <optional>
#include <span>
#include <system_error>

#include "tessera/base/error.h"
#include "tessera/base/files/staged.h"
#include "tessera/base/text/quote.h"
#include "tessera/base/text/utf8.h"
#include "tessera/base/version.h"
#include "tessera/formats/onnx/protobuf_message.h"

// Field numbers are those of onnx.proto; fields are written by rising number.
namespace tessera::onnx {
namespace {

constexpr size_t kLargestMessage = std::numeric_limits<int32_t>::max();

// The first IR version of ONNX whose release had this opset.
int64_t ir_version(int64_t opset) {
  if (opset <= 11) return 6;
  if (opset <= 14) return 7;
  if (opset <= 18) return 8;
  if (opset <= 20) return 9;
  return opset <= 22 ? 10 : 11;
}

at::Tensor plain_memory(const at::TensorBase& tensor) {
  return at::Tensor(tensor).cpu().contiguous().resolve_conj().resolve_neg();
}

std::string_view bytes_of(const at::Tensor& plain) {
  return {static_cast<const char*>(plain.const_data_ptr()), plain.nbytes()};
}

// The file of initializers that are stored outside the model.
class ExternalFile {
 public:
  ExternalFile(const std::filesystem::path& path, int64_t alignment)
      : file_(path), location_(path.filename().string()), alignment_(static_cast<uint64_t>(alignment)) {}

  // Writes the tensor at the next aligned position and adds its external_data to the TensorProto.
  void put(ProtobufMessage& proto, const at::Tensor& plain) {
    const std::string_view bytes = bytes_of(plain);
    end_ = (end_ + alignment_ - 1) / alignment_ * alignment_;
    file_.write_at(end_, std::as_bytes(std::span(bytes)));
    entry(proto, "location", location_);
    entry(proto, "offset", std::to_string(end_));
    entry(proto, "length", std::to_string(bytes.size()));
    proto.number(14, 1);
    end_ += bytes.size();
  }
  void publish() { file_.publish(); }

 private:
  static void entry(ProtobufMessage& proto, std::string_view key, std::string_view value) {
    ProtobufMessage pair;
    pair.text(1, key);
    pair.text(2, value);
    proto.message(13, pair);
  }

  StagedFile file_;
  std::string location_;
  uint64_t alignment_;
  uint64_t end_ = 0;
};

// Makes a TensorProto; the values go into `external` if it is not null.
ProtobufMessage tensor_proto(const at::TensorBase& tensor, const std::string& name, ExternalFile* external) {
  ProtobufMessage out;
  for (const int64_t size : tensor.sizes()) out.number(1, size);
  out.number(2, data_type(tensor.scalar_type()));
  if (!name.empty()) out.text(8, name);
  const at::Tensor plain = plain_memory(tensor);
  if (external != nullptr) {
    external->put(out, plain);
  } else {
    out.text(9, bytes_of(plain));
  }
  return out;
}

// Makes a ValueInfoProto.
ProtobufMessage value_proto(const std::string& name, const ValueType& type) {
  ProtobufMessage shape;
  for (const auto& dim : type.shape) {
    ProtobufMessage size;
    if (const auto* number = std::get_if<int64_t>(&dim)) size.number(1, *number);
    if (const auto* symbol = std::get_if<std::string>(&dim)) size.text(2, *symbol);
    shape.message(1, size);
  }
  ProtobufMessage tensor, kind, out;
  tensor.number(1, data_type(type.dtype));
  tensor.message(2, shape);
  kind.message(1, tensor);
  out.text(1, name);
  out.message(2, kind);
  return out;
}

// Writes the value of an AttributeProto and returns the number of its AttributeType.
struct PutAttribute {
  ProtobufMessage& out;
  int64_t operator()(int64_t value) const { return out.number(3, value), 2; }
  int64_t operator()(float value) const { return out.real(2, value), 1; }
  int64_t operator()(const std::string& value) const { return out.text(4, value), 3; }
  int64_t operator()(const at::TensorBase& value) const { return out.message(5, tensor_proto(value, "", nullptr)), 4; }
  int64_t operator()(const std::vector<float>& values) const {
    for (const float value : values) out.real(7, value);
    return 6;
  }
  int64_t operator()(const std::vector<int64_t>& values) const {
    for (const int64_t value : values) out.number(8, value);
    return 7;
  }
  int64_t operator()(const std::vector<std::string>& values) const {
    for (const auto& value : values) out.text(9, value);
    return 8;
  }
};

ProtobufMessage node_proto(const Graph& graph, const GraphNode& node) {
  ProtobufMessage out;
  for (const auto& input : node.inputs) out.text(1, input.defined() ? graph.name(input) : "");
  for (const auto& output : node.outputs) out.text(2, graph.name(output));
  out.text(3, node.name);
  out.text(4, node.op_type);
  for (const auto& [name, value] : node.attributes) {
    ProtobufMessage attribute;
    attribute.text(1, name);
    attribute.number(20, std::visit(PutAttribute{attribute}, value));
    out.message(5, attribute);
  }
  return out;
}

void check_size(const Graph& graph, const ProtobufMessage& message) {
  TESSERA_CHECK(message.bytes().size() <= kLargestMessage, ErrorKind::kConfig,
                "[onnx.write] {}: the model is over 2 GiB, which protobuf cannot hold. Set external_from_bytes.",
                quote(graph.name()));
}

// GraphProto: nodes, name, initializers, inputs, outputs, and the types of node results that are not outputs.
ProtobufMessage graph_proto(const Graph& graph, ExternalFile* external, int64_t external_from_bytes) {
  ProtobufMessage out;
  for (const auto& node : graph.nodes()) out.message(1, node_proto(graph, node));
  out.text(2, graph.name());
  for (const auto& value : graph.initializers()) {
    const auto& tensor = *graph.tensor(value);
    const bool is_external = static_cast<int64_t>(tensor.nbytes()) >= external_from_bytes;
    out.message(5, tensor_proto(tensor, graph.name(value), is_external ? external : nullptr));
    check_size(graph, out);
  }
  const auto describe = [&](uint32_t field, Value value) {
    out.message(field, value_proto(graph.name(value), graph.type(value)));
  };
  for (const auto& value : graph.inputs()) describe(11, value);
  for (const auto& value : graph.outputs()) describe(12, value);
  for (const auto& node : graph.nodes()) {
    for (const auto& value : node.outputs) {
      const auto& ends = graph.outputs();
      if (std::ranges::find(ends, value) == ends.end()) describe(13, value);
    }
  }
  return out;
}

std::string model_proto(const Graph& graph, ExternalFile* external, int64_t external_from_bytes) {
  TESSERA_CHECK(!graph.outputs().empty(), ErrorKind::kShape,
                "[onnx.write] {}: the graph has no output. Call output() first.", quote(graph.name()));
  ProtobufMessage out, opset;
  opset.text(1, "");
  opset.number(2, graph.opset());
  out.number(1, ir_version(graph.opset()));
  out.text(2, "tessera");
  out.text(3, version());
  out.message(7, graph_proto(graph, external, external_from_bytes));
  out.message(8, opset);
  check_size(graph, out);
  return out.bytes();
}

bool has_external_data(const Graph& graph, int64_t from_bytes) {
  return std::ranges::any_of(graph.initializers(), [&](const Value& value) {
    return static_cast<int64_t>(graph.tensor(value)->nbytes()) >= from_bytes;
  });
}

void remove_file(const std::filesystem::path& path) {
  std::error_code failure;
  std::filesystem::remove(path, failure);
  TESSERA_CHECK(!failure, ErrorKind::kIo, "[onnx.write] {}: cannot be replaced: {}", path.string(), failure.message());
}

}  // namespace

// Both files are staged and complete before anything is replaced. Then the order is: remove the old model, publish the
// data, publish the new model. So a model file that exists never refers to the data file of another model.
void write_model(const std::filesystem::path& path, const Graph& graph, const WriteOptions& options) {
  TESSERA_CHECK(options.external_from_bytes >= 1, ErrorKind::kConfig,
                "[onnx.write] external_from_bytes: found {}, wanted at least 1", options.external_from_bytes);
  TESSERA_CHECK(options.alignment_bytes > 0 && std::has_single_bit(static_cast<uint64_t>(options.alignment_bytes)),
                ErrorKind::kConfig, "[onnx.write] alignment_bytes: found {}, wanted a power of two",
                options.alignment_bytes);
  std::filesystem::path data_path = path;
  data_path += ".data";
  TESSERA_CHECK(is_valid_utf8(data_path.filename().string()), ErrorKind::kConfig,
                "[onnx.write] {}: the file name is not UTF-8, but the model stores the name of its data file. Choose a "
                "UTF-8 name.",
                quote(path.string()));
  std::optional<ExternalFile> external;
  if (has_external_data(graph, options.external_from_bytes)) external.emplace(data_path, options.alignment_bytes);
  StagedFile model(path);
  const std::string bytes = model_proto(graph, external ? &*external : nullptr, options.external_from_bytes);
  model.write_at(0, std::as_bytes(std::span(bytes)));
  if (external) {
    // An old model at `path` may refer to the data file. external->publish() replaces the data file, so the old model
    // is removed first: no reader can load the old model with the new data.
    remove_file(path);
    external->publish();
  }
  model.publish();
}

std::string model_bytes(const Graph& graph) { return model_proto(graph, nullptr, std::numeric_limits<int64_t>::max()); }

}  // namespace tessera::onnx
