// Values of state dicts as bytes, for messages between ranks of one run: a pickle in which each tensor is a persistent
// value. Not a file format: numbers of dtypes and the bytes of tensors are those of the build and the machine.
//
//   std::string bytes = encode_state(value);
//   StateValue same = decode_state(bytes);
//
// Thread-safe. The same value gives the same bytes. Reading is bounded as unpickle() is.
#pragma once

#include <string>
#include <string_view>

#include "tessera/state/state_value.h"

namespace tessera {

// What is sent of tensors with at least one dim (those without any go by value).
enum class TensorsInMessage {
  kValues,
  kShapes,  // dtype and shape; they arrive on the meta device, which is where their values are still to come from
};

// Errors kShape: a DTensor, a ShardedTensor, a sparse, quantised or undefined tensor; with kValues also one on the meta
// device. Errors kFormat: text that is no UTF-8, containers more than 90 deep.
std::string encode_state(const StateValue& value, TensorsInMessage tensors = TensorsInMessage::kValues);

// Tensors are new, on the CPU (kShapes: meta). Error kFormat for bytes that encode_state did not write.
StateValue decode_state(std::string_view bytes);

}  // namespace tessera
