// Messages in protobuf's wire format, field by field.
//
//   WireMessage dim;
//   dim.number(1, 3);
//   shape.message(1, dim);
//   file_bytes = shape.bytes();
//
// Fields are written in the order of the calls; in the order of their numbers, a message is what protobuf's own
// serialisers write. Little-endian hosts, as everywhere here. No communication.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::onnx {

class WireMessage {
 public:
  // int32, int64, enumerations: a varint of two's complement.
  void number(uint32_t field, int64_t value);
  void real(uint32_t field, float value);
  // string and bytes; a string is UTF-8, which is for the caller to see to.
  void text(uint32_t field, std::string_view bytes);
  void message(uint32_t field, const WireMessage& message) { text(field, message.bytes_); }

  const std::string& bytes() const { return bytes_; }

 private:
  void varint(uint64_t value);
  void key(uint32_t field, uint32_t wire_type) { varint(uint64_t{field} << 3 | wire_type); }

  std::string bytes_;
};

}  // namespace tessera::onnx
