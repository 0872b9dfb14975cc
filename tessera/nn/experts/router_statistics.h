// Statistics of how routers spread tokens over experts in one global step, and the load-balance loss from them (Switch
// Transformer, equations 4 to 6; computed as in transformers): experts * sum over experts of (share of the choices *
// mean probability), over all tokens and layers together.
//
// The loss of a step is known only after all its tokens were routed, on all ranks and in all micro-batches; its
// gradient is the same for every token. Therefore the loss is not in the autograd graph. Routers count their choices in
// forward, the counts are all-reduced over the ranks, and each router's backward adds the gradient of the loss to the
// gradient of its probabilities.
//
//   statistics->begin();                                               // forwards are counted from here on
//   auto loss = model->loss_sum(inputs, labels) / labels_of_all_ranks;
//   at::Tensor balance = reduce_router_statistics(*statistics, group);   // COLLECTIVE; parallel/experts
//   loss.backward();                                                   // gradients of loss + balance
//   statistics->end();                                                 // forwards are not counted (validation)
//
// With several micro-batches, first run the forward of all of them without gradients, then call
// reduce_router_statistics(), and then run each micro-batch forward and backward.
//
// The counts stay on the routers' device, and the host does not wait for them. A forward that backward recomputes
// (activation checkpointing) is not counted. All routers of a model share one object. Ranks that run as threads of one
// process must not share it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

namespace tessera::nn {

class Module;

class RouterStatistics {
 public:
  // `coefficient` is the factor of the load-balance loss (router_aux_loss_coef).
  RouterStatistics(int64_t experts, double coefficient);

  void begin();
  // Returns this rank's sums, which must be all-reduced over the ranks: float64 [2 experts + 1] on `device`, with the
  // choices per expert, the sums of probabilities per expert, and the number of rows (tokens).
  at::Tensor sums(c10::Device device = c10::kCPU) const;
  // Stores `sums`, the sums() of all ranks added together, from which loss() and gradient() are computed, and stops
  // counting. Error kShape unless `sums` has the shape [2 experts + 1].
  void finish(const at::Tensor& sums);
  void end() { mode_ = Mode::kOff; }
  // Returns the load-balance loss, multiplied by `coefficient`: float64 [], on the device of the sums given to
  // finish(); 0 if no row was counted. Error kInternal before finish().
  at::Tensor loss() const;
  int64_t experts() const { return experts_; }

  // Called by routers: returns true after begin() until end().
  bool is_active() const { return mode_ != Mode::kOff; }
  // Called by routers: adds the rows of a forward to the sums. Shapes: probabilities [N, experts], chosen int64 [N, k],
  // mask bool [N]. The mask selects the rows that are counted; undefined: all rows.
  void count(const at::Tensor& probabilities, const at::Tensor& chosen, const at::Tensor& mask);
  // Returns the gradient of loss() with respect to the router probabilities of one token: float32 [experts]. It is the
  // same for every token that count() has counted. Error kInternal before finish().
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

// Returns a copy of `probabilities`. The backward adds the gradient of the load-balance loss
// (RouterStatistics::gradient) to the gradient of each row that `mask` selects. Undefined mask: all rows.
at::Tensor add_load_balance_gradient(const at::Tensor& probabilities, const at::Tensor& mask,
                                     const std::shared_ptr<const RouterStatistics>& statistics);

// Returns the statistics that the routers below `root` share; null if there is no router.
std::shared_ptr<RouterStatistics> router_statistics(Module& root);

}  // namespace tessera::nn
