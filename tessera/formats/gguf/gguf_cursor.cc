#include "tessera/formats/gguf/gguf_cursor.h"

#include "tessera/base/files/copy_bytes.h"
#include "tessera/base/text/quote.h"

namespace tessera {
namespace {

constexpr int kMaxArrayDepth = 4;
constexpr uint64_t kNoLimit = ~uint64_t{0};

enum ValueType : uint32_t {
  kUint8,
  kInt8,
  kUint16,
  kInt16,
  kUint32,
  kInt32,
  kFloat32,
  kBool,
  kString,
  kArray,
  kUint64,
  kInt64,
  kFloat64
};

}  // namespace

uint64_t GgufCursor::count(uint64_t min_bytes, const char* what) {
  const auto count = number<uint64_t>(what);
  TESSERA_CHECK(count <= left() / min_bytes, ErrorKind::kFormat,
                "[gguf] {}: {} {} at byte {} cannot fit in the {} bytes left. The file is cut off or damaged.",
                file_name_, count, what, position_ - 8, left());
  return count;
}

std::string GgufCursor::string(uint64_t limit_bytes, const char* what) {
  const auto size = number<uint64_t>(what);
  need(size, what);
  TESSERA_CHECK(size <= limit_bytes, ErrorKind::kFormat,
                "[gguf] {}: {} at byte {} has {} bytes, at most {} are allowed", file_name_, what, position_ - 8, size,
                limit_bytes);
  std::string text(reinterpret_cast<const char*>(bytes_.data()) + position_, static_cast<size_t>(size));
  position_ += size;
  return text;
}

bool GgufCursor::boolean() {
  const auto byte = number<uint8_t>("a truth value");
  TESSERA_CHECK(byte <= 1, ErrorKind::kFormat, "[gguf] {}: the truth value at byte {} is {}, wanted 0 or 1", file_name_,
                position_ - 1, byte);
  return byte == 1;
}

template <class T>
std::vector<T> GgufCursor::numbers(uint64_t count) {
  TESSERA_CHECK(count <= left() / sizeof(T), ErrorKind::kFormat,
                "[gguf] {}: an array of {} items at byte {} cannot fit in the {} bytes left", file_name_, count,
                position_, left());
  std::vector<T> items(static_cast<size_t>(count));
  copy_bytes(items.data(), bytes_.data() + position_, items.size() * sizeof(T));
  position_ += count * sizeof(T);
  return items;
}

GgufArray GgufCursor::array(const std::string& key, int depth) {
  TESSERA_CHECK(depth <= kMaxArrayDepth, ErrorKind::kFormat, "[gguf] {}: key {}: arrays nested deeper than {}",
                file_name_, quote(key), kMaxArrayDepth);
  const auto type = number<uint32_t>("an array's type");
  const auto items = count(1, "array items");
  switch (type) {
    case kUint8:
      return {numbers<uint8_t>(items)};
    case kInt8:
      return {numbers<int8_t>(items)};
    case kUint16:
      return {numbers<uint16_t>(items)};
    case kInt16:
      return {numbers<int16_t>(items)};
    case kUint32:
      return {numbers<uint32_t>(items)};
    case kInt32:
      return {numbers<int32_t>(items)};
    case kFloat32:
      return {numbers<float>(items)};
    case kUint64:
      return {numbers<uint64_t>(items)};
    case kInt64:
      return {numbers<int64_t>(items)};
    case kFloat64:
      return {numbers<double>(items)};
    case kBool: {
      std::vector<bool> all;
      for (uint64_t i = 0; i < items; ++i) all.push_back(boolean());
      return {std::move(all)};
    }
    case kString: {
      TESSERA_CHECK(items <= left() / 8, ErrorKind::kFormat, "[gguf] {}: key {}: {} strings cannot fit in {} bytes",
                    file_name_, quote(key), items, left());
      std::vector<std::string> all;
      all.reserve(static_cast<size_t>(items));
      for (uint64_t i = 0; i < items; ++i) all.push_back(string(kNoLimit, "a string of an array"));
      return {std::move(all)};
    }
    case kArray: {
      std::vector<GgufArray> all;
      for (uint64_t i = 0; i < items; ++i) all.push_back(array(key, depth + 1));
      return {std::move(all)};
    }
    default:
      raise(ErrorKind::kFormat, "[gguf] {}: key {}: unknown array type {} at byte {}", file_name_, quote(key), type,
            position_ - 12);
  }
}

GgufValue GgufCursor::value(uint32_t type, const std::string& key) {
  constexpr const char* kWhat = "a metadata value";
  switch (type) {
    case kUint8:
      return number<uint8_t>(kWhat);
    case kInt8:
      return number<int8_t>(kWhat);
    case kUint16:
      return number<uint16_t>(kWhat);
    case kInt16:
      return number<int16_t>(kWhat);
    case kUint32:
      return number<uint32_t>(kWhat);
    case kInt32:
      return number<int32_t>(kWhat);
    case kFloat32:
      return number<float>(kWhat);
    case kBool:
      return boolean();
    case kString:
      return string(kNoLimit, kWhat);
    case kArray:
      return array(key, 1);
    case kUint64:
      return number<uint64_t>(kWhat);
    case kInt64:
      return number<int64_t>(kWhat);
    case kFloat64:
      return number<double>(kWhat);
    default:
      raise(ErrorKind::kFormat, "[gguf] {}: key {}: unknown value type {} at byte {}", file_name_, quote(key), type,
            position_ - 4);
  }
}

}  // namespace tessera
