// Reads the bytes of a GGUF header in order. Error kFormat for a read that needs more bytes than are left. `value_name`
// is the name of the read value in the message.
#pragma once

#include <cstring>
#include <span>
#include <string>

#include "tessera/base/error.h"
#include "tessera/formats/gguf/gguf.h"

namespace tessera {

class GgufCursor {
 public:
  GgufCursor(std::span<const std::byte> bytes, std::string file_name)
      : bytes_(bytes), file_name_(std::move(file_name)) {}

  uint64_t position() const { return position_; }
  uint64_t bytes_left() const { return bytes_.size() - position_; }
  const std::string& file_name() const { return file_name_; }

  template <class T>
  T number(const char* value_name) {
    check_bytes_left(sizeof(T), value_name);
    T value;
    std::memcpy(&value, bytes_.data() + position_, sizeof value);
    position_ += sizeof value;
    return value;
  }
  // Reads the count of a list whose items take at least min_bytes each.
  uint64_t count(uint64_t min_bytes, const char* value_name);
  std::string string(uint64_t limit_bytes, const char* value_name);
  GgufValue value(uint32_t type, const std::string& key);

 private:
  void check_bytes_left(uint64_t bytes, const char* value_name) const {
    TESSERA_CHECK(bytes <= bytes_left(), ErrorKind::kFormat,
                  "[gguf] {}: {} at byte {} needs {} bytes, the file has {} left. The file is cut off or damaged.",
                  file_name_, value_name, position_, bytes, bytes_left());
  }
  GgufArray array(const std::string& key, int depth);
  bool boolean();
  template <class T>
  T read_item(const std::string& key, int depth, const char* value_name);
  template <class T>
  std::vector<T> numbers(uint64_t count);

  std::span<const std::byte> bytes_;
  uint64_t position_ = 0;
  std::string file_name_;
};

}  // namespace tessera
