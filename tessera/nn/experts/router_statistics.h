// Statistics of how routers spread tokens over experts in one global step, and the load-balance loss from them (Switch
// Transformer, equations 4 to 6; computed as in transformers): experts * sum over experts of (share of the choices *
// mean probability), over all tokens and layers together.
//
// The loss of a step is known only after all its tokens were routed, on all ranks and in all micro-batches; its
// gradient is the same for every token. Therefore it is no tensor of the graph: routers count while they run, the
// totals are summed over the ranks, and each router's backward adds the loss's gradient to that of its probabilities.
//
//   statistics->begin();                                               // forwards are counted from here on
//   auto loss = model->loss_sum(inputs, labels) / labels_of_all_ranks;
//   at::Tensor balance = reduce_router_statistics(*statistics, group);   // COLLECTIVE; parallel/experts
//   loss.backward();                                                   // gradients of loss + balance
//   statistics->end();                                                 // forwards are not counted (validation)
//
// A step of several micro-batches runs all of them once without gradients, then settles the totals, and then runs each
// micro-batch forward and backward.
//
// The numbers stay on the routers' device and no host waits for them. A forward that backward runs again (activation
// checkpointing) is not counted. One object serves all routers of a model and belongs to one rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

namespace tessera::nn {

class Module;

class RouterStatistics {
 public:
  // coefficient: factor of the loss (router_aux_loss_coef).
  RouterStatistics(int64_t experts, double coefficient);

  void begin();
  // The numbers that ranks sum: float64 [2 experts + 1] on `device`: choices per expert, sums of probabilities per
  // expert, number of rows.
  at::Tensor sums(c10::Device device = c10::kCPU) const;
  // Sets the sums over all ranks and stops counting. Error kShape for other sizes.
  void finish(const at::Tensor& sums);
  void end() { mode_ = Mode::kOff; }
  // The loss times the coefficient: float64 [], on the device of the sums given to finish(). 0 where no row was
  // counted. Error kInternal before finish().
  at::Tensor loss() const;
  int64_t experts() const { return experts_; }

  // For routers: whether a step is under way.
  bool is_active() const { return mode_ != Mode::kOff; }
  // probabilities [N, experts]; chosen int64 [N, k]; mask: bool [N], the rows that count; undefined: all rows.
  void count(const at::Tensor& probabilities, const at::Tensor& chosen, const at::Tensor& mask);
  // d loss / d probabilities of a counted row: float32 [experts]. Error kInternal before finish().
  at::Tensor gradient() const;

 private:
  enum class Mode { kOff, kCounting, kFinished };
  at::Tensor rows() const;

  int64_t experts_;
  double coefficient_;
  Mode mode_ = Mode::kOff;
  at::Tensor sums_;    // on the routers' device; undefined: nothing was counted
  at::Tensor totals_;  // on the device of the sums given to finish()
};

// Returns `probabilities`; their backward adds the loss's gradient to the rows of the mask.
at::Tensor add_load_balance_gradient(const at::Tensor& probabilities, const at::Tensor& mask,
                                     const std::shared_ptr<const RouterStatistics>& statistics);

// The statistics that the routers below `root` share; null where there is no router.
std::shared_ptr<RouterStatistics> router_statistics(Module& root);

}  // namespace tessera::nn
