// A Linear with a frozen weight in about 4 bits per element (kernels/linear/quantized_weight.h): the base of adapters
// in QLoRA.
//
//   nn::quantize_linears(*model, {.format = nn::Quantization::kNf4});      // on the meta device, before values exist
//   add_adapters(*model, config);                                          // LoraLinears take over the packed weights
//   load_pretrained(*model, folder);                                       // packs them one by one
//
// The weight is no parameter: named_parameters(), optimizers, FSDP and checkpoints do not include it. Each rank that
// has the layer holds the whole packed weight, also under FSDP and tensor parallelism; with tensor parallelism a rank
// multiplies only with its rows or columns. to_empty() sets the device of the weight. Ownership and thread rules are
// those of nn::Module.
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
  kNf4,   // packed from weights of any dtype
  kGguf,  // the blocks of a GGUF file; each tensor keeps its block type
};

struct QuantizeOptions {
  Quantization format = Quantization::kNf4;
  bool double_quant = false;  // NF4 only: store the scales in 8 bits
};

// A packed weight; `weight` is undefined until pack() or set_weight(). A QuantizedLinear and the LoraLinear that
// replaces it share the object.
struct PackedWeight {
  int64_t out = 0, in = 0;
  QuantizeOptions quantize_options{};
  kernels::QuantizedWeight weight{};            // undefined: no values yet
  uint64_t serial = 0;                          // number of the taken weight, unique in the process
  c10::Device device = c10::Device(c10::kCPU);  // the device of the packed weight
  // For tensor parallelism: `mesh` is its mesh, else null. `weight_placement` is the weight's placement on `mesh`:
  // Shard(0), Shard(1) or Replicate.
  MeshPtr mesh{};
  Placement weight_placement = Replicate();
  // Quantizes `values`, a floating-point tensor [out, in] on the CPU, and sets `weight`. Error kConfig for the format
  // kGguf, whose blocks must be set with set_weight().
  void pack(const at::Tensor& values);
  // Sets the weight and copies it to `device`.
  void set_weight(const kernels::QuantizedWeight& packed);
  // Returns linear(x, weight, bias) [..., out]. Without a mesh, x is a plain tensor. With a mesh, x is a DTensor:
  // Shard(-1) for weight_placement Shard(1), else Replicate. The result is Shard(-1) for weight_placement Shard(0),
  // Partial for Shard(1), and Replicate for Replicate.
  at::Tensor product(const at::Tensor& x, const at::Tensor& bias) const;
  // Returns the decoded weight, float32 [out, in]; with a mesh it is a DTensor with the placement `weight_placement`.
  at::Tensor values() const;

 private:
  kernels::QuantizedWeight local_weight() const;
};

// A Linear with a PackedWeight: `weight` is undefined. It has `bias` [out] if the Linear that it replaces has one.
struct QuantizedLinear : Linear {
  std::shared_ptr<PackedWeight> packed;
  // Makes the layer that replaces `former`. The values of former.weight are not read. Error kConfig for a Linear with
  // hooks.
  QuantizedLinear(Linear& former, const QuantizeOptions& options);
  at::Tensor forward(const at::Tensor& x) override;
};

// Replaces each Linear below `root` by a QuantizedLinear; classes derived from Linear, heads, embeddings, routers and
// stacked experts stay unchanged. Error kConfig for modules with hooks.
void quantize_linears(Module& root, const QuantizeOptions& options);
// Returns the packed weight of a QuantizedLinear or LoraLinear; null for other modules and for a LoraLinear without
// one.
PackedWeight* packed_weight_of(Module& module);
// Returns all packed weights below `root`, each with the FQN of the weight parameter that it replaces.
std::vector<std::pair<std::string, PackedWeight*>> packed_weights(Module& root);

}  // namespace tessera::nn
