// What a model's tensors are called in GGUF, and how they are stored there otherwise than in Hugging Face folders.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace at {
class Tensor;
}

namespace tessera {
struct GgufMap;
struct ModelConfig;
struct WeightMap;
}  // namespace tessera

namespace tessera {

struct GgufTensor {
  std::string gguf_name;
  std::string hf_name;
  std::vector<int64_t> shape;
  int64_t rotary_heads = 0;  // heads whose rows llama.cpp stores in another order; 0: none
  bool one_plus = false;     // stored with 1 added
  bool router = false;       // always stored as F32
  // Of stacked experts [experts, rows, columns]: rows first_row, first_row + 1, ... of each expert of the parameter
  // hf_name, [experts, stack_rows, columns], in whose place a folder may have tensors of each expert. Null: no stack.
  const WeightMap* stacks = nullptr;
  int64_t first_row = 0, stack_rows = 0;
};

// What a folder that calls the stack so calls the tensors of each expert, in their order: [rows, columns] each.
std::vector<std::string> names_of_experts(const GgufTensor& tensor, const std::string& stack_name);

std::vector<GgufTensor> gguf_tensors(const GgufMap& map, const ModelConfig& config);
// A value as GGUF stores it, and back; norms that differ by 1 become fp32.
at::Tensor to_gguf(const GgufTensor& tensor, const at::Tensor& value);
at::Tensor from_gguf(const GgufTensor& tensor, const at::Tensor& value);

// Hugging Face keeps the two halves of a head apart, llama.cpp interleaves them: row 2i of a head is row i of the first
// half, row 2i+1 is row i of the second.
at::Tensor interleave_rotary_rows(const at::Tensor& tensor, int64_t heads);
at::Tensor split_rotary_rows(const at::Tensor& tensor, int64_t heads);

}  // namespace tessera
