// Runs a model whose layers are split into pipeline stages over ranks, in the order of a schedule's table. It also runs
// a model that is not split, as one stage on one rank.
//
//   auto mesh = init_device_mesh(world, "cpu", {4, 2}, {"pp", "dp_shard"});
//   PipelineOptions options{.mesh = mesh, .schedule = "1F1B"};
//   auto model = make_parallel_model(config, at::kFloat, {.mesh = mesh}, options);     // keep_stages(*model, options)
//   load_pretrained(*model, folder);
//   Pipeline pipeline(*model, options);
//   at::Tensor loss = pipeline.step(micro_batches, {.loss_divisor = label_tokens});    // COLLECTIVE
//
// One module holds all stages of a rank, so a rank needs only one optimizer, one state dict and one call of
// parallelize_model. All ranks of a pipeline pass the same micro-batches: tokens and labels are small, and only hidden
// states and their gradients are sent. Gradients accumulate over micro-batches as in plain gradient accumulation. If
// the embedding is tied to a head on another rank, both ranks sum the two gradients, and the two weights stay bitwise
// equal. Belongs to one rank.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/models/decoder/causal_lm.h"
#include "tessera/models/generation/generate.h"
#include "tessera/parallel/pipeline/stages.h"

namespace tessera::pipeline {

namespace detail {
class StageChannel;
struct RankProgram;
}  // namespace detail

struct PipelineOptions {
  // The dim pp holds the ranks of a pipeline, the dim tp the tensor-parallel ranks of a stage. Null, or without pp: the
  // pipeline has one rank.
  MeshPtr mesh = {};
  std::string schedule = "1F1B";
  int stages_per_rank = 1;
  std::vector<int64_t> layers_of_stages = {};  // layers of each stage; empty: split_layers
  std::optional<Schedule> table = {};          // replaces `schedule`; fixes the number of micro-batches
};
// The number of ranks of the pipeline, and this rank's index in it.
int pipeline_ranks(const PipelineOptions& options);
int pipeline_rank(const PipelineOptions& options);
// Returns the layers and the rank of each stage. Errors kConfig as make_schedule and plan_stages, and if the schedule
// PipelineOptions::table is for another number of ranks than pipeline_ranks().
StagePlan plan_pipeline(const ModelConfig& config, const PipelineOptions& options);
// Removes the layers of other ranks' stages from the model, as planned by plan_pipeline(). With one pipeline rank
// nothing is removed. Errors as plan_pipeline and keep_stages (stages.h).
void keep_stages(CausalLM& model, const PipelineOptions& options);

struct PipelineStepOptions {
  double loss_divisor = 1;  // divides the summed loss
  // For data-parallel models. true: the gradients of each micro-batch are reduced into the shards, and layers are
  // gathered for each forward and backward. false: gradients are reduced once per stage, with its last backward; with
  // several stages, the layers of a stage also stay gathered from UNSHARD to RESHARD.
  bool reduce_each = false;
  // Called before the backward (B) that completes the gradients of all parameters of this rank. Not called when the
  // last computation is a weight backward (W), as in some zero-bubble schedules.
  std::function<void()> before_last_backward = {};
};

class Pipeline {
 public:
  // The model must contain the stages that plan_pipeline assigns to this rank; else Error kConfig. The model must
  // outlive this object.
  Pipeline(CausalLM& model, PipelineOptions options = {});
  ~Pipeline();
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  // Runs forward and backward of all micro-batches (tokens and labels; the same number on every rank). The gradients
  // are complete afterwards. Returns the sum of the losses on the rank of the last stage, and 0 on other ranks: a
  // float64 scalar on the device of the last stage; the host has not waited for it. COLLECTIVE over the ranks of the
  // pipeline, and over the groups in which the model communicates. Before anything is sent: Error kConfig for a number
  // of micro-batches that the schedule cannot run, and when gradients are disabled; Error kShape for labels of another
  // shape than the tokens.
  at::Tensor step(const std::vector<ModelInputs>& micro_batches, const PipelineStepOptions& step_options = {});
  // The sum of the losses as in step(), without gradients. COLLECTIVE as step.
  at::Tensor evaluate(const std::vector<ModelInputs>& micro_batches);
  // CausalLM::logprobs through the stages: [B, T] on the rank of the last stage, undefined on other ranks. COLLECTIVE
  // as step.
  at::Tensor logprobs(ModelInputs inputs, const at::Tensor& targets);
  // generate() through the stages, token by token. Each stage keeps the KV cache of its own layers, and one rank of the
  // last stage samples. Returns the same tokens on all ranks of `group`, which must hold all ranks of the model; null:
  // the ranks of the pipeline. COLLECTIVE over the group and the pipeline. With context parallelism every rank computes
  // with all tokens.
  std::vector<int64_t> generate(std::span<const int64_t> prompt, const GenerationOptions& options,
                                comm::Group* group = nullptr);
  // The parameters for which this rank calls optim::get_grad_norm: all parameters of this rank, except a tied embedding
  // on the rank of the last stage, which the rank of the first stage counts.
  std::vector<at::Tensor> norm_parameters();
  // Returns the gradient norm over all stages. own_norm is the norm of norm_parameters() of this rank. Both are tensors
  // as optim::grad_norm_tensor returns them. A NaN on any rank gives NaN. COLLECTIVE over the pipeline.
  at::Tensor norm_over_stages(const at::Tensor& own_norm) const;

  bool has_last_stage() const { return plan_.last_rank() == rank_; }
  const StagePlan& plan() const { return plan_; }
  // The schedule for this number of micro-batches. Error kConfig if the schedule cannot run this number.
  const Schedule& schedule(int micro_batches);
  // The largest number of (stage, micro-batch) pairs on this rank whose forward has run and whose backward has not, in
  // the last step.
  int max_held() const { return max_held_; }

 private:
  class DataParallelSwitches;
  const detail::RankProgram& program(int micro_batches, bool with_gradients);
  void check_micro_batches(const std::vector<ModelInputs>& micro_batches) const;
  nn::ParameterSlot* tied_slot();
  void sum_tied_gradients();

  CausalLM& model_;
  PipelineOptions options_;
  int ranks_, rank_;
  StagePlan plan_;
  std::unique_ptr<detail::StageChannel> channel_;                                  // null for one rank
  std::map<int, std::optional<Schedule>> schedules_;                               // by number of micro-batches
  std::map<std::pair<int, bool>, std::unique_ptr<detail::RankProgram>> programs_;  // by micro-batches and gradients
  int max_held_ = 0;
};

}  // namespace tessera::pipeline
