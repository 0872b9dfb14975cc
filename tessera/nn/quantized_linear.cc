#include "tessera/nn/quantized_linear.h"

#include <ATen/core/Tensor.h>

#include <typeinfo>

#include "tessera/base/error.h"
#include "tessera/nn/lora.h"

namespace tessera::nn {

void PackedWeight::pack(const at::Tensor& values) {
  TESSERA_CHECK(how.format == Quantization::kNf4, ErrorKind::kConfig,
                "[nn.quantize] found values of a weight [{}, {}], wanted the blocks of a GGUF file. Start from one "
                "(model.weights=FILE.gguf), or quantise to nf4.",
                out, in);
  TESSERA_CHECK(values.dim() == 2 && values.size(0) == out && values.size(1) == in, ErrorKind::kShape,
                "[nn.quantize] found values of {}, wanted [{}, {}]", c10::str(values.sizes()), out, in);
  weight = QuantizedWeight::nf4(values, {.double_quant = how.double_quant});
}

QuantizedLinear::QuantizedLinear(Linear& former, const QuantizeOptions& options)
    : Linear(1, 1, former.bias.defined(), {.dtype = former.weight.scalar_type(), .device = c10::Device(c10::kMeta)}),
      packed(std::make_shared<PackedWeight>(
          PackedWeight{.out = former.weight.size(0), .in = former.weight.size(1), .how = options})) {
  TESSERA_CHECK(!former.has_hooks(), ErrorKind::kConfig,
                "[nn.quantize] a Linear [{}, {}] has hooks already. Quantise before the model is parallelized.",
                packed->out, packed->in);
  auto& own = own_parameters();
  own.erase(own.begin());
  weight.reset();
  for (size_t i = 0; i < own.size(); ++i) {
    const auto& slot = former.own_parameters()[i + 1];
    own[i].decay = slot.decay;
    set_parameter(own[i], slot.parameter);
  }
  train(former.training());
}

at::Tensor QuantizedLinear::forward(const at::Tensor& x) { return quantized_linear(x, packed->weight, bias); }

void quantize_linears(Module& root, const QuantizeOptions& options) {
  const auto children = root.named_children();
  for (const auto& [name, child] : children) {
    auto* const linear = dynamic_cast<Linear*>(child.get());
    if (linear == nullptr) {
      quantize_linears(*child, options);
    } else if (typeid(*linear) == typeid(Linear)) {
      root.replace_child(name, std::make_shared<QuantizedLinear>(*linear, options));
    }
  }
}

std::vector<std::pair<std::string, PackedWeight*>> packed_weights(Module& root) {
  std::vector<std::pair<std::string, PackedWeight*>> out;
  for (const auto& [path, module] : root.named_modules()) {
    PackedWeight* packed = nullptr;
    if (auto* const plain = dynamic_cast<QuantizedLinear*>(module)) packed = plain->packed.get();
    if (auto* const adapted = dynamic_cast<LoraLinear*>(module)) packed = adapted->packed.get();
    if (packed != nullptr) out.emplace_back(path + ".weight", packed);
  }
  return out;
}

}  // namespace tessera::nn
