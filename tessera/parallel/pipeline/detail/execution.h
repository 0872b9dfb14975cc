// One step of a pipeline on one rank: its row of the lowered table, action by action.
#pragma once

#include <map>
#include <set>
#include <utility>
#include <vector>

#include "tessera/parallel/pipeline/detail/stage_runs.h"
#include "tessera/parallel/pipeline/detail/wire.h"
#include "tessera/parallel/pipeline/pipeline.h"

namespace tessera::pipeline::detail {

// A rank's actions, with what is to be known of them beforehand.
struct RankProgram {
  // splits_backward: false: I is B, and W nothing.
  RankProgram(const ActionRow& row, bool splits_backward);

  std::vector<Action> actions;                  // overlaps taken apart
  std::set<std::pair<int, int>> splits;         // stage and micro-batch whose backward is I and W
  std::set<std::pair<int, int>> backward_next;  // whose backward comes right after their forward
  std::map<int, size_t> last_of_stage;          // the action with which the gradients of a stage are complete
  size_t last = 0;                              // and of all stages
};

// What data parallelism does beside the actions: when gradients are reduced, told before and after each action that
// computes, and how long a stage's parameters stay gathered.
class DataParallelHooks {
 public:
  // What the rank has when the action is done. Of the forward whose backward completes it, all is true as well.
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
  Execution(CausalLM& model, const StagePlan& plan, Wire* wire, const std::vector<ModelInputs>& micro_batches,
            double loss_divisor);
  // hooks: null where there are no gradients. An error ends the step on all ranks of the pipeline.
  void run(const RankProgram& program, DataParallelHooks* hooks);
  const at::Tensor& loss() const { return runs_.loss(); }
  int most_held() const { return runs_.most_held(); }
  // What the model makes of a micro-batch without labels: log-probs of its targets, or logits. On the rank of the last
  // stage; undefined elsewhere.
  at::Tensor result(int micro_batch) const {
    const auto found = results_.find(micro_batch);
    return found == results_.end() ? at::Tensor() : found->second;
  }

 private:
  using Place = std::pair<int, int>;  // stage and micro-batch
  DataParallelHooks::Completes completes(const RankProgram& program, size_t position) const;
  void perform(const Action& action, const RankProgram& program, DataParallelHooks* hooks);
  void forward(const Action& action, const RankProgram& program);
  void backward(const Action& action);
  void exchange(const Action& action);
  bool is_here(int stage) const;
  int rank_of(int stage) const { return plan_.rank_of.at(static_cast<size_t>(stage)); }
  const ModelInputs& inputs(int micro_batch) const { return micro_batches_[static_cast<size_t>(micro_batch)]; }

  const StagePlan& plan_;
  Wire* wire_;  // null: one rank
  const std::vector<ModelInputs>& micro_batches_;
  double loss_divisor_;
  StageRuns runs_;
  // By the place that they are for: what stages of this rank gave, to one of this rank or to be sent, and what arrives.
  std::map<Place, at::Tensor> hidden_, gradients_;
  std::map<Place, Arrival> hidden_in_, gradients_in_;
  std::map<int, at::Tensor> results_;  // by micro-batch
};

}  // namespace tessera::pipeline::detail
