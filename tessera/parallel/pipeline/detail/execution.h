// Runs one step of a pipeline on one rank: the actions of its row in the lowered table.
#pragma once

#include <map>
#include <set>
#include <utility>
#include <vector>

#include "tessera/parallel/pipeline/detail/stage_channel.h"
#include "tessera/parallel/pipeline/detail/stage_runner.h"
#include "tessera/parallel/pipeline/pipeline.h"

namespace tessera::pipeline::detail {

// The actions of a rank in order, and data about later actions that Execution needs.
struct RankProgram {
  // If splits_backward is false, each I is replaced by a B, and each W is removed.
  RankProgram(const ActionRow& row, bool splits_backward);

  std::vector<Action> actions;                  // overlaps are split into their parts
  std::set<std::pair<int, int>> splits;         // (stage, micro-batch) whose backward is I and W
  std::set<std::pair<int, int>> backward_next;  // (stage, micro-batch) whose backward follows its forward directly
  std::map<int, size_t> last_of_stage;          // index of the action that completes a stage's gradients
  size_t last = 0;                              // index of the action that completes all gradients
};

// Callbacks of data parallelism: called before and after each computation, to switch gradient reduction, and at UNSHARD
// and RESHARD.
class DataParallelHooks {
 public:
  // Says which gradients of this rank are complete after an action. `all`: the gradients of all parameters. `all` is
  // also true for the forward of the stage and micro-batch whose backward completes all gradients, because replicate()
  // reads in forward whether to synchronise.
  struct Completes {
    bool all = false;
    bool stage = false;  // the gradients of the action's stage
  };
  virtual ~DataParallelHooks() = default;
  virtual void before(const Action& action, const Completes& completes) = 0;
  virtual void after(const Action& action, const Completes& completes) = 0;
  virtual void unshard(int stage) = 0;
  virtual void reshard(int stage) = 0;
};

class Execution {
 public:
  Execution(CausalLM& model, const StagePlan& plan, StageChannel* channel,
            const std::vector<ModelInputs>& micro_batches, double loss_divisor);
  // Runs the actions of the program. hooks: null if gradients are disabled. An error on one rank ends the step with an
  // error on all ranks of the pipeline.
  void run(const RankProgram& program, DataParallelHooks* hooks);
  const at::Tensor& loss() const { return runner_.loss(); }
  int max_held() const { return runner_.max_held(); }
  // The model's output for a micro-batch without labels: log-probs of its targets, or logits. It is undefined on ranks
  // without the last stage.
  at::Tensor result(int micro_batch) const {
    const auto found = results_.find(micro_batch);
    return found == results_.end() ? at::Tensor() : found->second;
  }

 private:
  using StageMicroBatch = std::pair<int, int>;  // stage and micro-batch
  DataParallelHooks::Completes completes(const RankProgram& program, size_t position) const;
  void perform(const Action& action, const RankProgram& program, DataParallelHooks* hooks);
  void forward(const Action& action, const RankProgram& program);
  void backward(const Action& action);
  void exchange(const Action& action);
  bool is_here(int stage) const;
  int rank_of(int stage) const { return plan_.rank_of.at(static_cast<size_t>(stage)); }
  const ModelInputs& inputs(int micro_batch) const { return micro_batches_[static_cast<size_t>(micro_batch)]; }

  const StagePlan& plan_;
  StageChannel* channel_;  // null: one rank
  const std::vector<ModelInputs>& micro_batches_;
  double loss_divisor_;
  StageRunner runner_;
  // The key of these maps is the stage and the micro-batch that will use the tensor. hidden_ and gradients_ hold
  // results of this rank's stages; another stage of this rank uses them, or a SEND action sends them. hidden_in_ and
  // gradients_in_ hold tensors that are being received.
  std::map<StageMicroBatch, at::Tensor> hidden_, gradients_;
  std::map<StageMicroBatch, PendingHiddenState> hidden_in_, gradients_in_;
  std::map<int, at::Tensor> results_;  // by micro-batch
};

}  // namespace tessera::pipeline::detail
