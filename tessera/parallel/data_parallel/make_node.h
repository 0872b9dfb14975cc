// Autograd nodes of our own, whichever pointer the version of libtorch holds them by.
#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace tessera {

// shared_ptr or intrusive_ptr.
using NodePtr = std::remove_cvref_t<decltype(std::declval<torch::autograd::Edge>().function)>;

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
