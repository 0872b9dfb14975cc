// The values of a model straight from a GGUF file, tensor by tensor: what packs its weights as GGUF does
// (nn::Quantization::kGguf) takes the blocks as they are, everything else is decoded.
#pragma once

#include <filesystem>

#include "tessera/models/decoder/causal_lm.h"

namespace tessera {

// A file that ends in .gguf; of a folder that gguf_to_linked_folder() made, its link. Else empty.
std::filesystem::path gguf_of(const std::filesystem::path& path);

// Every parameter and packed weight of the model from the file, each rank its own part. The config is the model's; the
// file must hold what it wants, in its shapes: Error kFormat or kConfig before anything is changed. No communication.
void load_gguf(CausalLM& model, const std::filesystem::path& file, c10::Device device);
void check_gguf(CausalLM& model, const std::filesystem::path& file);

}  // namespace tessera
