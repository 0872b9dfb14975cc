#include "tessera/models/generation/row_model.h"

#include <algorithm>
#include <cmath>
#include <typeinfo>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/models/decoder/decoder.h"
#include "tessera/models/generation/row_experts.h"

namespace tessera {
namespace {

const nn::ParameterOptions kMetaOptions{.device = at::Device(at::kMeta)};

at::Tensor to_float32(const at::Tensor& tensor) { return tensor.defined() ? tensor.detach().to(at::kFloat) : tensor; }

struct RowLinear : nn::Linear {
  RowLinear(const nn::Linear& from, kernels::WeightFormat dtype)
      : Linear(from.weight.size(1), from.weight.size(0), false, kMetaOptions),
        values(kernels::InferenceWeight::of(from.weight, dtype)),
        bias_values(to_float32(from.bias)) {}
  at::Tensor forward(const at::Tensor& x) override { return kernels::batch_invariant_linear(x, values, bias_values); }
  kernels::InferenceWeight values;
  at::Tensor bias_values;
};

struct RowHead : nn::Head {
  RowHead(const nn::Head& from, const ModelConfig& config, kernels::WeightFormat dtype)
      : Head(from.weight.size(1), from.weight.size(0), kMetaOptions),
        // With int4 the head is stored as int8, because rounding errors of the head change the logits directly.
        values(kernels::InferenceWeight::of(
            from.weight, dtype == kernels::WeightFormat::kInt4 ? kernels::WeightFormat::kInt8 : dtype)),
        softcap(static_cast<float>(config.final_logit_softcapping)) {}
  at::Tensor forward(const at::Tensor& x) override {
    auto logits = kernels::batch_invariant_linear(x, values);
    if (softcap > 0) {
      float* each = logits.data_ptr<float>();
      for (int64_t i = 0; i < logits.numel(); ++i) each[i] = softcap * std::tanh(each[i] / softcap);
    }
    return logits;
  }
  kernels::InferenceWeight values;
  float softcap;
};

// gate and up read the same input, so one call computes both products.
struct RowMlp : nn::MLP {
  RowMlp(const nn::MLP& from, const ModelConfig& config, kernels::WeightFormat dtype)
      : MLP(from.gate_proj->weight.size(1), from.gate_proj->weight.size(0), {}, kMetaOptions),
        gate(*from.gate_proj, dtype),
        up(*from.up_proj, dtype),
        down(*from.down_proj, dtype),
        gelu(config.activation != nn::Activation::kSilu) {}
  at::Tensor forward(const at::Tensor& x) override {
    const std::array<const kernels::InferenceWeight*, 2> weights = {&gate.values, &up.values};
    const std::array<at::Tensor, 2> addends = {gate.bias_values, up.bias_values};
    const auto both = kernels::batch_invariant_linears(x, weights, addends);
    return down(kernels::batch_invariant_gate(both[0], both[1], gelu));
  }
  RowLinear gate, up, down;
  bool gelu;
};

// q, k and v read the same input, so one call computes the three products. q_norm and k_norm, if the layer has them,
// are the same module objects as in `from`, the Attention that this module replaces.
struct RowAttention : nn::Attention {
  RowAttention(const nn::Attention& from, kernels::WeightFormat dtype)
      : Attention(from.options(), kMetaOptions),
        q(*from.q_proj, dtype),
        k(*from.k_proj, dtype),
        v(*from.v_proj, dtype),
        o(*from.o_proj, dtype) {
    if (from.q_norm) replace_child("q_norm", from.q_norm);
    if (from.k_norm) replace_child("k_norm", from.k_norm);
  }
  at::Tensor forward(const at::Tensor& x, const nn::AttentionContext& context) override {
    const std::array<const kernels::InferenceWeight*, 3> weights = {&q.values, &k.values, &v.values};
    const std::array<at::Tensor, 3> addends = {q.bias_values, k.bias_values, v.bias_values};
    const auto all = kernels::batch_invariant_linears(x, weights, addends);
    return o(attend_heads(all[0], all[1], all[2], context));
  }
  RowLinear q, k, v, o;
};

// Takes the rotary angles of a position (cos and sin) from a table, because at::cos may round the same number
// differently at different indices of a tensor. The table grows in blocks that always begin and end at the same
// positions, so a position always has the same angles.
struct RowAngles : RotaryEmbedding {
  RowAngles(const RopeConfig& rope, const ModelConfig& config)
      : RotaryEmbedding(rope, config.head_dim, config.max_position_embeddings),
        max_positions(config.max_position_embeddings) {}
  nn::RotaryAngles forward(const at::Tensor& x, const at::Tensor& positions) override {
    constexpr int64_t kBlock = 1024;
    const int64_t needed_positions = positions.max().item<int64_t>() + 1;
    if (is_dynamic() && needed_positions > max_positions) {
      return forward_by_lengths(x, positions, at::full_like(positions, needed_positions));
    }
    for (int64_t known = cos.defined() ? cos.size(0) : 0; known < needed_positions; known = cos.size(0)) {
      // The table of angles grows by blocks of positions. One block ends exactly at max_position_embeddings. If a block
      // went beyond this position, the rope type "dynamic" would compute all angles of the block differently, as for a
      // longer sequence.
      const int64_t end = known < max_positions ? std::min(known + kBlock, max_positions) : known + kBlock;
      const auto block = RotaryEmbedding::forward(x, at::arange(known, end, at::kLong).unsqueeze(0));
      cos = known == 0 ? block.cos[0] : at::cat({cos, block.cos[0]});
      sin = known == 0 ? block.sin[0] : at::cat({sin, block.sin[0]});
    }
    const auto flat = positions.reshape({-1});
    const auto of = [&](const at::Tensor& table) {
      return table.index_select(0, flat).view({positions.size(0), positions.size(1), -1});
    };
    return {of(cos), of(sin)};
  }
  int64_t max_positions;
  at::Tensor cos, sin;  // [positions, head_dim / 2]
};

// Returns `module` as an M if its type is exactly M, else null. A class derived from M is refused, because it may
// compute something else.
template <class M>
M* exact_cast(nn::Module* module) {
  auto* typed = dynamic_cast<M*>(module);
  return typed != nullptr && typeid(*module) == typeid(M) ? typed : nullptr;
}

// Returns the module that replaces `child` in a row model, or null when `child` is not replaced. Attention and MLP are
// converted only when all their projections are plain Linears.
std::shared_ptr<nn::Module> make_row_module(nn::Module* child, const std::string& name, const ModelConfig& config,
                                            kernels::WeightFormat dtype) {
  const auto plain = [](const auto&... linears) { return ((exact_cast<nn::Linear>(linears.get()) != nullptr) && ...); };
  if (auto* attention = exact_cast<nn::Attention>(child)) {
    if (!plain(attention->q_proj, attention->k_proj, attention->v_proj, attention->o_proj)) return nullptr;
    return std::make_shared<RowAttention>(*attention, dtype);
  }
  if (auto* mlp = exact_cast<nn::MLP>(child)) {
    if (!plain(mlp->gate_proj, mlp->up_proj, mlp->down_proj)) return nullptr;
    return std::make_shared<RowMlp>(*mlp, config, dtype);
  }
  if (auto* moe = exact_cast<nn::MoE>(child)) return make_row_experts(*moe, config, dtype);
  if (auto* head = exact_cast<nn::Head>(child)) return std::make_shared<RowHead>(*head, config, dtype);
  if (auto* linear = exact_cast<nn::Linear>(child)) return std::make_shared<RowLinear>(*linear, dtype);
  if (exact_cast<RotaryEmbedding>(child) != nullptr) {
    const bool local = name == "rotary_emb_local";
    return std::make_shared<RowAngles>(local ? *config.local_rope : config.rope, config);
  }
  return nullptr;
}

// Replaces all modules below `parent` for which make_row_module() returns a module, and keeps all others.
void replace_children(nn::Module& parent, const std::string& path, const ModelConfig& config,
                      kernels::WeightFormat dtype) {
  const auto children = parent.named_children();
  for (const auto& [name, child] : children) {
    if (!child) continue;
    std::shared_ptr<nn::Module> row_module;
    try {
      row_module = make_row_module(child.get(), name, config, dtype);
    } catch (const Error& error) {
      raise(error.kind(), "[models.generation] {}{}: {}", path, name, error.what());
    }
    if (row_module) {
      parent.replace_child(name, row_module);
    } else {
      replace_children(*child, path + name + ".", config, dtype);
    }
  }
}

}  // namespace

kernels::WeightFormat stored_row_dtype(CausalLM& model) {
  switch (model.parameters().front().scalar_type()) {
    case at::kBFloat16:
      return kernels::WeightFormat::kBFloat16;
    case at::kHalf:
      return kernels::WeightFormat::kFloat16;
    default:
      return kernels::WeightFormat::kFloat32;
  }
}

void make_row_model(CausalLM& model, kernels::WeightFormat dtype) {
  const auto parameters = model.named_parameters();
  for (const auto& parameter : parameters) {
    const auto& value = parameter.slot->parameter;
    TESSERA_CHECK(!is_dtensor(value) && value.is_cpu() && !value.is_meta(), ErrorKind::kConfig,
                  "[models.generation] {} is {}, wanted a whole tensor on the CPU", parameter.name,
                  is_dtensor(value) ? "a DTensor" : "on " + value.device().str());
  }
  model.set_requires_grad(false);
  replace_children(model, "", model.config(), dtype);
  // batch_invariant_linear() takes and returns fp32. Norm weights are converted to fp32. The embedding keeps its stored
  // dtype; a hook converts its output.
  for (const auto& [path, module] : model.named_modules()) {
    if (dynamic_cast<nn::RMSNorm*>(module) != nullptr) {
      for (auto& slot : module->own_parameters()) nn::Module::set_parameter(slot, to_float32(slot.parameter));
    } else if (dynamic_cast<nn::Embedding*>(module) != nullptr) {
      module->register_forward_hook(nn::ForwardHook([](nn::Module&, nn::TensorRefs& outputs) {
        for (auto* output : outputs) *output = to_float32(*output);
      }));
    }
  }
}

}  // namespace tessera
