// The nodes behind PickleValue. Only the unpickler changes a node, and only until the node becomes part of another
// node.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/formats/torch/pickle_value.h"

namespace tessera::detail {

struct PickleNode {
  explicit PickleNode(PickleKind of) : kind(of) {}
  PickleKind kind;
  bool ordered = false;   // dict: it is an OrderedDict
  bool instance = false;  // object: made without a call
  bool sealed = false;    // part of another node, so it may not change any more
  uint32_t depth = 1;     // nesting levels, this node included
  uint64_t cost = 0;      // bytes of the tree below, each shared node counted at every place
};

struct PickleTextNode : PickleNode {
  PickleTextNode(PickleKind of, std::string from) : PickleNode(of), text(std::move(from)) {}
  std::string text;
};

// Children by kind. list, tuple, set: the items. dict: key, value, key, value, ... and last the state of an OrderedDict
// that has one. global: module and name. object: global, state, arguments. persistent: the id.
struct PickleContainerNode : PickleNode {
  PickleContainerNode(PickleKind of, std::vector<PickleValue> from) : PickleNode(of), parts(std::move(from)) {}
  std::vector<PickleValue> parts;
};

inline const std::string& text_of(const PickleNode& node) { return static_cast<const PickleTextNode&>(node).text; }
inline const std::vector<PickleValue>& children_of(const PickleNode& node) {
  return static_cast<const PickleContainerNode&>(node).parts;
}

}  // namespace tessera::detail
