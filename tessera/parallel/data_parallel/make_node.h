// Creates autograd nodes with the pointer type that this version of libtorch uses for nodes.
#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace tessera {

// std::shared_ptr or c10::intrusive_ptr, depending on the version of libtorch.
using NodePtr = std::remove_cvref_t<decltype(std::declval<torch::autograd::Edge>().function)>;

// Makes a node. Returns the owning pointer, for use in the autograd graph, and a raw pointer of type NodeType to the
// node.
template <class NodeType, class Pointer = NodePtr>
std::pair<Pointer, NodeType*> make_node() {
  auto node = [] {
    if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
      return std::make_shared<NodeType>();
    } else {
      return c10::make_intrusive<NodeType>();
    }
  }();
  auto* plain = node.get();
  return {Pointer(std::move(node)), plain};
}

}  // namespace tessera
