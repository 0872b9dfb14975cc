// Reads pickles of protocols 2 to 5 as data.
//
//   const PickleValue root = unpickle(bytes, "/ckpt/.metadata");
//
// The result is a tree of PickleValues. Nothing is imported, called or executed: the name of a class or
// function must be in the list of pickle_names.h, and a call becomes an object in the tree. Time and memory
// are linear in the input. A walk over the tree visits a shared value once for each reference; `max_expanded`
// limits the size of that walk. Error kFormat "[pickle] WHERE: byte N: ..." for values that contain
// themselves, integers beyond 64 bits, text that is not UTF-8, a text or integer that is twice among the keys
// of a dict, and opcodes that data in protocols 2 to 5 does not need. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "tessera/formats/torch/pickle_value.h"

namespace tessera {

struct PickleLimits {
  size_t max_bytes = size_t{4} << 30;
  uint32_t max_depth = 100;             // nesting levels of values
  uint64_t max_expanded = 64 << 20;     // bytes of the tree with every reference written out,
  uint64_t max_expanded_per_byte = 64;  // plus this many for each byte of the input
};

PickleValue unpickle(std::span<const std::byte> bytes, const std::string& where, const PickleLimits& limits = {});

}  // namespace tessera
