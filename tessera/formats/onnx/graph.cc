#include "tessera/formats/onnx/graph.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/base/text/utf8.h"

namespace tessera::onnx {
namespace {

constexpr int64_t kFirstOpset = 11, kLastOpset = 23;
constexpr int64_t kLargestSize = int64_t{1} << 62;

void check_name(const std::string& name) {
  TESSERA_CHECK(!name.empty() && is_valid_utf8(name), ErrorKind::kConfig,
                "[onnx.graph] name: found {}, wanted UTF-8 that is not empty", quote(name));
}

void check_type(const std::string& name, const ValueType& type) {
  data_type(type.dtype);
  for (const auto& dim : type.shape) {
    if (const auto* symbol = std::get_if<std::string>(&dim)) check_name(*symbol);
    const auto* size = std::get_if<int64_t>(&dim);
    TESSERA_CHECK(size == nullptr || (*size >= 0 && *size <= kLargestSize), ErrorKind::kShape,
                  "[onnx.graph] {}: found size {}, wanted 0 to 2^62", quote(name), *size);
  }
}

}  // namespace

int32_t data_type(at::ScalarType dtype) {
  constexpr std::pair<at::ScalarType, int32_t> kTypes[] = {
      {at::kFloat, 1},          {at::kByte, 2},           {at::kChar, 3},
      {at::kUInt16, 4},         {at::kShort, 5},          {at::kInt, 6},
      {at::kLong, 7},           {at::kBool, 9},           {at::kHalf, 10},
      {at::kDouble, 11},        {at::kUInt32, 12},        {at::kUInt64, 13},
      {at::kComplexFloat, 14},  {at::kComplexDouble, 15}, {at::kBFloat16, 16},
      {at::kFloat8_e4m3fn, 17}, {at::kFloat8_e5m2, 19}};
  for (const auto& [known, number] : kTypes) {
    if (known == dtype) return number;
  }
  raise(ErrorKind::kConfig, "[onnx.data_type] dtype: found {}, which ONNX does not support. Cast the tensor first.",
        c10::toString(dtype));
}

std::string ValueType::to_string() const {
  std::string out = std::string(c10::toString(dtype)) + "(";
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) out += ", ";
    if (const auto* size = std::get_if<int64_t>(&shape[i])) {
      out += std::to_string(*size);
    } else if (const auto* symbol = std::get_if<std::string>(&shape[i])) {
      out += *symbol;
    } else {
      out += "*";
    }
  }
  return out + ")";
}

Graph::Graph(const GraphOptions& options) : options_(options) {
  check_name(options.name);
  TESSERA_CHECK(options.opset >= kFirstOpset && options.opset <= kLastOpset, ErrorKind::kConfig,
                "[onnx.graph] opset: found {}, wanted {} to {}", options.opset, kFirstOpset, kLastOpset);
}

// All functions look up a value with at(), which rejects values of another graph: their index could exist in this
// graph, but would belong to another value.
const Graph::ValueRecord& Graph::at(Value value) const {
  TESSERA_CHECK(value.graph_ == this, ErrorKind::kConfig,
                "[onnx.graph] {}: found a value of {}, wanted one of this graph", quote(options_.name),
                value.defined() ? "another graph" : "no graph");
  return records_[value.index_];
}

std::string Graph::reserve_name(const std::string& name) {
  check_name(name);
  TESSERA_CHECK(names_.insert(name).second, ErrorKind::kConfig,
                "[onnx.graph] {}: the name is taken. Declare inputs and initializers first, each under a name of its "
                "own.",
                quote(name));
  return name;
}

// Returns `hint`, or hint_1, hint_2, ... when it is taken. numbers_ keeps the next number of each hint, so many nodes
// with one hint need no search from 1.
std::string Graph::make_unique_name(std::string_view hint) {
  std::string name(hint);
  check_name(name);
  size_t& next = numbers_.try_emplace(name, 1).first->second;
  while (!names_.insert(name).second) name = std::string(hint) + "_" + std::to_string(next++);
  return name;
}

Value Graph::add(ValueRecord record) {
  records_.push_back(std::move(record));
  return {this, records_.size() - 1};
}

Value Graph::input(const std::string& name, ValueType type) {
  check_type(name, type);
  inputs_.push_back(add({.name = reserve_name(name), .type = std::move(type)}));
  return inputs_.back();
}

Value Graph::add_initializer(std::string name, const at::Tensor& tensor) {
  const ValueType type{tensor.scalar_type(), {tensor.sizes().begin(), tensor.sizes().end()}};
  initializers_.push_back(add({.name = std::move(name), .type = type, .tensor = tensor.detach()}));
  return initializers_.back();
}

Value Graph::initializer(const std::string& name, const at::Tensor& tensor) {
  TESSERA_CHECK(tensor.defined() && tensor.layout() == at::kStrided && tensor.has_storage() && !tensor.is_meta(),
                ErrorKind::kShape,
                "[onnx.graph] {}: found a tensor without plain memory, wanted a dense one. Gather a sharded tensor and "
                "load a meta tensor first.",
                quote(name));
  data_type(tensor.scalar_type());
  return add_initializer(reserve_name(name), tensor);
}

Value Graph::constant(const at::Tensor& tensor, std::string_view hint) {
  return add_initializer(make_unique_name(hint), tensor);
}

Value Graph::constant(const std::vector<int64_t>& values, std::string_view hint) {
  return constant(at::tensor(values, at::kLong), hint);
}

std::vector<Value> Graph::node(GraphNode node, std::vector<ValueType> outputs) {
  for (const auto& input : node.inputs) {
    if (input.defined()) at(input);
  }
  check_name(node.op_type);
  for (const auto& type : outputs) check_type(node.op_type, type);
  const size_t index = nodes_.size();
  node.name = node.op_type + "_" + std::to_string(index);
  node.outputs.clear();
  const std::string hint = node.hint.empty() ? node.op_type : node.hint;
  for (auto& type : outputs) {
    node.outputs.push_back(add({.name = make_unique_name(hint), .type = std::move(type), .node = index}));
  }
  nodes_.push_back(std::move(node));
  return nodes_.back().outputs;
}

Value Graph::node(GraphNode node, ValueType output) {
  return this->node(std::move(node), std::vector<ValueType>{std::move(output)}).front();
}

// ONNX outputs are named values, and a value has one name. So only the result of a node that is not an output yet can
// be renamed; other values pass through an Identity node.
void Graph::output(Value value, const std::string& name) {
  const bool is_output = std::ranges::find(outputs_, value) != outputs_.end();
  if (!at(value).node || is_output) {
    const ValueType copied = type(value);
    const std::string hint = this->name(value);
    value = node({.op_type = "Identity", .inputs = {value}, .hint = hint}, copied);
  }
  if (!name.empty() && name != this->name(value)) {
    auto& record = records_[value.index_];
    const std::string made = record.name;
    record.name = reserve_name(name);
    names_.erase(made);
  }
  outputs_.push_back(value);
}

std::string Graph::producer_type(Value value) const {
  const ValueRecord& record = at(value);
  if (record.node) return nodes_[*record.node].op_type;
  return record.tensor.defined() ? "Constant" : "Param";
}

const at::TensorBase* Graph::tensor(Value value) const {
  const ValueRecord& record = at(value);
  return record.tensor.defined() ? &record.tensor : nullptr;
}

}  // namespace tessera::onnx
