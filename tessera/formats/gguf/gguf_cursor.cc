#include "tessera/formats/gguf/gguf_cursor.h"

#include <type_traits>
#include <utility>

#include "tessera/base/files/copy_bytes.h"
#include "tessera/base/text/quote.h"

namespace tessera {
namespace {

constexpr int kMaxArrayDepth = 4;
constexpr uint64_t kNoLimit = ~uint64_t{0};

// Calls read(std::type_identity<T>()) for the T of a type number, which is the index of T among the alternatives of
// GgufValue. Returns false for an unknown number.
template <class Read, size_t... type_numbers>
bool read_type(uint32_t type, const Read& read, std::index_sequence<type_numbers...>) {
  return ((type == type_numbers &&
           (read(std::type_identity<std::variant_alternative_t<type_numbers, GgufValue>>()), true)) ||
          ...);
}
template <class Read>
bool read_type(uint32_t type, const Read& read) {
  return read_type(type, read, std::make_index_sequence<std::variant_size_v<GgufValue>>());
}

}  // namespace

uint64_t GgufCursor::count(uint64_t min_bytes, const char* value_name) {
  const auto count = number<uint64_t>(value_name);
  TESSERA_CHECK(count <= bytes_left() / min_bytes, ErrorKind::kFormat,
                "[gguf] {}: {} {} at byte {} cannot fit in the {} bytes left. The file is cut off or damaged.",
                file_name_, count, value_name, position_ - 8, bytes_left());
  return count;
}

std::string GgufCursor::string(uint64_t limit_bytes, const char* value_name) {
  const auto size = number<uint64_t>(value_name);
  check_bytes_left(size, value_name);
  TESSERA_CHECK(size <= limit_bytes, ErrorKind::kFormat,
                "[gguf] {}: {} at byte {} has {} bytes, at most {} are allowed", file_name_, value_name, position_ - 8,
                size, limit_bytes);
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

// Reads an array of `count` numbers. `count` comes from the file. It is compared with the number of bytes that are left
// in the file before the result is allocated, so a hostile count cannot exhaust the memory.
template <class T>
std::vector<T> GgufCursor::numbers(uint64_t count) {
  TESSERA_CHECK(count <= bytes_left() / sizeof(T), ErrorKind::kFormat,
                "[gguf] {}: an array of {} items at byte {} cannot fit in the {} bytes left", file_name_, count,
                position_, bytes_left());
  std::vector<T> items(static_cast<size_t>(count));
  copy_bytes(items.data(), bytes_.data() + position_, items.size() * sizeof(T));
  position_ += count * sizeof(T);
  return items;
}

template <class T>
T GgufCursor::read_item(const std::string& key, int depth, const char* value_name) {
  if constexpr (std::is_same_v<T, bool>) {
    return boolean();
  } else if constexpr (std::is_same_v<T, std::string>) {
    return string(kNoLimit, value_name);
  } else if constexpr (std::is_same_v<T, GgufArray>) {
    return array(key, depth);
  } else {
    return number<T>(value_name);
  }
}

// Arrays of numbers are copied as one block. Strings, truth values and nested arrays are read item by item; each item
// takes at least one byte of the file, so the loop ends.
GgufArray GgufCursor::array(const std::string& key, int depth) {
  TESSERA_CHECK(depth <= kMaxArrayDepth, ErrorKind::kFormat, "[gguf] {}: key {}: arrays nested deeper than {}",
                file_name_, quote(key), kMaxArrayDepth);
  const auto type = number<uint32_t>("an array's type");
  const auto items = count(1, "array items");
  GgufArray all;
  const bool known = read_type(type, [&]<class T>(std::type_identity<T>) {
    if constexpr (std::is_arithmetic_v<T> && !std::is_same_v<T, bool>) {
      all.items = numbers<T>(items);
    } else {
      std::vector<T> each;
      if constexpr (std::is_same_v<T, std::string>) {
        TESSERA_CHECK(items <= bytes_left() / 8, ErrorKind::kFormat,
                      "[gguf] {}: key {}: {} strings cannot fit in {} bytes", file_name_, quote(key), items,
                      bytes_left());
        each.reserve(static_cast<size_t>(items));
      }
      for (uint64_t i = 0; i < items; ++i) each.push_back(read_item<T>(key, depth + 1, "a string of an array"));
      all.items = std::move(each);
    }
  });
  TESSERA_CHECK(known, ErrorKind::kFormat, "[gguf] {}: key {}: unknown array type {} at byte {}", file_name_,
                quote(key), type, position_ - 12);
  return all;
}

GgufValue GgufCursor::value(uint32_t type, const std::string& key) {
  GgufValue value;
  const bool known =
      read_type(type, [&]<class T>(std::type_identity<T>) { value = read_item<T>(key, 1, "a metadata value"); });
  TESSERA_CHECK(known, ErrorKind::kFormat, "[gguf] {}: key {}: unknown value type {} at byte {}", file_name_,
                quote(key), type, position_ - 4);
  return value;
}

}  // namespace tessera
