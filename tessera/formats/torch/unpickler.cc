#include "tessera/formats/torch/unpickler.h"

#include <algorithm>
#include <bit>
#include <string_view>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/base/text/utf8.h"
#include "tessera/formats/torch/unpickle_machine.h"

namespace tessera {

using detail::PickleContainerNode;
using detail::PickleNode;
using detail::PickleOp;
using detail::PickleTextNode;

// A pickle is a program for a stack machine. Opcodes push values, MARK records the height of the stack, and container
// opcodes take the values above the last mark. The memo holds values that later opcodes push again. Three rules make a
// hostile pickle harmless: names come from a fixed list (global()); a value that is part of another value does not
// change any more (attach_child(), seal()); and there are limits on the memory of all created values
// (count_created_bytes()) and on the size of a value in which every reference is written out (add_cost()).

std::string_view Unpickler::read_bytes(uint64_t count) {
  if (count > bytes_.size() - position_) {
    fail("{} bytes are needed, {} are left. The pickle is cut off or damaged.", count, bytes_.size() - position_);
  }
  const std::string_view taken(reinterpret_cast<const char*>(bytes_.data()) + position_, static_cast<size_t>(count));
  position_ += static_cast<size_t>(count);
  return taken;
}

std::string_view Unpickler::line() {
  const std::string_view unread(reinterpret_cast<const char*>(bytes_.data()) + position_, bytes_.size() - position_);
  const auto length = unread.substr(0, 1024).find('\n');
  if (length == unread.npos) fail("a name without an end");
  return read_bytes(length + 1).substr(0, length);
}

// LONG1: little-endian two's complement of 0 to 8 bytes, extended by its sign.
int64_t Unpickler::long_integer() {
  const auto digits = sized<uint8_t>();
  if (digits.size() > 8) fail("an integer of {} bytes; only 64-bit integers are read", digits.size());
  uint64_t value = 0;
  for (size_t i = 0; i < digits.size(); ++i) value |= uint64_t{static_cast<uint8_t>(digits[i])} << (8 * i);
  const size_t bits = 8 * digits.size();
  if (bits > 0 && bits < 64 && (value >> (bits - 1)) != 0) value |= ~uint64_t{0} << bits;
  return static_cast<int64_t>(value);
}

double Unpickler::big_endian_float() {
  uint64_t bits = 0;
  for (const char byte : read_bytes(8)) bits = bits << 8 | static_cast<uint8_t>(byte);
  return std::bit_cast<double>(bits);
}

PickleValue Unpickler::pop() {
  auto value = std::move(top());
  stack_.pop_back();
  return value;
}

// Values below the last mark cannot be operands: they were pushed before the container whose items are above the mark.
PickleValue& Unpickler::top() {
  if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) fail("nothing is left on the stack");
  return stack_.back();
}

std::vector<PickleValue> Unpickler::pop_to_mark() {
  if (marks_.empty()) fail("no mark is left on the stack");
  const auto from = stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back());
  std::vector<PickleValue> items(std::make_move_iterator(from), std::make_move_iterator(stack_.end()));
  stack_.erase(from, stack_.end());
  marks_.pop_back();
  return items;
}

// Limits the total memory of all values that the pickle creates. The limit of add_cost() is not enough, because a
// pickle can create many large values without putting them into one tree.
void Unpickler::count_created_bytes(uint64_t bytes) {
  created_bytes_ += bytes;
  if (created_bytes_ > max_cost_) {
    fail("it makes values of more than {} bytes, from {} bytes of input", max_cost_, bytes_.size());
  }
}

// Limits the size of a tree in which every shared value counts once per reference; a reader that walks the tree does
// this much work. Therefore a parent adds the whole cost of each child, even of a shared child.
void Unpickler::add_cost(PickleNode& node, uint64_t cost) const {
  node.cost += cost;
  if (node.cost > max_cost_) {
    fail("written out without references this would be more than {} bytes, from {} bytes of input", max_cost_,
         bytes_.size());
  }
}

void Unpickler::push_node(std::shared_ptr<PickleNode> node, uint64_t own_cost) {
  count_created_bytes(own_cost);
  add_cost(*node, own_cost);
  push(PickleValue(std::move(node)));
}

void Unpickler::push_text(PickleKind kind, std::string_view text) {
  if (kind == PickleKind::kText && !is_valid_utf8(text)) fail("{} is no UTF-8", quote(text));
  push_node(std::make_shared<PickleTextNode>(kind, std::string(text)), 16 + text.size());
}

void Unpickler::push_parts(PickleKind kind, std::vector<PickleValue> parts) {
  count_created_bytes(8 * parts.size());
  auto node = std::make_shared<PickleContainerNode>(kind, std::move(parts));
  for (const auto& part : node->parts) attach_child(*node, part);
  push_node(std::move(node), 16);
}

void Unpickler::push_tuple(size_t count) {
  std::vector<PickleValue> items(count);
  while (count > 0) items[--count] = pop();
  push_parts(PickleKind::kTuple, std::move(items));
}

// Adds the cost and depth of `child` to `parent`, its new parent, and seals `child`: `child` is marked as part of
// another value and must not change any more. So no value can contain itself through other values. A value that is put
// into itself directly is sealed by this call, and the caller reports this as an error.
void Unpickler::attach_child(PickleNode& parent, const PickleValue& child) {
  parent.cost += 8;
  const auto* held = std::get_if<4>(&child.value_);
  if (!held) return;
  seal(child);
  add_cost(parent, (*held)->cost);
  parent.depth = std::max(parent.depth, (*held)->depth + 1);
  if (parent.depth > limits_.max_depth) fail("values are nested more than {} deep", limits_.max_depth);
}

// Marks a value as unchangeable. The keys of a dict or set are checked at this point, because the container is
// complete.
void Unpickler::seal(const PickleValue& value) {
  const auto* held = std::get_if<4>(&value.value_);
  if (!held || (*held)->sealed) return;
  (*held)->sealed = true;
  const auto kind = (*held)->kind;
  if (kind == PickleKind::kDict) check_keys(static_cast<const PickleContainerNode&>(**held), 2);
  if (kind == PickleKind::kSet) check_keys(static_cast<const PickleContainerNode&>(**held), 1);
}

void Unpickler::check_keys(const PickleContainerNode& node, size_t stride) const {
  std::vector<std::string_view> texts;
  std::vector<int64_t> integers;
  for (size_t i = 0; i + stride <= node.parts.size(); i += stride) {
    const auto& key = node.parts[i];
    if (key.kind() == PickleKind::kText) texts.push_back(key.as_text());
    if (key.kind() == PickleKind::kInt) integers.push_back(key.as_int());
  }
  std::ranges::sort(texts);
  std::ranges::sort(integers);
  const auto text = std::ranges::adjacent_find(texts);
  if (text != texts.end()) fail("the key {} is twice in one dict", quote(*text));
  const auto integer = std::ranges::adjacent_find(integers);
  if (integer != integers.end()) fail("the key {} is twice in one dict", *integer);
}

// Returns the container on top of the stack, for an opcode that adds to it. Error kFormat when the container is sealed,
// that is, already part of another value.
PickleContainerNode& Unpickler::open_container(PickleKind kind, const char* op) {
  const auto& value = top();
  if (value.kind() != kind) fail("{} on {}", op, value.describe());
  auto& node = *std::get<4>(value.value_);
  if (node.sealed) fail("{} on {} that is part of another value already, perhaps of itself", op, value.describe());
  return static_cast<PickleContainerNode&>(node);
}

void Unpickler::append(PickleKind kind, std::vector<PickleValue> items, const char* op) {
  auto& node = open_container(kind, op);
  if (kind == PickleKind::kDict && (items.size() % 2 != 0 || node.parts.size() % 2 != 0)) {
    fail("{} on a dict with a key that has no value", op);
  }
  for (auto& item : items) {
    attach_child(node, item);
    if (node.sealed) fail("{} puts {} into itself", op, item.describe());
    node.parts.push_back(std::move(item));
  }
}

void Unpickler::memoize(uint64_t index) {
  // Writers number memo entries from 0, and each entry takes at least one byte of the pickle, so a larger index means a
  // damaged pickle. The check limits the size of memo_.
  if (index >= bytes_.size()) fail("memo entry {} in a pickle of {} bytes", index, bytes_.size());
  if (index >= memo_.size()) memo_.resize(index + 1);
  memo_[index] = top();
}

void Unpickler::push_memo(uint64_t index) {
  if (index >= memo_.size() || !memo_[index]) fail("memo entry {} was never set", index);
  push(*memo_[index]);
}

void Unpickler::opcode(PickleOp op) {
  switch (op) {
    // Opcodes for None, truth values and numbers.
    case PickleOp::kNone:
      return push(PickleValue());
    case PickleOp::kNewTrue:
      return push(PickleValue(true));
    case PickleOp::kNewFalse:
      return push(PickleValue(false));
    case PickleOp::kBinInt:
      return push(PickleValue(int64_t{number<int32_t>()}));
    case PickleOp::kBinInt1:
      return push(PickleValue(int64_t{number<uint8_t>()}));
    case PickleOp::kBinInt2:
      return push(PickleValue(int64_t{number<uint16_t>()}));
    case PickleOp::kLong1:
      return push(PickleValue(long_integer()));
    case PickleOp::kLong4:
      fail("an integer of {} bytes; only 64-bit integers are read", number<uint32_t>());
    case PickleOp::kBinFloat:
      return push(PickleValue(big_endian_float()));
    // Opcodes for text and bytes.
    case PickleOp::kShortBinUnicode:
    case PickleOp::kShortBinString:  // a Python 2 str
      return push_text(PickleKind::kText, sized<uint8_t>());
    case PickleOp::kBinUnicode:
    case PickleOp::kBinString:
      return push_text(PickleKind::kText, sized<uint32_t>());
    case PickleOp::kBinUnicode8:
      return push_text(PickleKind::kText, sized<uint64_t>());
    case PickleOp::kShortBinBytes:
      return push_text(PickleKind::kBytes, sized<uint8_t>());
    case PickleOp::kBinBytes:
      return push_text(PickleKind::kBytes, sized<uint32_t>());
    case PickleOp::kBinBytes8:
      return push_text(PickleKind::kBytes, sized<uint64_t>());
    // Opcodes for containers.
    case PickleOp::kEmptyList:
      return push_parts(PickleKind::kList, {});
    case PickleOp::kEmptyTuple:
      return push_parts(PickleKind::kTuple, {});
    case PickleOp::kEmptyDict:
      return push_parts(PickleKind::kDict, {});
    case PickleOp::kEmptySet:
      return push_parts(PickleKind::kSet, {});
    case PickleOp::kTuple1:
      return push_tuple(1);
    case PickleOp::kTuple2:
      return push_tuple(2);
    case PickleOp::kTuple3:
      return push_tuple(3);
    case PickleOp::kTuple:
      return push_parts(PickleKind::kTuple, pop_to_mark());
    case PickleOp::kAppend: {
      auto item = pop();
      return append(PickleKind::kList, {std::move(item)}, "APPEND");
    }
    case PickleOp::kAppends:
      return append(PickleKind::kList, pop_to_mark(), "APPENDS");
    case PickleOp::kSetItem: {
      auto value = pop();
      auto key = pop();
      return append(PickleKind::kDict, {std::move(key), std::move(value)}, "SETITEM");
    }
    case PickleOp::kSetItems:
      return append(PickleKind::kDict, pop_to_mark(), "SETITEMS");
    case PickleOp::kAddItems:
      return append(PickleKind::kSet, pop_to_mark(), "ADDITEMS");
    // Opcodes for the memo.
    case PickleOp::kMemoize:
      return memoize(memo_.size());
    case PickleOp::kBinPut:
      return memoize(number<uint8_t>());
    case PickleOp::kLongBinPut:
      return memoize(number<uint32_t>());
    case PickleOp::kBinGet:
      return push_memo(number<uint8_t>());
    case PickleOp::kLongBinGet:
      return push_memo(number<uint32_t>());
    // Opcodes for the stack, frames and calls.
    case PickleOp::kFrame:
      if (const auto length = number<uint64_t>(); length > bytes_.size() - position_) {
        fail("a frame of {} bytes, {} are left. The pickle is cut off or damaged.", length, bytes_.size() - position_);
      }
      return;
    case PickleOp::kMark:
      marks_.push_back(stack_.size());
      return;
    case PickleOp::kPop:
      pop();
      return;
    case PickleOp::kPopMark:
      pop_to_mark();
      return;
    case PickleOp::kGlobal: {
      const auto module = line();
      return global(module, line());
    }
    case PickleOp::kStackGlobal: {
      const auto name = pop();
      const auto module = pop();
      if (module.kind() != PickleKind::kText || name.kind() != PickleKind::kText) fail("STACK_GLOBAL without names");
      return global(module.as_text(), name.as_text());
    }
    case PickleOp::kReduce:
      return reduce();
    case PickleOp::kNewObj:
      return new_object();
    case PickleOp::kBuild:
      return build();
    case PickleOp::kBinPersId:
      return push_parts(PickleKind::kPersistent, {pop()});
    default:
      fail("opcode 0x{:02x} is not supported", static_cast<unsigned>(op));
  }
}

// The pickle must be complete: exactly one value is on the stack, and no byte follows the opcode STOP.
PickleValue Unpickler::run() {
  if (static_cast<PickleOp>(number<uint8_t>()) != PickleOp::kProto) fail("no pickle of protocol 2 or higher");
  const auto protocol = number<uint8_t>();
  if (protocol < 2 || protocol > 5) fail("protocol {}, 2 to 5 are read", protocol);
  for (;;) {
    op_at_ = position_;
    const auto op = static_cast<PickleOp>(number<uint8_t>());
    if (op == PickleOp::kStop) break;
    opcode(op);
  }
  auto root = pop();
  if (!stack_.empty() || !marks_.empty()) fail("{} values are left over at the end", stack_.size());
  if (position_ != bytes_.size()) fail("{} bytes follow the end of the pickle", bytes_.size() - position_);
  seal(root);
  return root;
}

PickleValue unpickle(std::span<const std::byte> bytes, const std::string& where, const PickleLimits& limits) {
  return Unpickler(bytes, where, limits).run();
}

}  // namespace tessera
