// One optimizer step of a causal language model over the micro-batches of the ranks of a run.
//
//   TrainStep step(model, optimizer, world->group(mesh->device_type()), {.max_grad_norm = 1.0});
//   StepResult result = step.run(micro_batches, lr);          // COLLECTIVE over the group
//
// On an accelerator the host need not wait for what a step comes to: it launches the next one, and reads that of the
// one before meanwhile.
//
//   step.launch(micro_batches, lr);
//   while (step.unsettled() > 1) report(step.settle());
//
// Where config.json asks for the load-balance loss of routers (output_router_logits), its gradient is that of the whole
// step's balance, for which the micro-batches go forward once more beforehand.
//
// The loss of a step is the sum over the label tokens of the global batch divided by their number, whatever the ranks
// and micro-batches; gradients are of that loss. Belongs to one rank.
#pragma once

#include <ATen/core/TensorBase.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "tessera/comm/group/group.h"
#include "tessera/data/rows/batch.h"
#include "tessera/nn/experts/router_statistics.h"
#include "tessera/nn/linear/float8.h"
#include "tessera/parallel/pipeline/pipeline.h"
#include "tessera/train/step/early_updates.h"
#include "tessera/train/step/staged_inputs.h"

namespace tessera {

class CausalLM;
}  // namespace tessera
namespace tessera::optim {
class Optimizer;
}

namespace tessera::train {

struct StepOptions {
  double max_grad_norm = 1.0;  // 0: gradients are not clipped
  // A step whose loss or norm is not finite: true leaves it out; false is an error. With true the host waits for both
  // in every step, unless the optimizer can leave a step out on the device (Optimizer::takes_found_inf) and the group
  // carries its tensors.
  bool skip_nonfinite = false;
  // Of a fully sharded model: each group's parameters are updated in backward, as soon as their gradients are whole,
  // which are freed then. The same bits. Needs max_grad_norm 0, an optimizer whose updates are local, a pipeline of one
  // stage, and not skip_nonfinite.
  bool early_step = false;
  // Of a sharded model, where gradients of several micro-batches add up. false: in the shards, each micro-batch is
  // reduced, and memory is that of one. true: whole on every rank, reduced once a step; less traffic.
  bool defer_gradient_sync = false;
  // Whether this rank's tokens and loss are counted: false for those that see the same rows as one that counts (tensor
  // parallel). Of a pipeline, only the rank of the last stage ever counts.
  bool counts = true;
  // Called right before a step changes parameters and the optimizer's state; not for a step that the host leaves out.
  std::function<void()> before_update = {};
  // Of float8 linears: whether a weight is converted once a step and kept, a byte an element beside whole weights;
  // else at each use.
  bool keep_float8_weights = false;
  // Where the model's layers are cut into stages; without a mesh the model is whole.
  pipeline::PipelineOptions pipeline = {};
};

// What a rank tells the others at the start of a step, and what some rank told: then all hear it.
struct StepSignals {
  bool stop = false;    // it was asked to stop
  bool failed = false;  // it cannot go on; the step is not taken
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
  StepSignals heard{};  // as launch() gives it
};

class TrainStep {
 public:
  // `group`: all ranks of the run; what one of them signals, all hear.
  // Error kConfig for options that exclude one another.
  TrainStep(CausalLM& model, optim::Optimizer& optimizer, std::shared_ptr<comm::Group> group, StepOptions options);
  // `micro_batches`: this rank's part, as many on every rank, the same on all ranks of a pipeline. COLLECTIVE over the
  // group. Error kFormat for a label that is no class of the model, on all ranks, before anything is computed. Of a
  // step that was not taken nothing is to be settled.
  // Gives what ranks told one another.
  StepSignals launch(const std::vector<data::Batch>& micro_batches, double lr, const StepSignals& signals = {});
  // What the first of the unsettled steps came to. COLLECTIVE over the group. Error kInternal when its loss or norm is
  // not finite and such steps are not skipped. The model is then unchanged; where launch() runs ahead, and with
  // early_step, it is not, and holds what is not finite. kInternal too where no step is unsettled.
  StepResult settle();
  int unsettled() const { return static_cast<int>(launched_.size()); }
  // Whether launch() returns while the device computes, so that settling at once would wait for it.
  bool runs_ahead() const { return runs_ahead_; }
  // Launches and settles. Nothing else may be unsettled.
  StepResult run(const std::vector<data::Batch>& micro_batches, double lr, const StepSignals& signals = {});
  pipeline::Pipeline& pipeline() { return pipeline_; }

 private:
  struct Launched {
    StepResult result{};
    at::Tensor numbers{};  // float64 on the host: this rank's loss, the gradient norm, with routers the balance loss
    StreamMark written{};  // behind the copy into them; of nothing: they are there
  };
  void exchange_counts(const std::vector<data::Batch>& micro_batches, const StepSignals& signals, StepResult& result);
  at::Tensor count_routes(const std::vector<ModelInputs>& micro_batches);
  void read_numbers(std::vector<at::Tensor> numbers, Launched& step) const;
  void gather_result(Launched& step);
  CausalLM& model_;
  optim::Optimizer& optimizer_;
  std::shared_ptr<comm::Group> group_;
  StepOptions options_;
  pipeline::Pipeline pipeline_;
  StagedInputs inputs_;
  bool runs_ahead_;
  std::unique_ptr<EarlyUpdates> early_;            // null: all is updated when backward is over
  std::deque<Launched> launched_;                  // but not settled
  double communicated_from_ = 0, untold_ = 0;      // seconds in collectives: when a call began; of earlier calls
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

}  // namespace tessera::train
