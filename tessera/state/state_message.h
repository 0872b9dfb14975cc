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

// The part of a tensor that a message contains. Tensors without dims are always sent with their values.
enum class TensorsInMessage {
  kValues,
  kShapes,  // dtype and shape only; decode_state returns a meta tensor, whose values are sent separately
};

// Errors kShape: a DTensor, a ShardedTensor, a sparse, quantised or undefined tensor, and with kValues a meta tensor.
// Errors kFormat: text that is not UTF-8, containers nested more than 90 deep.
std::string encode_state(const StateValue& value, TensorsInMessage tensors = TensorsInMessage::kValues);

// Returns new tensors on the CPU (on the meta device for kShapes). Error kFormat for bytes that encode_state did not
// write.
StateValue decode_state(std::string_view bytes);

}  // namespace tessera
