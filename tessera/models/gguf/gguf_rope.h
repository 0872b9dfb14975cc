// Rotary scaling in GGUF: metadata keys, and for llama3 a tensor of divisors.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

namespace tessera {
class GgufFile;
class GgufWriter;
struct RopeConfig;
}  // namespace tessera

namespace tessera {

// Writes the keys under ARCHITECTURE.rope. Error kConfig for scalings that GGUF does not have; its message has `where`.
void set_rope_keys(const RopeConfig& rope, const std::string& architecture, const std::string& where,
                   GgufWriter& writer);
// Returns the value of rope_scaling in config.json, or null.
nlohmann::ordered_json rope_scaling(const GgufFile& file, const std::string& architecture, double theta,
                                    int64_t head_dim);

// Returns the divisors of the rotary frequencies that llama.cpp stores in rope_freqs.weight: head_dim / 2 numbers, or
// none for a kind other than llama3.
std::vector<float> llama3_divisors(const RopeConfig& rope, int64_t head_dim);
// Finds the llama3 scaling that gives these divisors of frequencies of the base `theta`. It tries the factors 1 and 4
// and powers of two as context. Returns nullopt when no such scaling fits.
std::optional<RopeConfig> recover_llama3_scaling(const std::vector<float>& divisors, double theta);

// Returns the number with the fewest digits that has the same float32 value: GGUF stores float32, and 1e-5 must be read
// as 1e-5.
double shortest_decimal(double value);

}  // namespace tessera
