// The stack machine of Python's pickle. It builds data instead of calling classes and functions.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/formats/torch/detail/pickle_node.h"
#include "tessera/formats/torch/detail/pickle_opcodes.h"
#include "tessera/formats/torch/unpickler.h"

namespace tessera {

// Runs one pickle.
class Unpickler {
 public:
  Unpickler(std::span<const std::byte> bytes, const std::string& where, const PickleLimits& limits)
      : bytes_(bytes), where_(where), limits_(limits) {
    TESSERA_CHECK(bytes.size() <= limits.max_bytes, ErrorKind::kFormat,
                  "[pickle] {}: {} bytes, at most {} are read. It is no pickle of a checkpoint.", where, bytes.size(),
                  limits.max_bytes);
    max_cost_ = limits.max_expanded + limits.max_expanded_per_byte * bytes.size();
  }

  PickleValue run();

 private:
  template <class... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) const {
    raise(ErrorKind::kFormat, "[pickle] {}: byte {}: {}", where_, op_at_,
          fmt::format(format, std::forward<Args>(args)...));
  }

  // Functions that read the input.
  std::string_view read_bytes(uint64_t count);
  template <class T>
  T number() {
    T value;
    std::memcpy(&value, read_bytes(sizeof value).data(), sizeof value);
    return value;
  }
  template <class Length>
  std::string_view sized() {
    return read_bytes(number<Length>());
  }
  std::string_view line();
  int64_t long_integer();
  double big_endian_float();

  // Functions that use stack_.
  void push(PickleValue value) { stack_.push_back(std::move(value)); }
  PickleValue pop();
  PickleValue& top();
  std::vector<PickleValue> pop_to_mark();

  // Functions that create, limit and check nodes (values of the tree).
  void count_created_bytes(uint64_t bytes);
  void add_cost(detail::PickleNode& node, uint64_t cost) const;
  void push_text(PickleKind kind, std::string_view text);
  void push_parts(PickleKind kind, std::vector<PickleValue> parts);
  void push_node(std::shared_ptr<detail::PickleNode> node, uint64_t own_cost);
  void push_tuple(size_t count);
  void attach_child(detail::PickleNode& parent, const PickleValue& child);
  void seal(const PickleValue& value);
  void check_keys(const detail::PickleContainerNode& node, size_t stride) const;
  detail::PickleContainerNode& open_container(PickleKind kind, const char* op);
  void append(PickleKind kind, std::vector<PickleValue> items, const char* op);

  // Functions that execute opcodes.
  void opcode(detail::PickleOp op);
  void memoize(uint64_t index);
  void push_memo(uint64_t index);
  void global(std::string_view module, std::string_view name);
  void reduce();
  bool reduce_to_value(const PickleValue& callee, std::span<const PickleValue> args);
  bool reduce_to_ordered_dict(std::span<const PickleValue> args);
  bool reduce_to_bytes(std::span<const PickleValue> args);
  void new_object();
  void build();

  std::span<const std::byte> bytes_;
  const std::string& where_;
  PickleLimits limits_;
  uint64_t max_cost_ = 0;
  uint64_t created_bytes_ = 0;  // of all nodes created so far, each without its children
  size_t position_ = 0;
  size_t op_at_ = 0;
  std::vector<PickleValue> stack_;
  std::vector<size_t> marks_;
  std::vector<std::optional<PickleValue>> memo_;
};

}  // namespace tessera
