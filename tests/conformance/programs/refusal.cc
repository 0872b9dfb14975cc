#include "tests/conformance/programs/refusal.h"

#include <algorithm>

#include "tests/conformance/programs/evaluate.h"

namespace tessera::testing {

namespace {

const char* const kLostWrites[] = {
    "Sharding dimension mismatch: [dtensor.dispatch] aten::{}: '{}' is a view along a sharded dim, which holds a "
    "gathered "
    "copy, so that what is written to it would be lost. Clone it, or redistribute the tensor before taking the view."};
const char* const kInPlaces[] = {
    "Sharding dimension mismatch: [dtensor.dispatch] aten::{}: in-place operations that require placement changes are "
    "not "
    "supported. What is written has placement {}, but no valid strategy preserves it on mesh dim {}. "
    "Use the out-of-place version, or redistribute first.",
    "Sharding dimension mismatch: [dtensor.dispatch] aten::{}: in-place operations that require placement changes are "
    "not "
    "supported. '{}' is written and has placement {}, wanted {}. Use the out-of-place version, or redistribute first.",
    "Sharding dimension mismatch: [dtensor.dispatch] aten::{}: nothing brings the other operands to where what is "
    "written "
    "lies. Use the out-of-place version, or redistribute first."};
const char* const kViews[] = {
    "Sharding dimension mismatch: [dtensor.dispatch] aten::view({} to [{}]: Cannot flatten unevenly sharded tensor: "
    "dimension {} (size {}) is not evenly divisible by mesh dimension {} (size {}). Please redistribute the tensor "
    "before "
    "this operation.",
    "Sharding dimension mismatch: [dtensor.dispatch] aten::view({} to [{}]: Cannot unflatten unevenly sharded tensor: "
    "output dimension {} (size {}) is not evenly divisible by mesh dimension {} (size {}). Please redistribute the "
    "tensor "
    "before this operation.",
    "Sharding dimension mismatch: [dtensor.dispatch] aten::view({}: {} It cannot be performed without redistribution, "
    "which is disallowed by the current operator. Please redistribute the tensor to {} before this operation."};

template <class Patterns>
bool any_matches(const std::string& text, const Patterns& patterns) {
  return std::any_of(std::begin(patterns), std::end(patterns), [&](const char* one) { return matches(text, one); });
}

}  // namespace

const char* to_string(Refusal kind) {
  switch (kind) {
    case Refusal::kNone:
      return "none";
    case Refusal::kLostWrite:
      return "a write through a view of a gathered copy";
    case Refusal::kInPlace:
      return "in place, to another placement";
    case Refusal::kView:
      return "a view that cannot alias";
  }
  return "?";
}

bool matches(const std::string& text, const std::string& pattern) {
  const std::string hole = "{}";
  size_t at = 0;
  size_t from = 0;
  for (;;) {
    const size_t end = pattern.find(hole, from);
    const std::string piece = pattern.substr(from, end == std::string::npos ? end : end - from);
    if (end == std::string::npos) {  // the last piece ends the text
      return from == 0 ? text == piece : text.size() >= at + piece.size() && text.ends_with(piece);
    }
    const size_t found = text.find(piece, at);
    if (found == std::string::npos || (from == 0 && found != 0)) {
      return false;
    }
    at = found + piece.size();
    from = end + hole.size();
  }
}

Refusal refusal_of(const Step& step, const std::string& error) {
  if (writes(step)) {
    if (any_matches(error, kLostWrites)) {
      return Refusal::kLostWrite;
    }
    return any_matches(error, kInPlaces) ? Refusal::kInPlace : Refusal::kNone;
  }
  const bool aliases = step.op == "view" || step.op == "unflatten.int";
  return aliases && any_matches(error, kViews) ? Refusal::kView : Refusal::kNone;
}

}  // namespace tessera::testing
