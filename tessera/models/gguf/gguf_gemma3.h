// What Gemma3 has in GGUF beside the keys of all families: windows, the local rotary base, soft caps.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace tessera {
class GgufFile;
class GgufWriter;
struct ModelConfig;
}  // namespace tessera

namespace tessera {

// Error kConfig for what llama.cpp's Gemma3 does not have. `where` is for messages.
void set_gemma3_keys(const ModelConfig& config, const std::string& where, GgufWriter& writer);
// Into the config.json that is made; the keys of all families are in it.
void read_gemma3_keys(const GgufFile& file, nlohmann::ordered_json& config);

}  // namespace tessera
