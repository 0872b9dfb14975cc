// Values of state dicts as bytes, for messages between ranks of one run. Not a file format: byte order and numbers of
// dtypes are those of the machine and the build.
//
//   std::string bytes = encode_state(value);
//   StateValue same = decode_state(bytes);
//
// Thread-safe. Reading is bounded: nothing that a message says makes it take more memory than a few times its length.
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
// device; containers more than 64 deep.
std::string encode_state(const StateValue& value, TensorsInMessage tensors = TensorsInMessage::kValues);

// Tensors are new, on the CPU (kShapes: meta). Error kFormat, with the place in the message, for bytes that
// encode_state did not write.
StateValue decode_state(std::string_view bytes);

}  // namespace tessera
