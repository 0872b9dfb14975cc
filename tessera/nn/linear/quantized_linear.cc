#include "tessera/nn/linear/quantized_linear.h"

#include <ATen/core/Tensor.h>

#include <atomic>

#include "tessera/base/error.h"
#include "tessera/kernels/dispatch/result_form.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/linear/lora.h"

namespace tessera::nn {

void PackedWeight::pack(const at::Tensor& values) {
  TESSERA_CHECK(quantize_options.format == Quantization::kNf4, ErrorKind::kConfig,
                "[nn.quantize] found values of a weight [{}, {}], wanted the blocks of a GGUF file. Load a GGUF file "
                "(model.weights=FILE.gguf), or quantise to nf4.",
                out, in);
  TESSERA_CHECK(values.dim() == 2 && values.size(0) == out && values.size(1) == in, ErrorKind::kShape,
                "[nn.quantize] found values of {}, wanted [{}, {}]", c10::str(values.sizes()), out, in);
  set_weight(kernels::QuantizedWeight::nf4(values, {.double_quant = quantize_options.double_quant}));
}

// Each set_weight() call gives a new serial number, by which the CUDA graph of a layer
// (parallel/layers/layer_snapshot.h) notices a new weight.
void PackedWeight::set_weight(const kernels::QuantizedWeight& packed) {
  static std::atomic<uint64_t> taken{0};
  weight = packed.to(device);
  serial = ++taken;
}

// Returns the rows or columns of the weight with which this rank multiplies. With tensor parallelism, too, every rank
// holds the whole packed weight.
kernels::QuantizedWeight PackedWeight::local_weight() const {
  if (!mesh || !weight_placement.is_shard()) return weight;
  const int64_t dim = weight_placement.dim;
  const auto own = local_range(dim == 0 ? out : in, mesh->size(), mesh->local_rank(0));
  return weight.part(dim, own.size == 0 ? 0 : own.offset, own.size);
}

at::Tensor PackedWeight::product(const at::Tensor& x, const at::Tensor& bias) const {
  if (!mesh) return kernels::quantized_linear(x, weight, bias);
  const bool rows = weight_placement.is_shard(0), columns = weight_placement.is_shard(1);
  const Placement x_placement = columns ? Placement(Shard(x.dim() - 1)) : Placement(Replicate());
  TESSERA_CHECK(is_dtensor(x) && placements(x) == Placements{x_placement}, ErrorKind::kShape,
                "[nn.quantize] a weight [{}, {}] with placement {}: found x as {}, wanted {}", out, in,
                to_string(weight_placement), is_dtensor(x) ? to_string(placements(x)) : "a plain tensor",
                to_string(Placements{x_placement}));
  // With Shard(0) of the weight (output features), each rank's gradient of x has only the contribution of its own
  // outputs, so the gradient is Partial.
  const auto own = to_local(x, Placements{rows ? Placement(Partial()) : x_placement});
  const auto y = kernels::quantized_linear(own, local_weight());
  const Placement result_placement = rows      ? Placement(Shard(x.dim() - 1))
                                     : columns ? Placement(Partial())
                                               : Replicate();
  const auto whole =
      from_local(y, mesh, {result_placement}, FromLocalOptions::contiguous(kernels::with_last(x.sizes(), out)));
  return bias.defined() ? whole + bias.to(whole.scalar_type()) : whole;
}

at::Tensor PackedWeight::values() const {
  const auto own = local_weight().values();
  return mesh ? from_local(own, mesh, {weight_placement}, FromLocalOptions::contiguous({out, in})) : own;
}

QuantizedLinear::QuantizedLinear(Linear& former, const QuantizeOptions& options)
    : Linear(former, /*with_weight=*/false),
      packed(std::make_shared<PackedWeight>(
          PackedWeight{.out = former.weight.size(0), .in = former.weight.size(1), .quantize_options = options})) {
  TESSERA_CHECK(
      !former.has_hooks(), ErrorKind::kConfig,
      "[nn.quantize] found hooks on a Linear [{}, {}], wanted none. Quantise before the model is parallelized.",
      packed->out, packed->in);
}

at::Tensor QuantizedLinear::forward(const at::Tensor& x) { return packed->product(x, bias); }

void quantize_linears(Module& root, const QuantizeOptions& options) {
  replace_linears(root, [&](Linear& former) { return std::make_shared<QuantizedLinear>(former, options); });
}

PackedWeight* packed_weight_of(Module& module) {
  if (auto* const plain = dynamic_cast<QuantizedLinear*>(&module)) return plain->packed.get();
  if (auto* const adapted = dynamic_cast<LoraLinear*>(&module)) return adapted->packed.get();
  return nullptr;
}

std::vector<std::pair<std::string, PackedWeight*>> packed_weights(Module& root) {
  std::vector<std::pair<std::string, PackedWeight*>> out;
  for (const auto& [path, module] : root.named_modules()) {
    if (auto* const packed = packed_weight_of(*module)) out.emplace_back(path + ".weight", packed);
  }
  return out;
}

}  // namespace tessera::nn
