// Runs a model whose layers are cut into stages over ranks, by the table of a schedule. The same executor runs a model
// that is whole: one stage, one rank.
//
//   auto mesh = init_device_mesh(world, "cpu", {4, 2}, {"pp", "dp_shard"});
//   PipelineOptions options{.mesh = mesh, .schedule = "1F1B"};
//   auto model = make_parallel_model(config, at::kFloat, {.mesh = mesh}, options);     // keep_stages(*model, options)
//   load_pretrained(*model, folder);
//   Pipeline pipeline(*model, options);
//   at::Tensor loss = pipeline.step(micro_batches, {.loss_divisor = label_tokens});    // COLLECTIVE
//
// One module holds all stages of a rank, so one optimizer, one state dict and one parallelize_model serve it. Every
// rank passes the same micro-batches as those of its pipeline (tokens and labels are small; only hidden states travel).
// Gradients add up over micro-batches as in plain accumulation; those of an embedding that is tied to a head on another
// rank are summed over both, which stay equal to the bit. Belongs to one rank.
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
class Wire;
struct RankProgram;
}  // namespace detail

struct PipelineOptions {
  MeshPtr mesh = {};  // its dim pp holds the ranks of a pipeline, its dim tp those of a stage's tensor parallelism;
                      // null, or without pp: one rank
  std::string schedule = "1F1B";
  int stages_per_rank = 1;
  std::vector<int64_t> layers_of_stages = {};  // empty: split_layers
  std::optional<Schedule> table = {};          // in place of `schedule`, for as many micro-batches as it has
};
// Ranks of a pipeline, and this one's place among them.
int pipeline_ranks(const PipelineOptions& options);
int pipeline_rank(const PipelineOptions& options);
// Errors kConfig as make_schedule and plan_stages.
StagePlan plan_pipeline(const ModelConfig& config, const PipelineOptions& options);
// keep_stages of this rank's by that plan; a model on one rank stays whole. Errors as both.
void keep_stages(CausalLM& model, const PipelineOptions& options);

struct PipelineStep {
  double loss_divisor = 1;  // of the summed loss
  // Of data parallel models. true: each micro-batch's gradients are reduced into the shards, and layers are gathered
  // for each forward and backward. false: when all of a stage are there, and where there are several stages its layers
  // stay gathered from UNSHARD to RESHARD.
  bool reduce_each = false;
  // Called before the backward that completes the gradients of all parameters of this rank.
  std::function<void()> before_last_backward = {};
};

class Pipeline {
 public:
  // The model has the stages that the plan gives this rank. Error kConfig for one that has not.
  Pipeline(CausalLM& model, PipelineOptions options = {});
  ~Pipeline();
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  // Forward and backward of all micro-batches (tokens, labels, as many on every rank); gradients are complete
  // afterwards. Returns the sum of the losses on the rank of the last stage, 0 elsewhere: a float64 scalar, on the
  // device of the last stage, for which nobody has waited. COLLECTIVE over the pipeline and as the model. Error kConfig
  // for a number of micro-batches that the schedule cannot run, before anything is sent.
  at::Tensor step(const std::vector<ModelInputs>& micro_batches, const PipelineStep& how = {});
  // The same without gradients.
  at::Tensor evaluate(const std::vector<ModelInputs>& micro_batches);
  // CausalLM::logprobs through the stages: [B, T] on the rank of the last one, undefined elsewhere. COLLECTIVE as step.
  at::Tensor logprobs(ModelInputs inputs, const at::Tensor& targets);
  // generate() through the stages, token by token: each stage keeps keys and values of its own layers, a rank of the
  // last one chooses. Alike on all ranks of `group`, those of the model, over which it is COLLECTIVE as well; null: of
  // the pipeline. Context-parallel ranks all read whole rows.
  std::vector<int64_t> generate(std::span<const int64_t> prompt, const GenerationOptions& options,
                                comm::Group* group = nullptr);
  // The parameters of this rank whose gradients no other rank of the pipeline counts: all but the tied weight of the
  // last stage, where the first is elsewhere. What optim::get_grad_norm is to be called with.
  std::vector<at::Tensor> counted_parameters();
  // The norm of all stages from that of this rank's counted parameters, both as optim::grad_norm_tensor's. COLLECTIVE
  // over the pipeline.
  at::Tensor norm_over_stages(const at::Tensor& own_norm) const;

  bool has_last_stage() const { return plan_.last_rank() == rank_; }
  const StagePlan& plan() const { return plan_; }
  // As it would run so many micro-batches.
  const Schedule& schedule(int micro_batches);
  // Micro-batches between forward and backward on this rank, at most, in the last step.
  int most_held() const { return most_held_; }

 private:
  class Switches;
  const detail::RankProgram& program(int micro_batches, bool with_gradients);
  void check_micro_batches(const std::vector<ModelInputs>& micro_batches) const;
  nn::ParameterSlot* tied_slot();
  void sum_tied_gradients();

  CausalLM& model_;
  PipelineOptions options_;
  int ranks_, rank_;
  StagePlan plan_;
  std::unique_ptr<detail::Wire> wire_;                                             // null: one rank
  std::map<int, std::optional<Schedule>> schedules_;                               // by micro-batches
  std::map<std::pair<int, bool>, std::unique_ptr<detail::RankProgram>> programs_;  // and with gradients or without
  int most_held_ = 0;
};

}  // namespace tessera::pipeline
