// A mixture of experts in the place of an MLP: a router sends each token to some of many small MLPs.
//
//   const nn::MoEOptions moe_options{.width = 2048, .inner = 768, .experts = 128, .chosen = 8};
//   auto moe = std::make_shared<nn::MoE>(moe_options, options);
//   at::Tensor y = (*moe)(x, {});                     // x [..., width]
//
// Names are those of transformers 5: gate.weight, and the experts stacked: experts.gate_up_proj, experts.down_proj.
// Tokens are sorted by expert and each expert computes on its rows at once; an expert without tokens computes nothing
// and gets a gradient of zeros. No token is dropped without a capacity. Ownership and threads as nn::Module. No
// communication, but where an exchange of tokens is set (parallel/experts).
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
  int64_t chosen = 1;      // experts that a token takes
  bool normalise = false;  // the weights of a token's experts are divided by their sum
  Activation activation = Activation::kSilu;
  // In training, an expert takes at most ceil(capacity_factor * T * chosen / experts) choices of a sequence of T
  // tokens: those with the largest weights, of equal ones the first; the others add nothing to their tokens' results,
  // whose weights stay as they were. 0: it takes all. (Megatron's moe_expert_capacity_factor with the policy "probs",
  // which counts over all sequences of a rank, so that results depend on the layout.)
  double capacity_factor = 0;
};

// Which tokens are no padding: bool, of the shape of the tokens; undefined: all. Read by router statistics, and by
// experts with a capacity, of which padding takes what is left.
struct RealTokens {
  at::Tensor mask{};
  template <class F>
  void visit_tensors(F&& visit) {
    if (mask.defined()) visit(mask);
  }
};

struct Routing {
  at::Tensor experts;  // int64 [N, chosen]
  at::Tensor weights;  // [N, chosen], in the dtype of the tokens
  template <class F>
  void visit_tensors(F&& visit) {
    visit(experts);
    visit(weights);
  }
};

// weight [experts, width]. Softmax over all experts in float32, of which the largest are taken.
struct Router : Callable<Router> {
  at::Tensor weight;
  std::shared_ptr<RouterStatistics> statistics;   // null: nothing is counted
  std::shared_ptr<const DeviceMesh> tokens_over;  // ranks along it hold the same weight and other tokens: its
                                                  // gradient is summed over them in backward; null: none
  Router(const MoEOptions& moe, const ParameterOptions& options);
  // rows [N, width], their mask [N].
  virtual Routing forward(const at::Tensor& rows, const RealTokens& real);

 private:
  int64_t chosen_;
  bool normalise_;
};

// gate_up_proj [experts, 2 inner, width], gate above up; down_proj [experts, width, inner]. Where they are DTensors
// sharded on dim 0 the experts are those of this rank.
struct Experts : Callable<Experts> {
  at::Tensor gate_up_proj, down_proj;
  Experts(const MoEOptions& moe, const ParameterOptions& options);
  // rows [M, width] sorted by expert; counts int64 on the CPU, the rows of each expert here. [M, width].
  virtual at::Tensor forward(const at::Tensor& rows, const at::Tensor& counts);
  int64_t inner() const { return inner_; }

 private:
  int64_t inner_;
  Activation activation_;
};

// The choices of N tokens, sorted by expert; equal ones keep their order. Those that are dropped come last.
struct ExpertOrder {
  at::Tensor order, inverse;  // int64 [N * chosen]: positions in the flattened choices, and its inverse
  at::Tensor counts;          // int64 [experts] on the CPU
};
// A choice of expert number `experts` is one that is dropped.
ExpertOrder order_by_expert(const at::Tensor& chosen, int64_t experts);
// rows [N, width], each as often as it is taken, sorted by expert: [sum of counts, width].
at::Tensor sort_by_expert(const at::Tensor& rows, const ExpertOrder& order, int64_t chosen);
// The experts' results, sorted as `order` says, weighted and summed for each token: [N, width].
at::Tensor combine(const at::Tensor& results, const ExpertOrder& order, const at::Tensor& weights);

struct MoE;
// How a block's tokens reach experts on other ranks.
class TokenExchange {
 public:
  virtual ~TokenExchange() = default;
  // What MoE::forward gives.
  virtual at::Tensor run(MoE& block, const at::Tensor& x, const RealTokens& real) = 0;
};

struct MoE : Callable<MoE> {
  std::shared_ptr<Router> gate;
  std::shared_ptr<Experts> experts;
  MoE(const MoEOptions& moe, const ParameterOptions& options);
  // Error kShape for a DTensor without an exchange.
  virtual at::Tensor forward(const at::Tensor& x, const RealTokens& real);
  void set_exchange(std::shared_ptr<TokenExchange> exchange) { exchange_ = std::move(exchange); }
  int64_t expert_count() const { return expert_count_; }
  int64_t chosen() const { return chosen_; }
  double capacity_factor() const { return capacity_factor_; }
  // The router's word on rows of whole sequences of `length` tokens, sorted. What goes beyond a capacity is dropped in
  // training. Error kConfig for a capacity within a context_parallel scope, where no rank has whole sequences.
  std::pair<Routing, ExpertOrder> route(const at::Tensor& rows, int64_t length, const RealTokens& real);

 private:
  int64_t expert_count_, chosen_;
  double capacity_factor_;
  std::shared_ptr<TokenExchange> exchange_;
};

}  // namespace tessera::nn
