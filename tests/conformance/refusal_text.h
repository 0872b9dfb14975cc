// The whole texts of the errors with which an operation may refuse, because it would lose a write or would have to
// copy. "{}" stands for any text.
//
//   if (is_refusal(error, kInPlaceTexts)) ...
#pragma once

#include <algorithm>
#include <iterator>
#include <string>

namespace tessera::testing {

inline constexpr const char* kLostWriteTexts[] = {
    "Sharding dimension mismatch: [dtensor.dispatch] aten::{}: '{}' is a view along a sharded dim and holds a gathered "
    "copy, so a write to it would be lost. Clone it, or redistribute the tensor before taking "
    "the view."};
inline constexpr const char* kInPlaceTexts[] = {
    "Sharding dimension mismatch: [dtensor.dispatch] aten::{}: in-place operations that require placement changes are "
    "not supported. The written tensor has placement {}, but no valid strategy preserves it on mesh dim {}. Use the "
    "out-of-place version, or redistribute first.",
    "Sharding dimension mismatch: [dtensor.dispatch] aten::{}: in-place operations that require placement changes are "
    "not supported. '{}' is written and has placement {}, wanted {}. Use the out-of-place version, or redistribute "
    "first.",
    "Sharding dimension mismatch: [dtensor.dispatch] aten::{}: the other operands cannot be redistributed to the "
    "placements of the written tensor. Use the out-of-place version, or redistribute first."};
// Errors of operations that write a value which every rank needs as a whole.
inline constexpr const char* kWholeTexts[] = {
    "Sharding dimension mismatch: [dtensor.dispatch] aten::{}: a gradient of shape [{}] has placements ({}), wanted "
    "reduced ones. Redistribute it first.",
    "Sharding dimension mismatch: [dtensor.dispatch] aten::{}: out has placements ({}), wanted shards and replicas. "
    "Redistribute it first."};
inline constexpr const char* kViewTexts[] = {
    "Sharding dimension mismatch: [dtensor.dispatch] aten::{} to [{}]: Cannot flatten unevenly sharded tensor: "
    "dimension {} (size {}) is not evenly divisible by mesh dimension {} (size {}). Please redistribute the tensor "
    "before this operation.",
    "Sharding dimension mismatch: [dtensor.dispatch] aten::{} to [{}]: Cannot unflatten unevenly sharded tensor: "
    "output dimension {} (size {}) is not evenly divisible by mesh dimension {} (size {}). Please redistribute the "
    "tensor before this operation.",
    "Sharding dimension mismatch: [dtensor.dispatch] aten::{}: {} It cannot be performed without redistribution, "
    "which is disallowed by the current operator. Please redistribute the tensor to {} before this operation."};

// Whether `text` matches the pattern, in which each "{}" stands for any text.
inline bool matches_text(const std::string& text, const std::string& pattern) {
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
    if (found == std::string::npos || (from == 0 && found != 0)) return false;
    at = found + piece.size();
    from = end + hole.size();
  }
}

// Whether the error matches one of the texts.
template <class Texts>
bool is_refusal(const std::string& error, const Texts& texts) {
  return std::any_of(std::begin(texts), std::end(texts), [&](const char* text) { return matches_text(error, text); });
}

// Whether the error is one with which an operation that writes to an argument may refuse.
inline bool is_refusal_to_write(const std::string& error) {
  return is_refusal(error, kInPlaceTexts) || is_refusal(error, kLostWriteTexts) || is_refusal(error, kWholeTexts);
}

}  // namespace tessera::testing
