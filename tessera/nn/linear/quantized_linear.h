// A Linear whose weight is kept packed in about 4 bits and does not learn (kernels/linear/quantized_weight.h): the base
// that adapters stand beside (QLoRA).
//
//   nn::quantize_linears(*model, {.format = nn::Quantization::kNf4});      // on the meta device: before any values
//   add_adapters(*model, config);                                          // LoraLinears take the packed weights over
//   load_pretrained(*model, folder);                                       // packs them one by one
//
// Its weight is no parameter: named_parameters(), optimizers, FSDP and checkpoints do not see it, and it lies whole on
// each rank that has the layer, on any layout; a rank of tensor parallelism multiplies with its rows or columns.
// to_empty() says on which device. Ownership and threads as nn::Module.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/kernels/linear/quantized_weight.h"
#include "tessera/nn/layers.h"

namespace tessera::nn {

enum class Quantization : uint8_t {
  kNf4,   // made from weights of any dtype
  kGguf,  // the blocks of a GGUF file, of whatever type each of its tensors has
};

struct QuantizeOptions {
  Quantization format = Quantization::kNf4;
  bool double_quant = false;  // of NF4: the scales in 8 bits
};

// A weight that will be packed, and then is. Shared by a Linear and what takes its place.
struct PackedWeight {
  int64_t out = 0, in = 0;
  QuantizeOptions how{};
  kernels::QuantizedWeight weight{};            // not defined: no values yet
  uint64_t serial = 0;                          // of the weight that was taken, unlike any other's of the process
  c10::Device device = c10::Device(c10::kCPU);  // where it will be
  // Of tensor parallelism; null: none. `lies` is Shard(0), Shard(1) or Replicate.
  MeshPtr mesh{};
  Placement lies = Replicate();
  // Values [out, in], floating, on the CPU. Error kConfig for kGguf, which takes blocks as they are.
  void pack(const at::Tensor& values);
  void take(const kernels::QuantizedWeight& packed);
  // As linear(x, weight, bias) of plain tensors; with a mesh of DTensors, x replicated or, for Shard(1), cut in its
  // last dim: [..., out] as Shard(-1), Partial or Replicate.
  at::Tensor product(const at::Tensor& x, const at::Tensor& bias) const;
  // float32 [out, in]; with a mesh a DTensor that lies as said.
  at::Tensor values() const;

 private:
  kernels::QuantizedWeight own_part() const;
};

// bias [out] where there is one; `weight` is not defined.
struct QuantizedLinear : Linear {
  std::shared_ptr<PackedWeight> packed;
  // In the place of a Linear, whose values are not looked at. Error kConfig for one that has hooks.
  QuantizedLinear(Linear& former, const QuantizeOptions& options);
  at::Tensor forward(const at::Tensor& x) override;
};

// Puts a QuantizedLinear in place of each Linear below `root` that is one exactly. Heads, embeddings, routers and
// stacked experts stay as they are. Error kConfig for modules that have hooks.
void quantize_linears(Module& root, const QuantizeOptions& options);
// Of a QuantizedLinear or LoraLinear; null: of others there is none.
PackedWeight* packed_weight_of(Module& module);
// Of all modules below `root` that have one, each with the path that its parameter would have.
std::vector<std::pair<std::string, PackedWeight*>> packed_weights(Module& root);

}  // namespace tessera::nn
