// Writes messages in protobuf's wire format, field by field.
//
//   ProtobufMessage dim;
//   dim.number(1, 3);
//   shape.message(1, dim);
//   file_bytes = shape.bytes();
//
// Fields are written in the order of the calls. When these follow the field numbers, the bytes equal those of
// protobuf's own serialisers. The host must be little-endian. No communication.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::onnx {

class ProtobufMessage {
 public:
  // An int32, int64 or enum field: a varint of the two's complement.
  void number(uint32_t field, int64_t value);
  void real(uint32_t field, float value);
  // A string or bytes field. The caller makes sure that a string is UTF-8.
  void text(uint32_t field, std::string_view bytes);
  void message(uint32_t field, const ProtobufMessage& message) { text(field, message.bytes_); }

  const std::string& bytes() const { return bytes_; }

 private:
  void varint(uint64_t value);
  void key(uint32_t field, uint32_t wire_type) { varint(uint64_t{field} << 3 | wire_type); }

  std::string bytes_;
};

}  // namespace tessera::onnx
