// Encodes values of state dicts as bytes, which the ranks of one run send each other. The bytes are a pickle in which
// each tensor is a persistent value. This is not a file format: dtype numbers and tensor bytes depend on the build and
// the machine.
//
//   std::string bytes = encode_state(value);
//   StateValue same = decode_state(bytes);
//
// Thread-safe. Equal values give equal bytes. The limits of unpickle() apply when reading.
#pragma once

#include <string>
#include <string_view>

#include "tessera/state/state_value.h"

namespace tessera {

// What a message contains of each tensor. A tensor without dims is sent with its value in both cases.
enum class TensorsInMessage {
  kValues,
  kShapes,  // dtype and shape only; decode_state returns a meta tensor, whose values are sent separately
};

// Encodes `value` as bytes for decode_state(). Errors kShape: a DTensor, a ShardedTensor, a sparse, quantised or
// undefined tensor, and with kValues a meta tensor. Errors kFormat: text that is not UTF-8, containers nested more than
// 90 deep.
std::string encode_state(const StateValue& value, TensorsInMessage tensors = TensorsInMessage::kValues);

// Decodes the bytes that encode_state() has written. The tensors of the result are new tensors on the CPU, or meta
// tensors if the message was written with TensorsInMessage::kShapes and the tensor has dims. Error kFormat for other
// bytes.
StateValue decode_state(std::string_view bytes);

}  // namespace tessera
