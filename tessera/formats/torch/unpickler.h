// Reads pickles of protocols 2 to 5 as data.
//
//   const PickleValue root = unpickle(bytes, "/ckpt/.metadata");
//
// Nothing is imported, called or executed: a name of a class or function must be in the list of pickle_names.h, and
// what it would make is an object in the tree. Time and memory are linear in the input. Whoever walks the tree meets a
// shared value as often as it appears: `max_expanded` bounds that. Values that contain themselves, integers beyond 64
// bits, text that is no UTF-8, a text or integer that is twice among the keys of a dict, and opcodes that protocols 2
// to 5 do not need are Error kFormat "[pickle] WHERE: byte N: ...". Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "tessera/formats/torch/pickle_value.h"

namespace tessera {

struct PickleLimits {
  size_t max_bytes = size_t{4} << 30;
  uint32_t max_depth = 100;             // of values inside each other
  uint64_t max_expanded = 64 << 20;     // bytes of the tree with every reference written out: this,
  uint64_t max_expanded_per_byte = 64;  // and this for each byte of the input
};

PickleValue unpickle(std::span<const std::byte> bytes, const std::string& where, const PickleLimits& limits = {});

}  // namespace tessera
