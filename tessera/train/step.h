// One optimizer step of a causal language model over the micro-batches of the ranks of a run.
//
//   TrainStep step(model, optimizer, world->group(), {.max_grad_norm = 1.0});
//   StepResult result = step.run(micro_batches, lr);          // COLLECTIVE over the group
//
// Where config.json asks for the load-balance loss of routers (output_router_logits), its gradient is that of the whole
// step's balance, for which the micro-batches go forward once more beforehand.
//
// The loss of a step is the sum over the label tokens of the global batch divided by their number, whatever the ranks
// and micro-batches; gradients are of that loss. Belongs to one rank.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "tessera/comm/group/group.h"
#include "tessera/data/batch.h"
#include "tessera/nn/float8.h"
#include "tessera/nn/router_statistics.h"
#include "tessera/parallel/pipeline/pipeline.h"

namespace tessera {

class CausalLM;
namespace optim {
class Optimizer;
}

namespace train {

struct StepOptions {
  double max_grad_norm = 1.0;   // 0: gradients are not clipped
  bool skip_nonfinite = false;  // a step whose loss or norm is not finite: true leaves it out, false is an error
  // Of a sharded model, where gradients of several micro-batches add up. false: in the shards, each micro-batch is
  // reduced, and memory is that of one. true: whole on every rank, reduced once a step; less traffic.
  bool defer_gradient_sync = false;
  // Whether this rank's tokens and loss are counted: false for those that see the same rows as one that counts (tensor
  // parallel). Of a pipeline, only the rank of the last stage ever counts.
  bool counts = true;
  // Called right before a step changes parameters and the optimizer's state; not for a step that is left out.
  std::function<void()> before_update = {};
  // Of float8 linears: whether a weight is converted once a step and kept, a byte an element beside whole weights;
  // else at each use.
  bool keep_float8_weights = false;
  // Where the model's layers are cut into stages; without a mesh the model is whole.
  pipeline::PipelineOptions pipeline = {};
};

struct StepResult {
  double loss = 0;
  double grad_norm = 0;                  // before clipping
  std::optional<double> balance_loss{};  // of the routers, where the model asks for it; not in `loss`
  int64_t label_tokens = 0;              // of the global batch
  int64_t tokens = 0;                    // of the global batch, padding left out
  int64_t memory_bytes = 0;              // the largest resident set of a rank
  // What each rank spent in collectives of steps, waiting for others included, since the last step told of it.
  std::vector<double> communication_seconds{};
  bool skipped = false;
  bool stop_requested = false;  // some rank was asked to stop
  bool failed = false;          // some rank cannot go on; the step was not taken
};

// What a rank tells the others at the start of a step.
struct StepSignals {
  bool stop = false;    // it was asked to stop
  bool failed = false;  // it cannot go on
};

class TrainStep {
 public:
  // `group`: all ranks of the run; what one of them signals, all hear.
  TrainStep(CausalLM& model, optim::Optimizer& optimizer, std::shared_ptr<comm::Group> group, StepOptions options);
  // `micro_batches`: this rank's part, as many on every rank, the same on all ranks of a pipeline. COLLECTIVE over the
  // group. Error kInternal when the loss is not finite and such steps are not skipped; the model is then unchanged.
  StepResult run(const std::vector<data::Batch>& micro_batches, double lr, const StepSignals& signals = {});
  pipeline::Pipeline& pipeline() { return pipeline_; }

 private:
  void count_routes(const std::vector<ModelInputs>& micro_batches, StepResult& result);
  CausalLM& model_;
  optim::Optimizer& optimizer_;
  std::shared_ptr<comm::Group> group_;
  StepOptions options_;
  pipeline::Pipeline pipeline_;
  double communication_untold_ = 0;                // of the last step, behind what it told
  std::shared_ptr<nn::RouterStatistics> routers_;  // null: no load-balance loss
  std::shared_ptr<nn::Float8Steps> float8_;        // null: none whose weights are kept
};

// Mean loss over the label tokens of all rows of `batches`; each rank passes its own, as many on every rank. `group`
// and `counts` as of TrainStep. No gradients. COLLECTIVE over the group.
double validation_loss(CausalLM& model, const std::shared_ptr<comm::Group>& group,
                       const std::vector<data::Batch>& batches, bool counts = true);
// The same through the stages that `model` is cut into.
double validation_loss(CausalLM& model, pipeline::Pipeline& pipeline, const std::shared_ptr<comm::Group>& group,
                       const std::vector<data::Batch>& batches, bool counts = true);

// The resident set of this process in bytes, now and at its largest, without what it reads in place of its peers'
// memory.
int64_t resident_bytes();
int64_t peak_resident_bytes();

}  // namespace train
}  // namespace tessera
