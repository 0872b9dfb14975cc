// Loads a model for generation with Engine, in the dtype of the setting --dtype.
//
//   auto model = load_for_generation(dir, "int8", at::kCPU);
//   Engine engine(model, {.pages = Engine::pages_for(8192)});         // cache_memory.h computes how many pages fit
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/kernels/linear/batch_invariant_linear.h"
#include "tessera/models/decoder/causal_lm.h"

namespace tessera {

// `dtype` is "" (as stored), "float32", "bfloat16", "float16", or, on the CPU only, "int8" or "int4". On the CPU it is
// the dtype of the weights in memory; the computation is in float32, and the model is a row model (row_model.h). Error
// kConfig for any other dtype, and for int8 and int4 on other devices.
std::shared_ptr<CausalLM> load_for_generation(const std::filesystem::path& dir, const std::string& dtype,
                                              c10::Device device);
// Returns kInt8 for "int8" and kInt4 for "int4"; nullopt for all other values of --dtype.
std::optional<kernels::WeightFormat> packed_row_dtype(std::string_view dtype);

}  // namespace tessera
