// The names of a model's tensors in GGUF, and the differences between their values there and in Hugging Face folders.
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
  int64_t rotary_heads = 0;  // number of heads whose rows llama.cpp stores in another order; 0: same order
  bool one_plus = false;     // stored with 1 added
  bool router = false;       // always stored as F32
  // Set for stacked experts. The GGUF tensor [experts, rows, columns] has, for each expert, the `rows` rows from
  // first_row on of the parameter hf_name [experts, stack_rows, columns]. `stacks` names the tensors of a folder that
  // has one tensor per expert in place of this parameter. Null: the tensor is not a stack.
  const WeightMap* stacks = nullptr;
  int64_t first_row = 0, stack_rows = 0;
};

// Returns the names, in the order of the experts, of the tensors [rows, columns] in a folder that has one tensor per
// expert. `stack_name` is the name of the stacked parameter in that folder.
std::vector<std::string> names_of_experts(const GgufTensor& tensor, const std::string& stack_name);

std::vector<GgufTensor> gguf_tensors(const GgufMap& map, const ModelConfig& config);
// Convert the value of a tensor from a Hugging Face folder to GGUF, and back. Tensors with GgufTensor::one_plus (norm
// weights) are returned in fp32.
at::Tensor to_gguf(const GgufTensor& tensor, const at::Tensor& value);
at::Tensor from_gguf(const GgufTensor& tensor, const at::Tensor& value);

// Hugging Face stores the two halves of a head's rows one after the other; llama.cpp interleaves them. Row 2i of a head
// in llama.cpp is row i of the first half, and row 2i+1 is row i of the second half.
at::Tensor interleave_rotary_rows(const at::Tensor& tensor, int64_t heads);
at::Tensor split_rotary_rows(const at::Tensor& tensor, int64_t heads);

}  // namespace tessera
