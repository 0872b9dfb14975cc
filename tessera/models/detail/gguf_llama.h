// What the Llama architecture's tensors are called on both sides, their shapes, and the order of rotary rows.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace at {
class Tensor;
}

namespace tessera::detail {

struct LlamaShape {
  int64_t layers = 0;
  int64_t hidden = 0;
  int64_t ff = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t vocab = 0;
  bool tied = false;
  bool attention_bias = false;
  bool mlp_bias = false;
};

struct LlamaTensor {
  std::string gguf_name;
  std::string hf_name;
  std::vector<int64_t> shape;
  int64_t rotary_heads = 0;  // heads whose rows llama.cpp stores in another order; 0: none
};

// Error kFormat when a number is zero, absurd or does not divide what it must. Where: the file, for messages.
void check_llama_shape(const LlamaShape& shape, const std::string& where);
std::vector<LlamaTensor> llama_tensors(const LlamaShape& shape);

// Hugging Face keeps the two halves of a head apart, llama.cpp interleaves them: row 2i of a head is row i of the first
// half, row 2i+1 is row i of the second.
at::Tensor interleave_rotary_rows(const at::Tensor& tensor, int64_t heads);
at::Tensor split_rotary_rows(const at::Tensor& tensor, int64_t heads);

struct Llama3Scaling {
  double factor = 8;
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  double original_context = 8192;
};

// Divisors of the rotary frequencies, as llama.cpp stores them in rope_freqs.weight; head_dim / 2 of them.
std::vector<float> llama3_divisors(const Llama3Scaling& scaling, double theta, int64_t head_dim);
// The scaling behind such divisors: factors 1 and 4 and a power of two as context are tried. False: none fits.
bool recover_llama3_scaling(const std::vector<float>& divisors, double theta, Llama3Scaling& scaling);

}  // namespace tessera::detail
