// Loads a model's weights from a GGUF file, tensor by tensor. Modules that pack their weights in GGUF's blocks
// (nn::Quantization::kGguf) take the blocks unchanged; all other tensors are decoded.
#pragma once

#include <filesystem>

#include "tessera/models/decoder/causal_lm.h"

namespace tessera {

// If `path` ends in .gguf, returns `path`. For a folder that gguf_to_linked_folder() made, returns the link in it. Else
// returns an empty path.
std::filesystem::path gguf_of(const std::filesystem::path& path);

// Loads every parameter and packed weight of the model from the file; each rank loads its own shard. The file must have
// the tensors of the model's config, in their shapes: Error kFormat or kConfig before anything is changed. No
// communication.
void load_gguf(CausalLM& model, const std::filesystem::path& file, c10::Device device);
void check_gguf(CausalLM& model, const std::filesystem::path& file);

}  // namespace tessera
