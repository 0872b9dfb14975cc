// Counter-based random numbers: a value depends on seed, stream and index alone, so it does not depend on how a tensor
// is sharded or on how many draws came before. Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1,
// 2, 3".
//
//   double u = philox_uniform(philox(seed, index, stream));
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace tessera {

using PhiloxBlock = std::array<uint32_t, 4>;

inline constexpr uint32_t kPhiloxM0 = 0xD2511F53, kPhiloxM1 = 0xCD9E8D57;
inline constexpr uint32_t kPhiloxW0 = 0x9E3779B9, kPhiloxW1 = 0xBB67AE85;
inline constexpr int kPhiloxRounds = 10;

// Four 32-bit words for one 128-bit counter under a 64-bit key.
inline PhiloxBlock philox(uint64_t key, uint64_t counter_low, uint64_t counter_high) {
  PhiloxBlock x = {static_cast<uint32_t>(counter_low), static_cast<uint32_t>(counter_low >> 32),
                   static_cast<uint32_t>(counter_high), static_cast<uint32_t>(counter_high >> 32)};
  auto k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = uint64_t{kPhiloxM0} * x[0], p1 = uint64_t{kPhiloxM1} * x[2];
    x = {static_cast<uint32_t>(p1 >> 32) ^ x[1] ^ k0, static_cast<uint32_t>(p1),
         static_cast<uint32_t>(p0 >> 32) ^ x[3] ^ k1, static_cast<uint32_t>(p0)};
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  return x;
}

// The number of a name (FNV-1a), the same on every machine; used as a stream or as part of a key.
inline uint64_t philox_stream(std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char each : name) hash = (hash ^ static_cast<unsigned char>(each)) * 0x100000001b3;
  return hash;
}

// A uniform number in (0, 1], from 53 bits of the first two words.
inline double philox_uniform(const PhiloxBlock& words) {
  const uint64_t bits = (uint64_t{words[0]} << 21) ^ (words[1] >> 11);
  return (static_cast<double>(bits & ((uint64_t{1} << 53) - 1)) + 1.0) * 0x1.0p-53;
}

}  // namespace tessera
