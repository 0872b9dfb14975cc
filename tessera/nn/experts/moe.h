// A mixture of experts (MoE) in place of an MLP: a router sends each token to a few of many small MLPs.
//
//   const nn::MoEOptions moe_options{.width = 2048, .inner = 768, .experts = 128, .experts_per_token = 8};
//   auto moe = std::make_shared<nn::MoE>(moe_options, options);
//   at::Tensor y = (*moe)(x, {});                     // x [..., width]
//
// Parameter names are those of transformers 5: gate.weight, and the stacked experts: experts.gate_up_proj,
// experts.down_proj. Tokens are sorted by expert, and each expert computes all its rows at once. An expert without
// tokens computes nothing and gets a zero gradient. Without a capacity no token is dropped. Ownership and thread rules
// are those of nn::Module. No communication, unless a TokenDispatcher is set (parallel/experts).
#pragma once

#include "tessera/nn/activation.h"
#include "tessera/nn/experts/router_statistics.h"
#include "tessera/nn/module.h"
#include "tessera/nn/options.h"

namespace tessera {
class DeviceMesh;
}

namespace tessera::nn {

struct MoEOptions {
  int64_t width = 0;
  int64_t inner = 0;  // of one expert
  int64_t experts = 0;
  int64_t experts_per_token = 1;  // top-k
  bool normalise_top_k = false;   // divide the weights of a token's experts by their sum
  Activation activation = Activation::kSilu;
  // In training, an expert takes at most ceil(capacity_factor * T * experts_per_token / experts) choices from a
  // sequence of T tokens: the choices with the largest weights, the first ones among equal weights. Dropped choices add
  // nothing to their tokens' results; the other weights do not change. 0: no limit. (Megatron's
  // moe_expert_capacity_factor with the policy "probs" counts over all sequences of a rank, so its results depend on
  // the layout.)
  double capacity_factor = 0;
};

// True for tokens that are not padding: bool, in the shape of the tokens. Undefined: no token is padding. Router
// statistics skip padding. With an expert capacity, padding tokens are dropped before other tokens.
struct NonPaddingMask {
  at::Tensor mask{};
  template <class F>
  void visit_tensors(F&& visit) {
    if (mask.defined()) visit(mask);
  }
};

struct RouterOutput {
  at::Tensor experts;  // int64 [N, experts_per_token]
  at::Tensor weights;  // [N, experts_per_token], in the dtype of the tokens
  template <class F>
  void visit_tensors(F&& visit) {
    visit(experts);
    visit(weights);
  }
};

// weight [experts, width]. Computes the softmax over all experts in float32 and chooses the `experts_per_token` experts
// with the largest probabilities.
struct Router : Callable<Router> {
  at::Tensor weight;
  std::shared_ptr<RouterStatistics> statistics;  // null: nothing is counted
  // A mesh whose ranks hold the same weight but different tokens: backward all-reduces the weight's gradient over it.
  // Null: the gradient is not reduced here.
  std::shared_ptr<const DeviceMesh> tokens_over;
  Router(const MoEOptions& moe, const ParameterOptions& options);
  // Returns the chosen experts and their weights for each row of `rows` [N, width]. real.mask is bool [N], true for
  // rows that are not padding; undefined: no row is padding.
  virtual RouterOutput forward(const at::Tensor& rows, const NonPaddingMask& real);

 private:
  int64_t experts_per_token_;
  bool normalise_top_k_;
};

// gate_up_proj [experts, 2 inner, width], gate before up; down_proj [experts, width, inner]. With expert parallelism
// these are DTensors that are sharded on dim 0, and each rank has some of the experts.
struct Experts : Callable<Experts> {
  at::Tensor gate_up_proj, down_proj;
  Experts(const MoEOptions& moe, const ParameterOptions& options);
  // Applies to each row the gated MLP of its expert. rows [M, width], sorted by expert. counts: int64 on the CPU, the
  // number of rows of each expert of this rank. Returns [M, width].
  virtual at::Tensor forward(const at::Tensor& rows, const at::Tensor& counts);
  int64_t inner() const { return inner_; }

 private:
  int64_t inner_;
  Activation activation_;
};

// The permutation that sorts the choices (token, expert) of N tokens by expert. The sort is stable; dropped choices
// come last.
struct ExpertPermutation {
  at::Tensor order, inverse;  // int64 [N * experts_per_token]: order of the flattened choices, and its inverse
  at::Tensor counts;          // int64 [experts] on the CPU
};
// Returns the permutation for the choices expert_ids, int64 [N, k]. `experts` is the number of experts; an entry of
// expert_ids with this value marks a dropped choice.
ExpertPermutation permutation_by_expert(const at::Tensor& expert_ids, int64_t experts);
// Copies rows [N, width] once per choice, sorted by expert, without dropped choices: [sum of counts, width].
at::Tensor permute_to_experts(const at::Tensor& rows, const ExpertPermutation& order, int64_t experts_per_token);
// Weights the experts' results, sorted as in `order`, and sums them per token: [N, width].
at::Tensor unpermute_and_combine(const at::Tensor& results, const ExpertPermutation& order, const at::Tensor& weights);

struct MoE;
// Sends the tokens of an MoE module to experts on other ranks (expert parallelism).
class TokenDispatcher {
 public:
  virtual ~TokenDispatcher() = default;
  // MoE::forward calls run() and returns its result.
  virtual at::Tensor run(MoE& block, const at::Tensor& x, const NonPaddingMask& real) = 0;
};

struct MoE : Callable<MoE> {
  std::shared_ptr<Router> gate;
  std::shared_ptr<Experts> experts;
  MoE(const MoEOptions& moe, const ParameterOptions& options);
  // Error kShape for a DTensor x unless a TokenDispatcher is set.
  virtual at::Tensor forward(const at::Tensor& x, const NonPaddingMask& real);
  void set_exchange(std::shared_ptr<TokenDispatcher> exchange) { exchange_ = std::move(exchange); }
  int64_t expert_count() const { return expert_count_; }
  int64_t experts_per_token() const { return experts_per_token_; }
  double capacity_factor() const { return capacity_factor_; }
  // Routes rows of whole sequences of `length` tokens and sorts the choices by expert. In training it drops choices
  // beyond the capacity. Error kConfig for a capacity inside a context_parallel scope, where no rank has whole
  // sequences.
  std::pair<RouterOutput, ExpertPermutation> route(const at::Tensor& rows, int64_t length, const NonPaddingMask& real);

 private:
  int64_t expert_count_, experts_per_token_;
  double capacity_factor_;
  std::shared_ptr<TokenDispatcher> exchange_;
};

}  // namespace tessera::nn
