// What a PickleValue points to. Only the unpickler changes a node, until it lies in another one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/formats/torch/pickle_value.h"

namespace tessera::detail {

struct PickleNode {
  explicit PickleNode(PickleKind of) : kind(of) {}
  PickleKind kind;
  bool ordered = false;   // of a dict: it is an OrderedDict
  bool instance = false;  // of an object: made without a call
  bool sealed = false;    // it lies in another node
  uint32_t depth = 1;     // levels, this one among them
  uint64_t cost = 0;      // bytes that it stands for, everything in it counted where it appears
};

struct PickleTextNode : PickleNode {
  PickleTextNode(PickleKind of, std::string from) : PickleNode(of), text(std::move(from)) {}
  std::string text;
};

// list, tuple, set: the items. dict: key, value, key, value, ... and at the end the state of an OrderedDict that has
// one. global: module and name. object: global, state, arguments. persistent: the id.
struct PicklePartsNode : PickleNode {
  PicklePartsNode(PickleKind of, std::vector<PickleValue> from) : PickleNode(of), parts(std::move(from)) {}
  std::vector<PickleValue> parts;
};

inline const std::string& text_of(const PickleNode& node) { return static_cast<const PickleTextNode&>(node).text; }
inline const std::vector<PickleValue>& parts_of(const PickleNode& node) {
  return static_cast<const PicklePartsNode&>(node).parts;
}

}  // namespace tessera::detail
