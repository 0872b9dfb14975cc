#include "tessera/parallel/ddp/replicate_state.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/tensor/local_tensor.h"
#include "tessera/parallel/ddp/bucket_plan.h"

namespace tessera {

ReplicateState::ReplicateState(nn::Module& module, ReplicateOptions options)
    : module_(module),
      options_(std::move(options)),
      streams_(std::make_shared<CommStreams>(options_.mesh->device())),
      divide_(static_cast<double>(options_.mesh->size())) {}

void ReplicateState::install_hooks() {
  module_.register_forward_pre_hook([this](nn::Module&, nn::TensorRefs& inputs) { before_forward(inputs); });
  module_.register_forward_hook([this](nn::Module&, nn::TensorRefs& outputs) { after_forward(outputs); });
}

bool ReplicateState::recomputing() const { return in_backward_ && inside_backward(); }

// ---- buckets ----

void ReplicateState::make_buckets(const std::vector<size_t>& order, bool one_node_each) {
  std::vector<BucketItem> items;
  const auto reduce_dtype_of = [&](size_t index) {
    return options_.mp_policy.reduce_dtype.value_or(params_[index].compute_dtype);
  };
  for (const size_t index : order) {
    const auto& parameter = params_[index].parameter;
    items.push_back(
        {local_tensor_of(parameter).numel() * static_cast<int64_t>(c10::elementSize(reduce_dtype_of(index))),
         parameter.scalar_type()});
  }
  // An autograd graph that was made before the buckets were rebuilt still holds the old nodes. If `params_` has not
  // been rebuilt since then (params_generation_ is unchanged), the gradients of the old nodes are packed into the new
  // buckets. The callback of a node holds a weak pointer, so that a graph does not keep this object alive.
  ++buckets_generation_;
  buckets_.clear();
  nodes_.clear();
  bucket_positions_.assign(params_.size(), {});
  for (const auto& members : assign_buckets(items, options_.first_bucket_bytes, options_.bucket_bytes)) {
    const size_t bucket = buckets_.size();
    std::vector<ReplicatedParam*> params;
    for (size_t position = 0; position < members.size(); ++position) {
      const size_t index = order[members[position]];
      params.push_back(&params_[index]);
      if (position == 0 || one_node_each) nodes_.push_back({.bucket = bucket, .params = {}, .end = {}});
      nodes_.back().params.push_back(index);
      bucket_positions_[index] = {bucket, position};
    }
    c10::Allocator* const memory = group().allocator(options_.mesh->device_type());
    buckets_.emplace_back(std::move(params), reduce_dtype_of(order[members[0]]), pool_, streams_, memory,
                          fmt::format("gradient bucket {}", bucket));
  }
  for (size_t i = 0; i < nodes_.size(); ++i) {
    std::vector<at::Tensor> like;
    for (const size_t index : nodes_[i].params) {
      like.push_back(params_[index].parameter.detach().to(params_[index].compute_dtype));
    }
    nodes_[i].end.emplace(like, [weak = weak_from_this(), i, params = nodes_[i].params, all = params_generation_,
                                 generation = buckets_generation_](std::vector<at::Tensor>&& gradients) {
      const auto self = weak.lock();
      if (!self) return;
      TESSERA_CHECK(
          all == self->params_generation_, ErrorKind::kShape,
          "[replicate.backward] parameters were replaced, frozen or unfrozen between forward and backward. Run "
          "forward again.");
      if (generation == self->buckets_generation_) return self->receive_gradients(i, std::move(gradients));
      self->enter_backward();  // a graph from before the buckets were rebuilt
      self->pack_gradients(params, std::move(gradients));
    });
  }
  reset_node_counts();
  stats_.buckets = static_cast<int64_t>(buckets_.size());
}

// Rebuilds the buckets in the order in which gradients arrived on the mesh's first rank. That order is broadcast,
// because all ranks must have equal buckets and reduce them in the same order. Parameters without a gradient come last.
// COLLECTIVE over the mesh.
void ReplicateState::rebuild_buckets() {
  will_rebuild_buckets_ = false;
  std::vector<bool> came(params_.size(), false);
  for (const size_t index : gradient_order_) came[index] = true;
  for (auto index = trainable_.rbegin(); index != trainable_.rend(); ++index) {
    if (!came[*index]) gradient_order_.push_back(*index);  // no forward used it
  }
  auto order = at::empty({static_cast<int64_t>(gradient_order_.size())}, at::kLong);
  std::copy(gradient_order_.begin(), gradient_order_.end(), order.mutable_data_ptr<int64_t>());
  order = order.to(options_.mesh->device());
  comm::broadcast(group(), order, 0, "order of gradients").wait();
  order = order.to(at::kCPU);
  const auto* first = order.const_data_ptr<int64_t>();
  make_buckets({first, first + order.numel()}, false);
  gradient_order_.clear();
}

void ReplicateState::use_forward_params() {
  for (size_t i = 0; i < forward_params_.size(); ++i) {
    for (const auto& slot : params_[i].slots) *slot.get().slot = forward_params_[i];
  }
}

void ReplicateState::use_parameters() {
  for (const auto& param : params_) {
    for (const auto& slot : param.slots) *slot.get().slot = slot.get().parameter;
  }
}

// ---- forward ----

// Returns the tensor that forward reads for a parameter. It is a new tensor in every forward, over the memory of the
// parameter or of a cast of it. A cast is reused while the parameter has the same memory and version counter, so all
// forwards until the next backward share one cast. `keeps`: store the cast for later forwards.
at::Tensor ReplicateState::forward_param(size_t param, bool keeps) {
  const auto& [name, slots, parameter, dtype] = params_[param];
  const at::Tensor local = local_tensor_of(parameter);
  if (dtype == parameter.scalar_type() || local.is_inference()) return parameter.detach().to(dtype);
  casts_.resize(params_.size());
  auto& known = casts_[param];
  const CastParameter now{{}, local.const_data_ptr(), local._version()};
  if (known.value.defined() && known.data == now.data && known.version == now.version) return known.value.detach();
  // With fixed_addresses a cast that is kept is written into the memory of the parameter's previous cast, unless some
  // forward still uses the previous cast.
  const bool again =
      keeps && options_.fixed_addresses && known.value.defined() && known.value.storage().use_count() == 1;
  const auto cast = again ? known.value.copy_(parameter.detach()) : parameter.detach().to(dtype);
  known = keeps ? CastParameter{cast, now.data, now.version} : CastParameter{};
  return cast.detach();
}

void ReplicateState::before_forward(nn::TensorRefs& inputs) {
  if (recomputing()) return use_forward_params();
  // in_backward_ is still set outside the autograd engine only if the last backward ended with an exception.
  if (in_backward_) reset();
  lazy_init();
  const bool with_gradients = c10::GradMode::is_enabled();
  const auto& policy = options_.mp_policy;
  if (policy.param_dtype && policy.cast_forward_inputs) cast_floating(inputs, *policy.param_dtype);
  if (options_.broadcast_buffers && with_gradients && synchronize_) copy_from_first_rank(false);
  forward_params_.clear();
  if (!with_gradients && !policy.param_dtype) return use_parameters();
  {
    const c10::NoGradGuard no_grad;
    for (size_t i = 0; i < params_.size(); ++i) forward_params_.push_back(forward_param(i, with_gradients));
  }
  if (with_gradients) {
    for (const auto& node : nodes_) {
      for (size_t i = 0; i < node.params.size(); ++i) node.end->connect(forward_params_[node.params[i]], i);
    }
  }
  use_forward_params();
}

void ReplicateState::after_forward(nn::TensorRefs& outputs) {
  if (!recomputing()) use_parameters();
  std::vector<at::Tensor> roots;
  for (at::Tensor* output : outputs) {
    if (c10::GradMode::is_enabled() && output->defined() && output->requires_grad()) roots.push_back(*output);
  }
  if (roots.empty()) forward_params_.clear();
  if (!recomputing()) {
    const auto reachable = options_.find_unused_parameters && !roots.empty() ? find_reachable_nodes(roots) : nullptr;
    // Every output that has a grad_fn gets the hook below. In a backward only the first of these hooks to run has an
    // effect in enter_backward().
    for (const auto& root : roots) {
      if (!root.grad_fn()) continue;
      on_gradient_of(root, [self = shared_from_this(), reachable] {
        self->enter_backward();
        if (reachable) reachable->consumed = true;
      });
    }
  }
  if (options_.mp_policy.output_dtype) cast_floating(outputs, *options_.mp_policy.output_dtype);
}

std::shared_ptr<ReplicateState::ReachableNodes> ReplicateState::find_reachable_nodes(
    const std::vector<at::Tensor>& roots) {
  const auto nodes = reachable_nodes(roots);
  auto reachable =
      std::make_shared<ReachableNodes>(ReachableNodes{.reached_nodes = {}, .generation = buckets_generation_});
  for (const auto& node : nodes_) reachable->reached_nodes.push_back(nodes.contains(node.end->identity()));
  std::erase_if(reachable_nodes_, [](const auto& each) { return each.expired(); });
  reachable_nodes_.push_back(reachable);
  return reachable;
}

// For each of nodes_: true if no pending forward has it in its autograd graph. A forward is pending until backward has
// run through its graph. Returns an empty list if this is unknown, because no pending forward searched its graph, or
// because the buckets were rebuilt after such a search.
std::vector<bool> ReplicateState::unused_nodes() const {
  std::vector<bool> unused;
  for (const auto& weak : reachable_nodes_) {
    const auto reachable = weak.lock();
    if (!reachable || reachable->consumed) continue;
    if (reachable->generation != buckets_generation_) return {};
    if (unused.empty()) unused.assign(nodes_.size(), true);
    for (size_t i = 0; i < unused.size(); ++i) unused[i] = unused[i] && !reachable->reached_nodes[i];
  }
  return unused;
}

// ---- backward ----

// Runs at the start of backward. Each BucketNode whose parameters will receive no gradients in this backward is
// finished at once, so that its bucket can be reduced before the end of backward.
void ReplicateState::enter_backward() {
  if (in_backward_) return;
  in_backward_ = true;
  at_end_of_backward([self = shared_from_this()] { self->end_backward(); });
  use_forward_params();
  const auto unused = unused_nodes();
  for (size_t i = 0; i < nodes_.size(); ++i) {
    if (nodes_[i].learned_runs == 0 || (!unused.empty() && unused[i])) finish_node(nodes_[i]);
  }
  start_buckets(false);
}

void ReplicateState::finish_node(BucketNode& node) {
  if (node.done) return;
  node.done = true;
  --outstanding_nodes_[node.bucket];
}

// Node `index` calls this function with all its gradients, each time the node runs. Without static_graph the node is
// done after its first run in a backward. With static_graph it is done after learned_runs runs, the number of its runs
// in an earlier backward, because reentrant checkpoints run a node several times.
void ReplicateState::receive_gradients(size_t index, std::vector<at::Tensor>&& gradients) {
  enter_backward();
  auto& node = nodes_[index];
  if (will_rebuild_buckets_ && synchronize_ && node.runs == 0) gradient_order_.push_back(node.params[0]);
  ++node.runs;
  pack_gradients(node.params, std::move(gradients));
  if (!options_.static_graph || node.runs == node.learned_runs) finish_node(node);
  start_buckets(false);
}

void ReplicateState::pack_gradients(const std::vector<size_t>& params, std::vector<at::Tensor>&& gradients) {
  free_packed_gradients();
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined()) continue;
    const auto [bucket, position] = bucket_positions_[params[i]];
    TESSERA_CHECK(
        !buckets_[bucket].started(), ErrorKind::kShape,
        "[replicate.backward] {}: a gradient came after its bucket had been reduced. Set static_graph when backward "
        "reaches it several times in every step, and leave find_unused_parameters out when forward hides an output.",
        params_[params[i]].name);
    gradients[i] = buckets_[bucket].prepare(position, gradients[i]);
  }
  streams_->reduce.wait_current_stream();
  const auto beside = streams_->reduce.make_current();
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined()) continue;
    const auto [bucket, position] = bucket_positions_[params[i]];
    buckets_[bucket].add(position, gradients[i]);
    if (!streams_->reduce.exists()) gradients[i].reset();
  }
  packed_ = streams_->reduce.record_event();
  packed_gradients_ = std::move(gradients);
}

// Frees gradients that were packed into buckets. The compute stream, which owns them, first waits for the packing.
void ReplicateState::free_packed_gradients() {
  if (packed_gradients_.empty()) return;
  packed_.block_current_stream();
  packed_gradients_.clear();
}

// Starts the reduction of complete buckets, or with `all` of all buckets, in bucket order. Every rank starts them in
// the same order, because the loop stops at the first incomplete bucket. The division of a bucket is launched when the
// next bucket starts; its all-reduce has then had time to run.
void ReplicateState::start_buckets(bool all) {
  if (!synchronize_) return;
  for (; next_bucket_ < buckets_.size() && (all || outstanding_nodes_[next_bucket_] == 0); ++next_bucket_) {
    if (next_bucket_ > 0 && streams_->replicas.exists()) buckets_[next_bucket_ - 1].write_values();
    buckets_[next_bucket_].start(options_.mesh->group(0), divide_);
    if (group().size() == 1) continue;
    ++stats_.all_reduces;
    stats_.overlapped += !all;
  }
}

// At the end of backward all remaining buckets are reduced, with zeros for missing gradients, so ranks that used
// different parameters still run the same collectives.
void ReplicateState::end_backward() {
  free_packed_gradients();
  use_parameters();
  forward_params_.clear();
  if (synchronize_) {
    if (!options_.fixed_addresses) casts_.clear();
    start_buckets(true);
    for (auto& bucket : buckets_) bucket.finish();
  } else {
    for (auto& bucket : buckets_) bucket.expose_accumulated();
  }
  if (options_.static_graph && synchronize_ && !will_rebuild_buckets_) {
    for (auto& node : nodes_) {
      if (node.learned_runs < 0) node.learned_runs = node.runs;
    }
  }
  reset_node_counts();
  if (will_rebuild_buckets_ && synchronize_) rebuild_buckets();
}

// After an exception in backward: discards unfinished gradients.
void ReplicateState::reset() {
  free_packed_gradients();
  for (auto& bucket : buckets_) bucket.drop();
  reset_node_counts();
  gradient_order_.clear();
  casts_.clear();
}

// Prepares the state for the next backward: no node has run, each bucket waits for all its nodes, and the first bucket
// is reduced first.
void ReplicateState::reset_node_counts() {
  outstanding_nodes_.assign(buckets_.size(), 0);
  for (auto& node : nodes_) {
    node.runs = 0;
    node.done = false;
    ++outstanding_nodes_[node.bucket];
  }
  next_bucket_ = 0;
  in_backward_ = false;
}

ReplicateState* replicate_state(const nn::Module& module) {
  return dynamic_cast<ReplicateState*>(module.sharding().get());
}

}  // namespace tessera
