#include "tessera/state/state_message.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstring>
#include <limits>

#include "tessera/base/error.h"
#include "tessera/base/files/copy_bytes.h"
#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera {
namespace {

constexpr int kDeepest = 64, kMostDims = 64;

enum class Tag : uint8_t {
  kNone,
  kFalse,
  kTrue,
  kInt,
  kDouble,
  kString,
  kBytes,
  kTensor,
  kShape,
  kList,
  kTuple,
  kDict,
  kLast = kDict,
};

struct MessageWriter {
  TensorsInMessage tensors;
  std::string out = {};

  template <class T>
  void number(T value) {
    out.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void tag(Tag tag) { number(static_cast<uint8_t>(tag)); }
  void text(std::string_view text) {
    number<uint64_t>(text.size());
    out.append(text);
  }
  void items(Tag which, const StateList& list, int depth) {
    tag(which);
    number<uint64_t>(list.size());
    for (const auto& item : list) value(item, depth + 1);
  }
  void key(const StateKey& key) {
    if (const auto* id = std::get_if<int64_t>(&key)) {
      tag(Tag::kInt);
      number(*id);
    } else {
      tag(Tag::kString);
      text(std::get<std::string>(key));
    }
  }

  void tensor(const at::Tensor& tensor) {
    TESSERA_CHECK(tensor.defined() && !is_dtensor(tensor) && tensor.layout() == c10::kStrided && !tensor.is_quantized(),
                  ErrorKind::kShape, "[state.encode] found {}, wanted a plain dense tensor. Gather it first.",
                  !tensor.defined()    ? "an undefined tensor"
                  : is_dtensor(tensor) ? "a DTensor"
                                       : "a sparse or quantised one");
    const bool by_value = tensors == TensorsInMessage::kValues || tensor.dim() == 0;
    TESSERA_CHECK(!by_value || !tensor.is_meta(), ErrorKind::kShape,
                  "[state.encode] found a tensor on the meta device, which has no values");
    tag(by_value ? Tag::kTensor : Tag::kShape);
    number(static_cast<uint8_t>(tensor.scalar_type()));
    number(static_cast<uint8_t>(tensor.dim()));
    for (const auto size : tensor.sizes()) number<int64_t>(size);
    if (!by_value) return;
    const at::Tensor values = tensor.detach().resolve_conj().resolve_neg().to(c10::kCPU).contiguous();
    out.append(static_cast<const char*>(values.const_data_ptr()), values.nbytes());
  }

  void value(const StateValue& value, int depth) {
    TESSERA_CHECK(depth < kDeepest, ErrorKind::kShape, "[state.encode] containers are more than {} deep", kDeepest);
    TESSERA_CHECK(!value.is_sharded(), ErrorKind::kShape,
                  "[state.encode] found a ShardedTensor. Gather it first (all_gather_sharded_tensor).");
    if (value.is_none()) {
      tag(Tag::kNone);
    } else if (value.is_bool()) {
      tag(std::get<bool>(value.variant()) ? Tag::kTrue : Tag::kFalse);
    } else if (value.is_int()) {
      tag(Tag::kInt);
      number(value.integer());
    } else if (value.is_double()) {
      tag(Tag::kDouble);
      number(value.number());
    } else if (value.is_string()) {
      tag(Tag::kString);
      text(value.string());
    } else if (value.is_bytes()) {
      tag(Tag::kBytes);
      text(std::get<StateBytes>(value.variant()).bytes);
    } else if (value.is_tensor()) {
      tensor(value.tensor());
    } else if (value.is_list()) {
      items(Tag::kList, value.list(), depth);
    } else if (value.is_tuple()) {
      items(Tag::kTuple, std::get<StateTuple>(value.variant()).items, depth);
    } else {
      tag(Tag::kDict);
      number<uint64_t>(value.dict().size());
      for (const auto& [name, child] : value.dict()) {
        key(name);
        this->value(child, depth + 1);
      }
    }
  }
};

class MessageReader {
 public:
  explicit MessageReader(std::string_view bytes) : bytes_(bytes) {}

  StateValue all() {
    auto read = value(0);
    require(at_ == bytes_.size(), "bytes behind the value");
    return read;
  }

 private:
  void require(bool condition, const char* what) const {
    TESSERA_CHECK(condition, ErrorKind::kFormat, "[state.decode] byte {} of {}: {}", at_, bytes_.size(), what);
  }
  size_t left() const { return bytes_.size() - at_; }

  std::string_view take(uint64_t count) {
    require(count <= left(), "the message ends early");
    const auto taken = bytes_.substr(at_, count);
    at_ += count;
    return taken;
  }
  template <class T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  Tag tag() {
    const auto read = number<uint8_t>();
    require(read <= static_cast<uint8_t>(Tag::kLast), "an unknown kind of value");
    return static_cast<Tag>(read);
  }
  std::string text() { return std::string(take(number<uint64_t>())); }
  // Of values, each of which takes a byte at least.
  uint64_t count() {
    const auto count = number<uint64_t>();
    require(count <= left(), "more values than bytes");
    return count;
  }

  StateValue tensor(bool by_value) {
    const auto dtype = number<uint8_t>();
    require(dtype < static_cast<uint8_t>(c10::ScalarType::NumOptions) &&
                static_cast<c10::ScalarType>(dtype) != c10::ScalarType::Undefined &&
                !c10::isQIntType(static_cast<c10::ScalarType>(dtype)),
            "an unknown dtype");
    const auto dims = number<uint8_t>();
    require(dims <= kMostDims, "too many dims");
    std::vector<int64_t> sizes;
    const auto itemsize = static_cast<uint64_t>(c10::elementSize(static_cast<c10::ScalarType>(dtype)));
    uint64_t bytes = itemsize;
    bool is_empty = false;
    for (int i = 0; i < dims; ++i) {
      sizes.push_back(number<int64_t>());
      require(sizes.back() >= 0, "a negative size");
      is_empty |= sizes.back() == 0;
      const auto size = static_cast<uint64_t>(std::max<int64_t>(sizes.back(), 1));
      require(bytes <= std::numeric_limits<int64_t>::max() / size, "a tensor larger than memory can be");
      bytes *= size;
    }
    const auto options = at::TensorOptions().dtype(static_cast<c10::ScalarType>(dtype));
    if (!by_value) return at::empty(sizes, options.device(c10::kMeta));
    const auto values = take(is_empty ? 0 : bytes);
    at::Tensor out = at::empty(sizes, options);
    copy_bytes(out.mutable_data_ptr(), values.data(), values.size());
    return out;
  }

  StateList items(int depth) {
    StateList list;
    for (auto remaining = count(); remaining > 0; --remaining) list.push_back(value(depth + 1));
    return list;
  }

  StateValue dict(int depth) {
    StateDict dict;
    for (auto remaining = count(); remaining > 0; --remaining) {
      const auto kind = tag();
      require(kind == Tag::kInt || kind == Tag::kString, "a key that is neither a number nor text");
      StateKey key = kind == Tag::kInt ? StateKey(number<int64_t>()) : StateKey(text());
      require(!dict.contains(key), "a key for the second time");
      dict.set(std::move(key), value(depth + 1));
    }
    return dict;
  }

  StateValue value(int depth) {
    require(depth < kDeepest, "containers are too deep");
    switch (const auto kind = tag()) {
      case Tag::kNone:
        return {};
      case Tag::kFalse:
      case Tag::kTrue:
        return kind == Tag::kTrue;
      case Tag::kInt:
        return number<int64_t>();
      case Tag::kDouble:
        return number<double>();
      case Tag::kString:
        return text();
      case Tag::kBytes:
        return StateBytes{text()};
      case Tag::kTensor:
      case Tag::kShape:
        return tensor(kind == Tag::kTensor);
      case Tag::kList:
        return items(depth);
      case Tag::kTuple:
        return StateTuple{items(depth)};
      case Tag::kDict:
        return dict(depth);
    }
    require(false, "an unknown kind of value");
    return {};
  }

  std::string_view bytes_;
  size_t at_ = 0;
};

}  // namespace

std::string encode_state(const StateValue& value, TensorsInMessage tensors) {
  MessageWriter writer{.tensors = tensors};
  writer.value(value, 0);
  return std::move(writer.out);
}

StateValue decode_state(std::string_view bytes) { return MessageReader(bytes).all(); }

}  // namespace tessera
