#include "tessera/models/generation/row_experts.h"

#include <algorithm>
#include <cmath>

#include "tessera/models/decoder/decoder.h"
#include "tessera/models/generation/sampling.h"

namespace tessera {
namespace {

struct RowExpert {
  kernels::InferenceWeight gate, up, down;
};

class RowExperts : public nn::MoE {
 public:
  RowExperts(const nn::MoE& from, const ModelConfig& config, kernels::WeightFormat dtype)
      : MoE(moe_options(config), {.device = at::Device(at::kMeta)}),
        router_(kernels::InferenceWeight::of(from.gate->weight, kernels::WeightFormat::kFloat32)),
        gelu_(config.activation != nn::Activation::kSilu),
        normalise_(config.experts.norm_topk_prob) {
    // gate_up_proj has the rows of gate, then of up.
    const auto &both = from.experts->gate_up_proj, &down = from.experts->down_proj;
    const int64_t inner = from.experts->inner();
    for (int64_t i = 0; i < both.size(0); ++i) {
      experts_.push_back({kernels::InferenceWeight::of(both[i].narrow(0, 0, inner), dtype),
                          kernels::InferenceWeight::of(both[i].narrow(0, inner, inner), dtype),
                          kernels::InferenceWeight::of(down[i], dtype)});
    }
  }

  at::Tensor forward(const at::Tensor& x, const nn::NonPaddingMask&) override {
    const auto rows = x.reshape({-1, x.size(-1)});
    const int64_t tokens = rows.size(0), width = rows.size(1), top_k = experts_per_token();
    // Each expert computes its tokens with batch_invariant_linear(), whose result for a row does not depend on the
    // other rows. Then the weighted results of a token's experts are added in the order of their router weights, so
    // that the sum also rounds the same in every batch.
    const auto logits = kernels::batch_invariant_linear(rows, router_);
    std::vector<std::vector<int64_t>> choices(experts_.size());  // for each expert: token * top_k + rank of the choice
    std::vector<float> weights(static_cast<size_t>(tokens * top_k));
    for (int64_t token = 0; token < tokens; ++token) {
      choose(logits.const_data_ptr<float>() + token * logits.size(1), token, choices, weights);
    }
    const auto results = at::empty({tokens * top_k, width}, rows.options());
    for (size_t i = 0; i < experts_.size(); ++i) {
      if (choices[i].empty()) continue;
      const auto places = at::tensor(choices[i], at::kLong);
      const auto own = rows.index_select(0, places.div(top_k, "floor"));
      const std::array<const kernels::InferenceWeight*, 2> both = {&experts_[i].gate, &experts_[i].up};
      const auto inner = kernels::batch_invariant_linears(own, both);
      results.index_copy_(
          0, places,
          kernels::batch_invariant_linear(kernels::batch_invariant_gate(inner[0], inner[1], gelu_), experts_[i].down));
    }
    const auto out = at::zeros({tokens, width}, rows.options());
    const float* from = results.const_data_ptr<float>();
    float* to = out.data_ptr<float>();
    for (int64_t place = 0; place < tokens * top_k; ++place) {
      const float weight = weights[static_cast<size_t>(place)];
      for (int64_t i = 0; i < width; ++i) to[place / top_k * width + i] += weight * from[place * width + i];
    }
    return out.view(x.sizes());
  }

 private:
  // Computes the softmax over all experts and chooses the experts with the largest probabilities; of equal
  // probabilities, the expert with the smaller index.
  void choose(const float* logits, int64_t token, std::vector<std::vector<int64_t>>& choices,
              std::vector<float>& weights) const {
    const auto count = experts_.size();
    const float max_logit = *std::max_element(logits, logits + count);
    std::vector<float> probabilities(count);
    float total = 0;
    for (size_t i = 0; i < count; ++i) total += probabilities[i] = std::exp(logits[i] - max_logit);
    const auto top_k = static_cast<size_t>(experts_per_token());
    const auto order = top_indices(probabilities, top_k);
    float sum = 0;
    for (size_t rank = 0; rank < top_k; ++rank) sum += probabilities[order[rank]] / total;
    for (size_t rank = 0; rank < top_k; ++rank) {
      const auto place = static_cast<size_t>(token) * top_k + rank;
      weights[place] = probabilities[order[rank]] / total / (normalise_ ? sum : 1.0F);
      choices[order[rank]].push_back(static_cast<int64_t>(place));
    }
  }

  kernels::InferenceWeight router_;
  std::vector<RowExpert> experts_;
  bool gelu_, normalise_;
};

}  // namespace

std::shared_ptr<nn::MoE> make_row_experts(const nn::MoE& from, const ModelConfig& config, kernels::WeightFormat dtype) {
  return std::make_shared<RowExperts>(from, config, dtype);
}

}  // namespace tessera
