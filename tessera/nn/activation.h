// The activations of gated MLPs.
#pragma once

#include <cstdint>

namespace tessera::nn {

enum class Activation : uint8_t { kSilu, kGeluTanh };

}  // namespace tessera::nn
