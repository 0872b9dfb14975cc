// How evenly routers spread tokens over experts in one global step, and the load-balance loss of that (Switch
// Transformer, equations 4 to 6; the figures of transformers): experts * sum over experts of their share of the choices
// times their mean probability, over all tokens and layers together.
//
// The loss of a step is known once all of its tokens have been routed, on all ranks and in all micro-batches, and its
// gradient is the same for every token. So it is no tensor: routers count while they run, totals are added up over the
// ranks, and then each router's backward adds the gradient to that of its probabilities.
//
//   statistics->begin();                                               // from here on forwards are counted
//   auto loss = model->loss_sum(inputs, labels) / labels_of_all_ranks;
//   at::Tensor balance = settle_router_statistics(*statistics, group);   // COLLECTIVE; parallel/experts
//   loss.backward();                                                   // gradients of loss + balance
//   statistics->end();                                                 // forwards count and add nothing (validation)
//
// Where a step has several micro-batches, all of them run without gradients before the totals are settled, and then
// one after another forward and backward.
//
// Numbers stay where the routers are, and no host waits for them. A forward that backward runs again (activation
// checkpoints) is not counted. One object serves all routers of a model; it belongs to one rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

namespace tessera::nn {

class Module;

class RouterStatistics {
 public:
  // coefficient: what the loss is multiplied with (router_aux_loss_coef).
  RouterStatistics(int64_t experts, double coefficient);

  void begin();
  // What ranks add up: float64 [2 experts + 1] on `device`: choices of each expert, sums of probabilities, rows.
  at::Tensor sums(c10::Device device = c10::kCPU) const;
  // Takes the sums over all ranks; nothing is counted from here on. Error kShape for other sizes.
  void finish(const at::Tensor& sums);
  void end() { mode_ = Mode::kOff; }
  // Of the totals, times the coefficient: float64 [], where the sums were. 0 where no row was counted. Error kInternal
  // before finish().
  at::Tensor loss() const;
  int64_t experts() const { return experts_; }

  // For routers.
  bool on() const { return mode_ != Mode::kOff; }
  // probabilities [N, experts], chosen int64 [N, k]; mask: bool [N] of the rows that count, undefined: all.
  void count(const at::Tensor& probabilities, const at::Tensor& chosen, const at::Tensor& mask);
  // d loss / d probabilities of a row that counts: float32 [experts]. Error kInternal before finish().
  at::Tensor gradient() const;

 private:
  enum class Mode { kOff, kCounting, kFinished };
  at::Tensor rows() const;

  int64_t experts_;
  double coefficient_;
  Mode mode_ = Mode::kOff;
  at::Tensor sums_;    // on the device of the routers; undefined: nothing yet
  at::Tensor totals_;  // where finish() was given them
};

// `probabilities`, to whose gradient the loss's is added; mask as above.
at::Tensor with_balance_gradient(const at::Tensor& probabilities, const at::Tensor& mask,
                                 const std::shared_ptr<const RouterStatistics>& statistics);

// Those of the routers below `root`; null where there is no router.
std::shared_ptr<RouterStatistics> router_statistics(Module& root);

}  // namespace tessera::nn
