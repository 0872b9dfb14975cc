// Rotary scaling in GGUF: metadata, and for llama3 a tensor of divisors.
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

// The keys under ARCHITECTURE.rope. Error kConfig for scalings that GGUF does not have; `where` is for messages.
void set_rope_keys(const RopeConfig& rope, const std::string& architecture, const std::string& where,
                   GgufWriter& writer);
// The rope_scaling entry of config.json, or null.
nlohmann::ordered_json rope_scaling(const GgufFile& file, const std::string& architecture, double theta,
                                    int64_t head_dim);

// Divisors of the rotary frequencies, as llama.cpp stores them in rope_freqs.weight: head_dim / 2 of them, none for
// another kind than llama3.
std::vector<float> llama3_divisors(const RopeConfig& rope, int64_t head_dim);
// The llama3 scaling behind such divisors of frequencies of the base `theta`: factors 1 and 4 and a power of two as
// context are tried. None where no such scaling fits.
std::optional<RopeConfig> recover_llama3_scaling(const std::vector<float>& divisors, double theta);

// GGUF keeps float32; 1e-5 shall be read as that, not with the digits of its nearest float32.
double shortest_decimal(double value);

}  // namespace tessera
