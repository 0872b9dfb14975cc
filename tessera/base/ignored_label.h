// The label of a token without loss: the default ignore_index of torch's cross_entropy.
#pragma once

#include <cstdint>

namespace tessera {

constexpr int64_t kIgnoredLabel = -100;

}  // namespace tessera
