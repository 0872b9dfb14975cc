#include "tessera/parallel/pipeline/pipeline.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/hypot.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <limits>
#include <set>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/dtensor/tensor/local_tensor.h"
#include "tessera/models/decoder/decoder.h"
#include "tessera/nn/modules_of.h"
#include "tessera/parallel/data_parallel/gradient_sync.h"
#include "tessera/parallel/ddp/replicate_state.h"
#include "tessera/parallel/fsdp/fully_shard.h"
#include "tessera/parallel/fsdp/sharding_state.h"
#include "tessera/parallel/pipeline/check_schedule.h"
#include "tessera/parallel/pipeline/detail/execution.h"
#include "tessera/parallel/pipeline/lowering.h"

namespace tessera::pipeline {
namespace {

at::Tensor loss_or_zero(const detail::Execution& execution) {
  return execution.loss().defined() ? execution.loss() : at::zeros({}, at::kDouble);
}

bool is_cut(const PipelineOptions& options) { return options.mesh && options.mesh->has_dim("pp"); }

MeshPtr slice_of(const MeshPtr& mesh, const std::string& dim) {
  return mesh && mesh->has_dim(dim) ? mesh->slice({dim}) : nullptr;
}

std::vector<DecoderLayer*> decoder_layers(CausalLM& model) {
  std::vector<DecoderLayer*> out;
  for (const auto& [path, decoder] : nn::modules_of<DecoderModel>(model)) {
    for (const auto& layer : decoder->layers->list) out.push_back(layer.get());
  }
  return out;
}

}  // namespace

int pipeline_ranks(const PipelineOptions& options) {
  return is_cut(options) ? static_cast<int>(options.mesh->size(options.mesh->dim_of("pp"))) : 1;
}

int pipeline_rank(const PipelineOptions& options) {
  return is_cut(options) ? static_cast<int>(options.mesh->local_rank(options.mesh->dim_of("pp"))) : 0;
}

StagePlan plan_pipeline(const ModelConfig& config, const PipelineOptions& options) {
  const int ranks = pipeline_ranks(options);
  if (options.table) {
    TESSERA_CHECK(options.table->ranks() == ranks, ErrorKind::kConfig,
                  "[pipeline.plan] {}: found a schedule for {} ranks, but the pipeline has {}", options.table->name,
                  options.table->ranks(), ranks);
    return plan_stages(config.num_hidden_layers, options.table->rank_of, options.layers_of_stages);
  }
  // The rank of each stage does not depend on the number of micro-batches. The number used here, two per rank, is one
  // that every schedule accepts.
  const auto schedule = make_schedule(
      options.schedule, {.ranks = ranks, .stages_per_rank = options.stages_per_rank, .micro_batches = 2 * ranks});
  return plan_stages(config.num_hidden_layers, schedule.rank_of, options.layers_of_stages);
}

void keep_stages(CausalLM& model, const PipelineOptions& options) {
  if (pipeline_ranks(options) == 1) return;
  keep_stages(model, plan_pipeline(model.config(), options), pipeline_rank(options));
}

// Controls data parallelism during a step. With reduce_each every backward reduces gradients. Otherwise reduction is
// switched on only for the backward that completes gradients: for a layer the last backward of its stage; for the
// embedding, norm and head the last backward of the rank. The layers of a stage then also stay gathered from UNSHARD to
// RESHARD.
class Pipeline::DataParallelSwitches : public detail::DataParallelHooks {
 public:
  DataParallelSwitches(CausalLM& model, const StagePlan& plan, const PipelineStepOptions& step_options)
      : model_(model),
        plan_(plan),
        step_options_(step_options),
        reduce_each_(step_options.reduce_each),
        has_states_(!data_parallel_states(model).empty()),
        keeps_gathered_(has_states_ && !reduce_each_ && plan.stages() > 1),
        layers_(decoder_layers(model)) {}
  ~DataParallelSwitches() override {
    for (const int stage : gathered_) free_after_each(stage, true);
  }

  // unshard() does not gather the layers of the stage; the first forward gathers them. unshard() only keeps them
  // gathered after each forward and backward.
  void unshard(int stage) override {
    if (!keeps_gathered_) return;
    gathered_.insert(stage);
    free_after_each(stage, false);
  }
  void reshard(int stage) override {
    if (gathered_.erase(stage) == 0) return;
    free_after_each(stage, true);
    for (auto* const layer : sharded_layers(stage)) tessera::reshard(*layer);
  }

  void before(const Action& action, const Completes& completes) override {
    const bool backward = action.kind == ActionKind::kBackward;
    if (backward && completes.all && step_options_.before_last_backward) step_options_.before_last_backward();
    if (!has_states_) return;
    // With a single stage, the gradient synchronisation is set before each forward, too, because replicate() reads this
    // setting in forward.
    const bool whole = action.kind == ActionKind::kForward && plan_.stages() == 1;
    switch_on(action, backward || whole ? completes : Completes{}, (backward || whole) && reduce_each_);
  }
  // Action W adds its deferred gradients by several backwards, one for each autograd node. Gradient reduction is off in
  // these backwards, and the accumulated gradients are reduced here, after the action.
  void after(const Action& action, const Completes& completes) override {
    if (!has_states_ || action.kind != ActionKind::kWeightBackward) return;
    if (!reduce_each_ && !completes.all && !completes.stage) return;
    switch_on(action, completes, reduce_each_);
    const auto states = sharding_states(model_);
    if (!states.empty() && states.front()->schedule() != nullptr) states.front()->schedule()->reduce_accumulated();
  }

 private:
  void switch_on(const Action& action, const Completes& completes, bool all) {
    set_requires_gradient_sync(model_, all || completes.all);
    if (all || completes.all || !completes.stage) return;
    for (auto* const layer : sharded_layers(action.stage)) set_requires_gradient_sync(*layer, true);
  }
  std::vector<DecoderLayer*> sharded_layers(int stage) const {
    std::vector<DecoderLayer*> out;
    const auto range = plan_.range(stage);
    for (int64_t i = range.first_layer; i < range.end_layer; ++i) {
      auto* const layer = layers_.at(static_cast<size_t>(i));
      if (layer != nullptr && is_fully_sharded(*layer)) out.push_back(layer);
    }
    return out;
  }
  // Sets whether the parameters of the stage's decoder layers are freed after each forward and backward. The setting is
  // not recursive: the parameters of the experts, which are FSDP units inside a layer, are freed after each use even
  // where `on` is false.
  void free_after_each(int stage, bool on) const {
    for (auto* const layer : sharded_layers(stage)) {
      set_reshard_after_forward(*layer, on, /*recurse=*/false);
      set_reshard_after_backward(*layer, on, /*recurse=*/false);
    }
  }

  CausalLM& model_;
  const StagePlan& plan_;
  const PipelineStepOptions& step_options_;
  bool reduce_each_, has_states_, keeps_gathered_;
  std::vector<DecoderLayer*> layers_;
  std::set<int> gathered_;  // stages whose layers stay gathered
};

Pipeline::Pipeline(CausalLM& model, PipelineOptions options)
    : model_(model),
      options_(std::move(options)),
      ranks_(pipeline_ranks(options_)),
      rank_(pipeline_rank(options_)),
      plan_(plan_pipeline(model.config(), options_)) {
  if (plan_.stages() == 1) return;
  const auto layers = decoder_layers(model);
  for (const int stage : plan_.stages_of(rank_)) {
    const auto range = plan_.range(stage);
    for (int64_t i = range.first_layer; i < range.end_layer; ++i) {
      TESSERA_CHECK(
          i < static_cast<int64_t>(layers.size()) && layers[static_cast<size_t>(i)] != nullptr, ErrorKind::kConfig,
          "[pipeline] stage {} runs layer {}, which the model of rank {} does not have. Call keep_stages with "
          "this plan and rank.",
          stage, i, rank_);
    }
  }
  if (ranks_ == 1) return;
  channel_ = std::make_unique<detail::StageChannel>(options_.mesh->group("pp"), slice_of(options_.mesh, "tp"),
                                                    options_.mesh->device());
}

Pipeline::~Pipeline() = default;

const Schedule& Pipeline::schedule(int micro_batches) {
  if (options_.table) {
    TESSERA_CHECK(options_.table->micro_batches == micro_batches, ErrorKind::kConfig,
                  "[pipeline.step] found {} micro-batches, but the schedule {} is for {}", micro_batches,
                  options_.table->name, options_.table->micro_batches);
    return *options_.table;
  }
  auto& known = schedules_[micro_batches];
  if (!known) known = make_schedule(options_.schedule, {ranks_, options_.stages_per_rank, micro_batches});
  return *known;
}

const detail::RankProgram& Pipeline::program(int micro_batches, bool with_gradients) {
  // The table of the schedule is lowered and checked once for each number of micro-batches, separately with and without
  // gradients. All ranks lower the same table, so an invalid schedule is an error on every rank before any rank sends
  // something.
  auto& program = programs_[{micro_batches, with_gradients}];
  if (program) return *program;
  if (with_gradients) {
    check_schedule(schedule(micro_batches).table,
                   {.ranks = ranks_, .stages = plan_.stages(), .micro_batches = micro_batches});
  }
  const auto table =
      with_gradients ? lower(schedule(micro_batches)) : lower_forward(plan_.rank_of, ranks_, micro_batches);
  check_lowered(table, plan_.rank_of, micro_batches);
  // replicate() (DDP) reduces a bucket of gradients within one backward. So a model with replicate() runs each backward
  // as one action B, and not as two actions I (gradients of inputs) and W (gradients of weights).
  const bool splits = replicate_state(model_) == nullptr;
  program = std::make_unique<detail::RankProgram>(table.ranks.at(static_cast<size_t>(rank_)), splits);
  return *program;
}

void Pipeline::check_micro_batches(const std::vector<ModelInputs>& micro_batches) const {
  TESSERA_CHECK(!micro_batches.empty(), ErrorKind::kConfig, "[pipeline.step] no micro-batches, wanted at least one");
  for (size_t i = 0; i < micro_batches.size(); ++i) {
    const auto &tokens = micro_batches[i].tokens, &labels = micro_batches[i].labels;
    TESSERA_CHECK(tokens.defined() && labels.defined() && labels.sizes() == tokens.sizes(), ErrorKind::kShape,
                  "[pipeline.step] micro-batch {}: found {} labels and {} tokens, wanted labels of the tokens' shape",
                  i, labels.defined() ? labels.numel() : 0, tokens.defined() ? tokens.numel() : 0);
  }
}

at::Tensor Pipeline::step(const std::vector<ModelInputs>& micro_batches, const PipelineStepOptions& step_options) {
  TESSERA_CHECK(
      c10::GradMode::is_enabled(), ErrorKind::kConfig,
      "[pipeline.step] step() requires gradients to be enabled for backward computation; it should not be used "
      "without them. Call evaluate() instead.");
  check_micro_batches(micro_batches);
  const auto& actions = program(static_cast<int>(micro_batches.size()), true);
  auto* const tied = tied_slot();
  // The gradients of a tied embedding are summed over two ranks after the step. grad() from earlier steps has been
  // summed over them already, so it is removed here and added after the sum.
  const at::Tensor before = tied != nullptr ? std::exchange(tied->parameter.mutable_grad(), {}) : at::Tensor();
  detail::Execution execution(model_, plan_, channel_.get(), micro_batches, step_options.loss_divisor);
  DataParallelSwitches switches(model_, plan_, step_options);
  execution.run(actions, &switches);
  max_held_ = execution.max_held();
  if (tied != nullptr) {
    sum_tied_gradients();
    const c10::NoGradGuard no_grad;
    if (before.defined()) local_tensor_of(tied->parameter.grad()).add_(local_tensor_of(before));
  }
  return loss_or_zero(execution);
}

at::Tensor Pipeline::evaluate(const std::vector<ModelInputs>& micro_batches) {
  const c10::NoGradGuard no_grad;
  check_micro_batches(micro_batches);
  detail::Execution execution(model_, plan_, channel_.get(), micro_batches, 1);
  execution.run(program(static_cast<int>(micro_batches.size()), false), nullptr);
  return loss_or_zero(execution);
}

at::Tensor Pipeline::logprobs(ModelInputs inputs, const at::Tensor& targets) {
  const c10::NoGradGuard no_grad;
  inputs.targets = targets;
  const std::vector<ModelInputs> one = {inputs};
  detail::Execution execution(model_, plan_, channel_.get(), one, 1);
  execution.run(program(1, false), nullptr);
  return execution.result(0);
}

std::vector<int64_t> Pipeline::generate(std::span<const int64_t> prompt, const GenerationOptions& options,
                                        comm::Group* group) {
  const c10::NoGradGuard no_grad;
  if (group == nullptr && ranks_ > 1) group = options_.mesh->group("pp").get();
  const auto parameter = model_.parameters().front();
  DistributedForward source{.device = is_dtensor(parameter) ? device_mesh(parameter)->device() : parameter.device(),
                            .group = group};
  if (group != nullptr && group->size() > 1) {
    // The leader samples, so it must have the logits: of the ranks that have the last stage, the leader is the first
    // one in the group.
    const auto has_logits = comm::all_gather_bytes(*group, has_last_stage() ? "1" : "");
    source.leader = static_cast<int>(std::ranges::find_if(has_logits, [](const auto& each) { return !each.empty(); }) -
                                     has_logits.begin());
  }
  // The stages of a rank share one PagedKVCache, which holds the KV pages of the layers of all these stages.
  source.forward = [&](nn::PagedKVCache& store, const StepRows& rows) {
    nn::PagedBatch step(store, rows.sequences, rows.logits_rows);
    const std::vector<ModelInputs> one = {inputs_of_rows(rows, step, source.device)};
    detail::Execution execution(model_, plan_, channel_.get(), one, 1);
    execution.run(program(1, false), nullptr);
    return logits_of_rows(execution.result(0));
  };
  return tessera::generate(model_.config(), source, prompt, options);
}

// The tied embedding that this rank shares with another rank of the pipeline; null if there is none.
nn::ParameterSlot* Pipeline::tied_slot() {
  const int first = plan_.rank_of.front(), last = plan_.rank_of.back();
  if (!model_.config().tie_word_embeddings || first == last || (rank_ != first && rank_ != last)) return nullptr;
  const auto decoders = nn::modules_of<DecoderModel>(model_);
  auto* const embedding = decoders.empty() ? nullptr : decoders.front().second->embed_tokens.get();
  TESSERA_CHECK(embedding != nullptr, ErrorKind::kConfig,
                "[pipeline] rank {} has the head of a model with tied embeddings, but no embedding. Call keep_stages.",
                rank_);
  return &embedding->own_parameters().front();
}

// Exchanges the tied gradients and adds them. Both ranks compute a + b or b + a, which are bitwise equal, so the
// optimizer keeps the two weights equal.
void Pipeline::sum_tied_gradients() {
  const c10::NoGradGuard no_grad;
  auto& parameter = tied_slot()->parameter;
  if (!parameter.requires_grad()) return;
  if (!parameter.grad().defined()) parameter.mutable_grad() = at::zeros_like(parameter);
  const int first = plan_.rank_of.front(), last = plan_.rank_of.back(), other = rank_ == first ? last : first;
  constexpr int kTag = 0x7fffffff;
  auto& group = *options_.mesh->group("pp");
  const at::Tensor own = local_tensor_of(parameter.grad());
  const at::Tensor sent = own.contiguous(), received = at::empty_like(sent);
  const auto send = [&] { return comm::send(group, sent, other, kTag); };
  const auto receive = [&] { return comm::recv(group, received, other, kTag); };
  auto first_one = rank_ < other ? send() : receive();  // NCCL needs one order on both ranks
  auto second_one = rank_ < other ? receive() : send();
  first_one.wait();
  second_one.wait();
  own.add_(received);
}

std::vector<at::Tensor> Pipeline::norm_parameters() {
  auto parameters = model_.parameters();
  const auto* const tied = tied_slot();
  if (tied == nullptr || rank_ == plan_.rank_of.front()) return parameters;
  std::erase_if(parameters, [&](const at::Tensor& each) { return each.is_same(tied->parameter); });
  return parameters;
}

at::Tensor Pipeline::norm_over_stages(const at::Tensor& own_norm) const {
  if (ranks_ == 1) return own_norm;
  const auto own = own_norm.view({1}).to(options_.mesh->device());
  const auto all = at::empty({ranks_}, own.options());
  comm::all_gather_into(*options_.mesh->group("pp"), all, own, "gradient norm").wait();
  auto norm = all[0];
  for (int rank = 1; rank < ranks_; ++rank) norm = at::hypot(norm, all[rank]);  // does not overflow where squares would
  // hypot(inf, NaN) is infinite, so the result is set to NaN if any rank's norm is NaN.
  return at::where(all.isnan().any(), std::numeric_limits<double>::quiet_NaN(), norm);
}

}  // namespace tessera::pipeline
