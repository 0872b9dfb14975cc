// One optimizer step of a causal language model, over the micro-batches of all ranks of a run.
//
//   TrainStep step(model, optimizer, world->group(mesh->device_type()), {.max_grad_norm = 1.0});
//   StepResult result = step.run(micro_batches, lr);          // COLLECTIVE over the group
//
// On an accelerator the host does not have to wait for the result of a step. It launches the next step, and then reads
// the result of the previous step:
//
//   step.launch(micro_batches, lr);
//   while (step.pending_steps() > 1) report(step.read_step_result());
//
// The loss of a step is the sum of the losses of all label tokens of the global batch, divided by their number. It does
// not depend on the number of ranks and micro-batches. Gradients are those of this loss.
//
// If config.json enables the load-balance loss of routers (output_router_logits), its gradient is computed from the
// routing statistics of the whole step. To count them, the micro-batches run through an additional forward first.
//
// A TrainStep belongs to one rank.
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
  // A step whose loss or gradient norm is not finite is skipped (true) or an error (false). With true the host waits
  // for loss and norm in every step, unless the optimizer can skip a step on the device (Optimizer::takes_found_inf)
  // and the group supports tensors of the device.
  bool skip_nonfinite = false;
  // For a fully sharded model: the parameters of an FSDP group are updated during backward, as soon as their gradients
  // are reduced, and the gradients are then freed. The updated parameters have the same bits as without early_step.
  // Requires max_grad_norm 0, an optimizer with local updates, a pipeline of one stage, and skip_nonfinite false.
  bool early_step = false;
  // For a sharded model: how gradients of several micro-batches are accumulated. false: in the shards; gradients are
  // reduced after each micro-batch, and memory holds only gradient shards. true: unsharded on every rank; gradients are
  // reduced once per step, which is less traffic.
  bool defer_gradient_sync = false;
  // Whether the tokens and the loss of this rank are counted. False for a rank whose rows are counted by another rank
  // (tensor parallel). In a pipeline, tokens and loss are never counted on a rank without the last stage.
  bool is_counted = true;
  // Called right before a step changes parameters and optimizer state. Not called for a step that the host skips.
  std::function<void()> before_update = {};
  // For float8 linears. true: a weight is converted once per step and the float8 copy is kept, at 1 byte per element of
  // the unsharded weight. false: the weight is converted at each use.
  bool keep_float8_weights = false;
  // The pipeline stages of the model; without a mesh the model is one stage.
  pipeline::PipelineOptions pipeline = {};
};

// Flags that every rank passes to launch(). A flag that one rank sets is returned on all ranks.
struct StepSignals {
  bool stop = false;    // the rank was asked to stop after this step
  bool failed = false;  // the rank cannot go on; no rank takes the step
};

struct StepResult {
  double loss = 0;
  double grad_norm = 0;                  // before clipping
  std::optional<double> balance_loss{};  // load-balance loss of the routers, if enabled; not part of `loss`
  int64_t label_tokens = 0;              // in the global batch
  int64_t tokens = 0;                    // in the global batch, without padding
  int64_t memory_bytes = 0;              // the largest resident set among the ranks
  // Seconds that each rank spent in collectives of steps since the previous result, including waiting for other ranks.
  std::vector<double> communication_seconds{};
  bool skipped = false;       // loss or gradient norm was not finite, and the parameters were not updated
  StepSignals all_signals{};  // the flags of all ranks, as launch() returned them
};

class TrainStep {
 public:
  // `group`: all ranks of the run. `model` and `optimizer` must outlive the TrainStep. Error kConfig for options that
  // exclude one another.
  TrainStep(CausalLM& model, optim::Optimizer& optimizer, std::shared_ptr<comm::Group> group, StepOptions options);
  // Starts a step. `micro_batches`: the rows of this rank, the same number of micro-batches on every rank, and the same
  // rows on all ranks of a pipeline. Returns the flags of all ranks: each flag is set if any rank has set it in
  // `signals`. If StepSignals::failed is set, no step was started. Error kFormat on all ranks, before any computation,
  // for a label that is no class of the model. If runs_ahead() is false, launch(), and not read_step_result(), throws
  // the error for a loss or norm that is not finite. COLLECTIVE over the group.
  StepSignals launch(const std::vector<data::Batch>& micro_batches, double lr, const StepSignals& signals = {});
  // Returns the result of the oldest launched step whose result was not returned yet. Error kInternal if there is no
  // such step. If runs_ahead() is true, a loss or norm that is not finite is an Error kInternal, too, unless
  // StepOptions::skip_nonfinite is set; the step has then updated the model already, which may hold values that are not
  // finite. If runs_ahead() is false, launch() has thrown this error before the update, and the model is unchanged,
  // except with early_step, which updates during backward. COLLECTIVE over the group.
  StepResult read_step_result();
  // Number of launched steps whose result was not returned yet.
  int pending_steps() const { return static_cast<int>(launched_.size()); }
  // Whether launch() returns while the device still computes, so that read_step_result() right after it would wait.
  bool runs_ahead() const { return runs_ahead_; }
  // Calls launch(), then read_step_result(). Error kInternal if the result of an earlier step was not returned yet.
  StepResult run(const std::vector<data::Batch>& micro_batches, double lr, const StepSignals& signals = {});
  pipeline::Pipeline& pipeline() { return pipeline_; }

 private:
  struct LaunchedStep {
    StepResult result{};
    at::Tensor numbers{};   // float64 on the host: loss of this rank, gradient norm, with routers the balance loss
    DeviceEvent written{};  // recorded after the copy into `numbers`; without an event the copy is complete
  };
  void exchange_counts(const std::vector<data::Batch>& micro_batches, const StepSignals& signals, StepResult& result);
  at::Tensor compute_balance_loss(const std::vector<ModelInputs>& micro_batches);
  void copy_numbers_to_host(std::vector<at::Tensor> numbers, LaunchedStep& step) const;
  void gather_result(LaunchedStep& step);
  CausalLM& model_;
  optim::Optimizer& optimizer_;
  std::shared_ptr<comm::Group> group_;
  StepOptions options_;
  pipeline::Pipeline pipeline_;
  StagedInputs inputs_;
  bool runs_ahead_;
  std::unique_ptr<EarlyUpdates> early_;  // null: parameters are updated after backward
  std::deque<LaunchedStep> launched_;    // steps whose result was not returned yet, oldest first
  // Seconds of this rank in collectives: the clock of comm::communication_seconds() when the current call of launch()
  // or read_step_result() began, and the seconds of earlier calls that no result has reported yet.
  double collective_seconds_at_call_start_ = 0, unreported_collective_seconds_ = 0;
  std::shared_ptr<nn::RouterStatistics> routers_;  // null: no load-balance loss
  std::shared_ptr<nn::Float8StepCounter> float8_;  // null: no float8 weights are kept
};

// Mean loss over the label tokens of the `batches` of all ranks. Each rank passes its own rows, in the same number of
// batches. `group` and `is_counted` as for TrainStep. Computes no gradients. COLLECTIVE over the group.
double validation_loss(CausalLM& model, const std::shared_ptr<comm::Group>& group,
                       const std::vector<data::Batch>& batches, bool is_counted = true);
// validation_loss() for a model that is divided into the stages of `pipeline`.
double validation_loss(CausalLM& model, pipeline::Pipeline& pipeline, const std::shared_ptr<comm::Group>& group,
                       const std::vector<data::Batch>& batches, bool is_counted = true);

// Resident set of this process in bytes, now and its peak. The memory of other ranks that this process maps and reads
// in place is not counted.
int64_t resident_bytes();
int64_t peak_resident_bytes();

}  // namespace tessera::train
