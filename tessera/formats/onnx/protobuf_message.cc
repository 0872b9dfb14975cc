#include "tessera/formats/onnx/protobuf_message.h"

#include <bit>

namespace tessera::onnx {

static_assert(std::endian::native == std::endian::little);

void ProtobufMessage::varint(uint64_t value) {
  for (; value >= 0x80; value >>= 7) bytes_ += static_cast<char>(value | 0x80);
  bytes_ += static_cast<char>(value);
}

void ProtobufMessage::number(uint32_t field, int64_t value) {
  key(field, 0);
  varint(static_cast<uint64_t>(value));
}

void ProtobufMessage::real(uint32_t field, float value) {
  key(field, 5);
  bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void ProtobufMessage::text(uint32_t field, std::string_view bytes) {
  key(field, 2);
  varint(bytes.size());
  bytes_ += bytes;
}

}  // namespace tessera::onnx
