// Converts the rope settings of a model to and from GGUF, which has metadata keys for them and, for llama3, a tensor of
// divisors.
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

// Writes the metadata keys ARCHITECTURE.rope.*. Error kConfig, with `where` in the message, for rope settings that GGUF
// cannot express.
void set_rope_keys(const RopeConfig& rope, const std::string& architecture, const std::string& where,
                   GgufWriter& writer);
// Returns the value of rope_scaling for config.json; null when the file has no rope scaling.
nlohmann::ordered_json rope_scaling(const GgufFile& file, const std::string& architecture, double theta,
                                    int64_t head_dim);

// Returns the divisors of the rotary frequencies that llama.cpp stores in rope_freqs.weight: head_dim / 2 numbers, or
// none for a kind other than llama3.
std::vector<float> llama3_divisors(const RopeConfig& rope, int64_t head_dim);
// Returns llama3 settings with which llama3_divisors() gives these divisors, for rope_theta `theta`. It assumes
// low_freq_factor 1 and high_freq_factor 4, and tries powers of two for original_max_position_embeddings. Returns
// nullopt when no settings fit.
std::optional<RopeConfig> recover_llama3_scaling(const std::vector<float>& divisors, double theta);

// Returns the number with the fewest decimal digits that has the same float32 value. GGUF stores float32; 1e-5 in a
// file must become 1e-5 in config.json, not 9.99999974e-06.
double shortest_decimal(double value);

}  // namespace tessera
