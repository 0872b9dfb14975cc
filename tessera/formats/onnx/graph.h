// A graph of ONNX operators, built node by node.
//
//   onnx::Graph graph({.opset = 11});
//   auto x = graph.input("x", {at::kFloat, {"batch", 3}});
//   auto w = graph.initializer("weight", weight);                       // keeps the tensor, no copy
//   auto y = graph.node({.op_type = "MatMul", .inputs = {x, w}}, {at::kFloat, {"batch", 5}});
//   graph.output(y, "y");
//   onnx::write_model("model.onnx", graph);                             // model.h
//
// A Value is the result of an input, an initializer or a node. A node takes only values that exist already, so the
// graph has no cycles and its nodes are in topological order. Every value has a type with a known rank; a size may be a
// number, a name or unknown. The caller gives the type of a node's result; the graph does not infer types. Names are
// unique: a name that the caller gives is kept, and a name made from a hint gets a number when the hint is taken. Not
// thread-safe. No communication.
#pragma once

#include <ATen/core/TensorBase.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace at {
class Tensor;
}

namespace tessera::onnx {

// A size of a tensor: unknown, a number, or a name. Sizes with the same name are equal.
using Dim = std::variant<std::monostate, int64_t, std::string>;

struct ValueType {
  at::ScalarType dtype = at::kFloat;
  std::vector<Dim> shape = {};

  int64_t rank() const { return static_cast<int64_t>(shape.size()); }
  // The type in TorchScript's notation: "Float(batch, 3, *)".
  std::string to_string() const;
  bool operator==(const ValueType&) const = default;
};

// The number of a dtype in TensorProto.DataType. Error kConfig for a dtype that ONNX does not have.
int32_t data_type(at::ScalarType dtype);

class Graph;

// A value of one graph. A default-constructed Value means that an optional input of a node is absent.
class Value {
 public:
  Value() = default;
  bool defined() const { return graph_ != nullptr; }
  bool operator==(const Value&) const = default;

 private:
  friend class Graph;
  Value(const Graph* graph, size_t index) : graph_(graph), index_(index) {}
  const Graph* graph_ = nullptr;
  size_t index_ = 0;
};

using Attribute = std::variant<int64_t, float, std::string, std::vector<int64_t>, std::vector<float>,
                               std::vector<std::string>, at::TensorBase>;

struct GraphNode {
  std::string op_type;
  std::vector<Value> inputs = {};
  std::vector<std::pair<std::string, Attribute>> attributes = {};
  std::string hint = {};            // base of the outputs' names; empty: the operator's name
  std::string name = {};            // set by the graph
  std::vector<Value> outputs = {};  // set by the graph
};

struct GraphOptions {
  std::string name = "main";
  int64_t opset = 11;  // 11 to 23
};

class Graph {
 public:
  // Makes an empty graph. Error kConfig if GraphOptions::opset is not in 11 to 23.
  explicit Graph(const GraphOptions& options = {});
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  // input() adds an input to the graph, and initializer() a constant. Errors: kConfig for a name that is taken, empty
  // or not UTF-8, and for a dtype that ONNX does not have; kShape for a size below 0 or above 2^62.
  Value input(const std::string& name, ValueType type);
  Value initializer(const std::string& name, const at::Tensor& tensor);  // kShape for a tensor without plain memory
  // An initializer with a name made from `hint`.
  Value constant(const at::Tensor& tensor, std::string_view hint = "constant");
  Value constant(const std::vector<int64_t>& values, std::string_view hint = "constant");  // int64, 1-d
  Value node(GraphNode node, ValueType output);
  std::vector<Value> node(GraphNode node, std::vector<ValueType> outputs);
  // Marks a value as an output. `name` renames the result of a node. An input, an initializer or a value that is an
  // output already keeps its name, and an Identity node with the new name is added. An empty name keeps the value's
  // name.
  void output(Value value, const std::string& name = {});

  const std::string& name() const { return options_.name; }
  int64_t opset() const { return options_.opset; }
  // The type and the name of a value. Error kConfig for a value of another graph.
  const ValueType& type(Value value) const { return at(value).type; }
  const std::string& name(Value value) const { return at(value).name; }
  // Returns the op_type of the node that makes the value; "Param" for an input, "Constant" for an initializer.
  std::string producer_type(Value value) const;
  // The tensor of an initializer; null for other values.
  const at::TensorBase* tensor(Value value) const;

  const std::vector<Value>& inputs() const { return inputs_; }
  const std::vector<Value>& initializers() const { return initializers_; }
  const std::vector<Value>& outputs() const { return outputs_; }
  const std::vector<GraphNode>& nodes() const { return nodes_; }

 private:
  struct ValueRecord {
    std::string name;
    ValueType type;
    at::TensorBase tensor = {};       // set for an initializer
    std::optional<size_t> node = {};  // index of the node that makes the value
  };
  const ValueRecord& at(Value value) const;
  Value add(ValueRecord record);
  Value add_initializer(std::string name, const at::Tensor& tensor);
  std::string reserve_name(const std::string& name);
  std::string make_unique_name(std::string_view hint);

  GraphOptions options_;
  std::vector<ValueRecord> records_;
  std::vector<Value> inputs_, initializers_, outputs_;
  std::vector<GraphNode> nodes_;
  std::set<std::string, std::less<>> names_;
  std::map<std::string, size_t, std::less<>> numbers_;  // by hint: the next number to try
};

}  // namespace tessera::onnx
