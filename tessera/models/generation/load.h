// A model for the engine, as users ask for it.
//
//   auto model = load_for_generation(dir, "int8", at::kCPU);
//   Engine engine(model, {.pages = Engine::pages_for(8192)});                // or as cache_room.h says
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/kernels/linear/row_product.h"
#include "tessera/models/decoder/causal_lm.h"

namespace tessera {

// dtype: "" as stored, "float32", "bfloat16", "float16", "int8", "int4" (both CPU alone). On the CPU the dtype is that
// of weights in memory, computed with in float32, and the model is in rows (row_model.h). Error kConfig for any other
// dtype, and for int8 and int4 elsewhere.
std::shared_ptr<CausalLM> load_for_generation(const std::filesystem::path& dir, const std::string& dtype,
                                              c10::Device device);
// kInt8 or kInt4 where --dtype names one of them.
std::optional<kernels::RowDtype> packed_row_dtype(std::string_view dtype);

}  // namespace tessera
