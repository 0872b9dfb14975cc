// Classes and functions that a pickle names and calls. Only names in the list of pickle_names.h are accepted. A call
// becomes an object in the tree and is not executed.
#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/base/text/utf8.h"
#include "tessera/formats/torch/pickle_names.h"
#include "tessera/formats/torch/unpickle_machine.h"

namespace tessera {

using detail::PickleContainerNode;
using detail::PickleNode;
using detail::PickleTextNode;

void Unpickler::global(std::string_view module, std::string_view name) {
  const auto canonical = canonical_pickle_name(module, name);
  if (!is_known_pickle_name(canonical)) {
    fail(
        "the pickle refers to {}, which is neither needed for tensors nor known to be harmless. Only tensors, numbers, "
        "text, bytes, lists, tuples, dicts and sets are read.",
        quote(std::string(module) + "." + std::string(name)));
  }
  push_parts(PickleKind::kGlobal, {canonical.module, canonical.name});
}

// Converts calls of set, bytes and OrderedDict to values of these kinds. Returns false for any other callee.
bool Unpickler::reduce_to_value(const PickleValue& callee, std::span<const PickleValue> args) {
  if (callee.is_global("builtins.set")) {
    if (args.size() > 1 || (args.size() == 1 && args[0].kind() != PickleKind::kList)) {
      fail("a set whose argument is not a list");
    }
    std::vector<PickleValue> items;
    if (!args.empty()) items.assign(args[0].items().begin(), args[0].items().end());
    push_parts(PickleKind::kSet, std::move(items));
    return true;
  }
  if (callee.is_global("builtins.bytes")) {
    if (!args.empty()) fail("bytes made from {}", args[0].describe());
    push_text(PickleKind::kBytes, "");
    return true;
  }
  if (callee.is_global("_codecs.encode")) return reduce_to_bytes(args);
  if (callee.is_global("collections.OrderedDict")) return reduce_to_ordered_dict(args);
  return false;
}

// Inverse of Pickler::write_bytes(): one character of latin1 text is one byte.
bool Unpickler::reduce_to_bytes(std::span<const PickleValue> args) {
  const bool texts = args.size() == 2 && args[0].kind() == PickleKind::kText && args[1].kind() == PickleKind::kText;
  if (!texts || (args[1].as_text() != "latin1" && args[1].as_text() != "latin-1")) {
    fail("_codecs.encode of anything but text as latin1");
  }
  const auto& text = args[0].as_text();
  std::string decoded;
  for (size_t i = 0; i < text.size();) {
    const auto character = decode_utf8(text.data() + i);
    if (character.code > 0xFF) fail("_codecs.encode: {} is not in latin1", quote(text));
    decoded.push_back(static_cast<char>(character.code));
    i += character.length;
  }
  push_text(PickleKind::kBytes, decoded);
  return true;
}

bool Unpickler::reduce_to_ordered_dict(std::span<const PickleValue> args) {
  std::vector<PickleValue> parts;
  if (args.size() > 1 || (args.size() == 1 && args[0].kind() != PickleKind::kList)) {
    fail("an OrderedDict whose argument is not a list");
  }
  if (!args.empty()) {
    for (const auto& pair : args[0].items()) {
      const bool is_sequence = pair.kind() == PickleKind::kList || pair.kind() == PickleKind::kTuple;
      if (!is_sequence || pair.items().size() != 2) fail("an OrderedDict of {}, wanted pairs", pair.describe());
      parts.insert(parts.end(), pair.items().begin(), pair.items().end());
    }
  }
  push_parts(PickleKind::kDict, std::move(parts));
  std::get<4>(top().value_)->ordered = true;
  return true;
}

void Unpickler::reduce() {
  const auto args = pop();
  const auto callee = pop();
  if (args.kind() != PickleKind::kTuple) fail("REDUCE with {}, wanted a tuple", args.describe());
  if (callee.kind() != PickleKind::kGlobal) fail("REDUCE of {}, wanted a class or function", callee.describe());
  seal(args);
  if (reduce_to_value(callee, args.items())) return;
  std::vector<PickleValue> parts{callee, PickleValue()};
  parts.insert(parts.end(), args.items().begin(), args.items().end());
  push_parts(PickleKind::kObject, std::move(parts));
}

void Unpickler::new_object() {
  const auto args = pop();
  const auto cls = pop();
  if (cls.kind() != PickleKind::kGlobal) fail("NEWOBJ of {}, wanted a class", cls.describe());
  if (args.kind() != PickleKind::kTuple || !args.items().empty()) fail("NEWOBJ with {}, wanted ()", args.describe());
  if (reduce_to_value(cls, {})) return;
  push_parts(PickleKind::kObject, {cls, PickleValue()});
  std::get<4>(top().value_)->instance = true;
}

// The opcode BUILD sets the state of an instance, at most once. An OrderedDict keeps its state as the last part of its
// node, after the keys and values. open_container() rejects an OrderedDict whose node is sealed (already part of
// another value), and attach_child() seals the node of the state. So if the node of the OrderedDict is sealed after
// attach_child(), the OrderedDict is its own state, which is an error.
void Unpickler::build() {
  auto state = pop();
  const auto target = top();
  if (target.is_ordered_dict()) {
    auto& node = open_container(PickleKind::kDict, "BUILD");
    if (node.parts.size() % 2 != 0) fail("BUILD twice on one OrderedDict");
    if (state.kind() != PickleKind::kDict) fail("BUILD of an OrderedDict with {}, wanted a dict", state.describe());
    attach_child(node, state);
    if (node.sealed) fail("BUILD puts a value into itself");
    node.parts.push_back(std::move(state));
    return;
  }
  if (!target.is_instance()) fail("BUILD on {}, which has no state", target.describe());
  auto& node = open_container(PickleKind::kObject, "BUILD");
  if (!node.parts[1].is_none()) fail("BUILD twice on {}", target.describe());
  if (state.kind() != PickleKind::kDict && state.kind() != PickleKind::kTuple) {
    fail("BUILD of {} with {}, wanted a dict or tuple", target.describe(), state.describe());
  }
  attach_child(node, state);
  node.parts[1] = std::move(state);
}

}  // namespace tessera
