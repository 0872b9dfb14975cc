#include "tessera/formats/torch/pickler.h"

#include <bit>
#include <cstdint>
#include <limits>
#include <string_view>
#include <unordered_map>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/base/text/utf8.h"
#include "tessera/formats/torch/detail/pickle_opcodes.h"
#include "tessera/formats/torch/pickle_names.h"

namespace tessera {
namespace {

using detail::PickleOp;

constexpr int kMaxPickledDepth = 90;  // readers also count a global and the arguments of a call as levels

// Writes a pickle in one pass over the tree. Texts and globals are memoized; lists, dicts and tuples are not, so one
// that is shared is written out once per reference.
class Pickler {
 public:
  explicit Pickler(int protocol) : protocol_(protocol) {
    TESSERA_CHECK(protocol == 2 || protocol == 4, ErrorKind::kInternal, "[pickle] protocol {} cannot be written",
                  protocol);
  }

  std::string run(const PickleValue& root) {
    op(PickleOp::kProto, static_cast<uint8_t>(protocol_));
    write(root, 1);
    op(PickleOp::kStop);
    return std::move(out_);
  }

 private:
  void op(PickleOp code) { out_.push_back(static_cast<char>(code)); }
  template <class T>
  void number(T value) {
    out_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }

  // Writes an opcode and its operand.
  template <class T>
  void op(PickleOp code, T operand) {
    op(code);
    number(operand);
  }

  void write(const PickleValue& value, int depth) {
    TESSERA_CHECK(depth <= kMaxPickledDepth, ErrorKind::kFormat,
                  "[pickle] values are nested more than {} deep, which readers reject", kMaxPickledDepth);
    switch (value.kind()) {
      case PickleKind::kNone:
        return op(PickleOp::kNone);
      case PickleKind::kBool:
        return op(value.as_bool() ? PickleOp::kNewTrue : PickleOp::kNewFalse);
      case PickleKind::kInt:
        return write_integer(value.as_int());
      case PickleKind::kFloat:
        return write_float(value.as_float());
      case PickleKind::kText:
        return write_text(value.as_text());
      case PickleKind::kBytes:
        return write_bytes(value.as_bytes());
      case PickleKind::kList:
        op(PickleOp::kEmptyList);
        return write_batch(PickleOp::kAppends, value.items(), depth);
      case PickleKind::kTuple:
        return write_tuple(value.items(), depth);
      case PickleKind::kSet:
        return write_set(value, depth);
      case PickleKind::kDict:
        return write_dict(value, depth);
      case PickleKind::kGlobal:
        return write_global(value);
      case PickleKind::kObject:
        return write_object(value, depth);
      case PickleKind::kPersistent:
        write(value.persistent_id(), depth + 1);
        return op(PickleOp::kBinPersId);
    }
  }

  void write_integer(int64_t value) {
    if (value >= 0 && value <= 0xFF) {
      op(PickleOp::kBinInt1, static_cast<uint8_t>(value));
    } else if (value >= 0 && value <= 0xFFFF) {
      op(PickleOp::kBinInt2, static_cast<uint16_t>(value));
    } else if (value >= std::numeric_limits<int32_t>::min() && value <= std::numeric_limits<int32_t>::max()) {
      op(PickleOp::kBinInt, static_cast<int32_t>(value));
    } else {
      op(PickleOp::kLong1, uint8_t{8});
      number(value);
    }
  }

  void write_float(double value) {
    op(PickleOp::kBinFloat);
    const auto bits = std::bit_cast<uint64_t>(value);
    for (int shift = 56; shift >= 0; shift -= 8) out_.push_back(static_cast<char>(bits >> shift & 0xFF));
  }

  void write_text(const std::string& text) {
    if (const auto found = texts_.find(text); found != texts_.end()) return get(found->second);
    write_text_bytes(text);
    texts_.emplace(text, put());
  }

  void write_text_bytes(const std::string& text) {
    if (protocol_ >= 4 && text.size() < 256) {
      op(PickleOp::kShortBinUnicode, static_cast<uint8_t>(text.size()));
    } else {
      TESSERA_CHECK(text.size() <= 0xFFFFFFFFU, ErrorKind::kFormat, "[pickle] a text of {} bytes is too long",
                    text.size());
      op(PickleOp::kBinUnicode, static_cast<uint32_t>(text.size()));
    }
    out_ += text;
  }

  // Protocol 2 has no opcode for bytes. Python writes _codecs.encode(text, "latin1") with one character for each byte.
  void write_bytes(const std::string& bytes) {
    if (protocol_ >= 4) {
      if (bytes.size() < 256) {
        op(PickleOp::kShortBinBytes, static_cast<uint8_t>(bytes.size()));
      } else {
        op(PickleOp::kBinBytes8, uint64_t{bytes.size()});
      }
      out_ += bytes;
      return;
    }
    std::string text;
    for (const char byte : bytes) append_utf8(static_cast<uint8_t>(byte), text);
    write_global_line("_codecs", "encode");
    write_text_bytes(text);
    write_text_bytes("latin1");
    op(PickleOp::kTuple2);
    op(PickleOp::kReduce);
  }

  void write_global(const PickleValue& value) {
    const auto name = value.qualified_name();
    if (const auto found = global_names_.find(name); found != global_names_.end()) return get(found->second);
    TESSERA_CHECK(is_known_pickle_name({value.global_module(), value.global_name()}), ErrorKind::kFormat,
                  "[pickle] {} cannot be written: it is not in the list of names that readers accept", quote(name));
    if (protocol_ >= 4) {
      write_text(value.global_module());
      write_text(value.global_name());
      op(PickleOp::kStackGlobal);
    } else {
      write_global_line(value.global_module(), value.global_name());
    }
    global_names_.emplace(name, put());
  }

  // The GLOBAL opcode of protocol 2. Python 3 writes "builtins" under its Python 2 name.
  void write_global_line(const std::string& module, const std::string& name) {
    op(PickleOp::kGlobal);
    out_ += module == "builtins" ? "__builtin__" : module;  // as Python 3 does in protocol 2
    out_ += '\n' + name + '\n';
  }

  void write_tuple(std::span<const PickleValue> items, int depth) {
    if (items.empty()) return op(PickleOp::kEmptyTuple);
    if (items.size() > 3) op(PickleOp::kMark);
    for (const auto& item : items) write(item, depth + 1);
    op(items.size() == 1   ? PickleOp::kTuple1
       : items.size() == 2 ? PickleOp::kTuple2
       : items.size() == 3 ? PickleOp::kTuple3
                           : PickleOp::kTuple);
  }

  void write_batch(PickleOp op_after, std::span<const PickleValue> items, int depth) {
    if (items.empty()) return;
    op(PickleOp::kMark);
    for (const auto& item : items) write(item, depth + 1);
    op(op_after);
  }

  void write_set(const PickleValue& value, int depth) {
    if (protocol_ >= 4) {
      op(PickleOp::kEmptySet);
      return write_batch(PickleOp::kAddItems, value.items(), depth);
    }
    write_global_line("builtins", "set");
    op(PickleOp::kEmptyList);
    write_batch(PickleOp::kAppends, value.items(), depth);
    op(PickleOp::kTuple1);
    op(PickleOp::kReduce);
  }

  // An OrderedDict is a call without arguments, followed by its items and, if it has one, its state (BUILD).
  void write_dict(const PickleValue& value, int depth) {
    if (value.is_ordered_dict()) {
      write_global(ordered_dict_);
      op(PickleOp::kEmptyTuple);
      op(PickleOp::kReduce);
    } else {
      op(PickleOp::kEmptyDict);
    }
    if (value.dict_size() > 0) {
      op(PickleOp::kMark);
      for (size_t i = 0; i < value.dict_size(); ++i) {
        write(value.key(i), depth + 1);
        write(value.value(i), depth + 1);
      }
      op(PickleOp::kSetItems);
    }
    if (value.is_ordered_dict() && !value.state().is_none()) {
      write(value.state(), depth + 1);
      op(PickleOp::kBuild);
    }
  }

  // A call is REDUCE with its arguments. An instance is NEWOBJ without arguments, then BUILD with its state.
  void write_object(const PickleValue& value, int depth) {
    write_global(value.callee());
    if (!value.is_instance()) {
      write_tuple(value.args(), depth);
      op(PickleOp::kReduce);
      return;
    }
    op(PickleOp::kEmptyTuple);
    op(PickleOp::kNewObj);
    if (value.state().is_none()) return;
    write(value.state(), depth + 1);
    op(PickleOp::kBuild);
  }

  // Writes a memo opcode, in its short form when the index fits in one byte.
  void memo_entry(PickleOp of_byte, PickleOp of_word, uint32_t index) {
    if (index < 256) {
      op(of_byte, static_cast<uint8_t>(index));
    } else {
      op(of_word, index);
    }
  }

  void get(uint32_t index) { memo_entry(PickleOp::kBinGet, PickleOp::kLongBinGet, index); }

  uint32_t put() {
    const uint32_t index = memo_size_++;
    if (protocol_ >= 4) {
      op(PickleOp::kMemoize);
    } else {
      memo_entry(PickleOp::kBinPut, PickleOp::kLongBinPut, index);
    }
    return index;
  }

  int protocol_;
  std::string out_;
  uint32_t memo_size_ = 0;
  std::unordered_map<std::string_view, uint32_t> texts_;    // memo index by text; the keys point into the tree
  std::unordered_map<std::string, uint32_t> global_names_;  // memo index by qualified name
  const PickleValue ordered_dict_ = PickleValue::global("collections", "OrderedDict");
};

}  // namespace

std::string pickle(const PickleValue& root, const PickleOptions& options) {
  return Pickler(options.protocol).run(root);
}

}  // namespace tessera
