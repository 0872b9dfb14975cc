#include "tessera/parallel/fsdp/fsdp_param_group.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera {
namespace {

std::vector<FsdpParamGroup::WeakTensor> weak_handles(const std::vector<ShardedParam>& params) {
  std::vector<FsdpParamGroup::WeakTensor> out;
  for (const auto& param : params) out.emplace_back(param.parameter.getIntrusivePtr());
  return out;
}

}  // namespace

FsdpParamGroup::FsdpParamGroup(std::vector<ShardedParam> params, MeshPtr mesh, const MixedPrecisionPolicy& policy,
                               bool on_host)
    : ShardedParamGroup(params[0].name, static_cast<double>(mesh->size())),
      originals_(weak_handles(params)),
      plan_(plan_gather(params, *mesh, policy, on_host)),
      shards_(std::move(params), mesh, on_host),
      whole_(mesh->device()),
      reduce_dtype_(policy.reduce_dtype),
      reduce_group_(mesh->group(mesh->ndim() - 1)),
      flat_gradients_(pool_) {}

void FsdpParamGroup::on_joined() {
  flat_gradients_.set_pool(pool_);
  reduce_group_ = streams_->second_group(mesh()->group(mesh()->ndim() - 1));
  reduction_.set_streams(streams_);
  if (state_ != State::kSharded) count(1);  // gathered by hand before the first forward
}

void FsdpParamGroup::use_fixed_buffer(const std::shared_ptr<FixedAddressBuffers>& buffers) {
  if (plan_.method == UnshardMethod::kAlias) return;  // the parameters are the shards
  fixed_buffers_ = buffers;
  if (frees_after_forward_) shared_buffer_ = buffers->add_alternating(static_cast<size_t>(plan_.unsharded_bytes));
}

c10::DataPtr FsdpParamGroup::acquire_fixed_buffer() {
  if (!fixed_buffers_) return {};
  if (frees_after_forward_ && reshard_after_backward && shared_buffer_) return fixed_buffers_->acquire(*shared_buffer_);
  if (!own_buffer_) own_buffer_ = fixed_buffers_->add(static_cast<size_t>(plan_.unsharded_bytes));
  return fixed_buffers_->acquire(*own_buffer_);
}

void FsdpParamGroup::allocate_unsharded() {
  // whole_ is always the same storage, and each `param.whole` is made once as a view of it. So tensors that autograd
  // saved in forward use the newly gathered memory in backward.
  if (c10::DataPtr memory = acquire_fixed_buffer()) {
    whole_.fill(std::move(memory), plan_.unsharded_bytes);
  } else {
    whole_.fill(*pool_, plan_.unsharded_bytes);
  }
  for (size_t i = 0; i < params().size(); ++i) {
    auto& param = params()[i];
    if (!param.whole.defined()) {
      param.whole = whole_.tensor(plan_.unsharded_offsets[i], param.shape, param.gather_dtype);
    }
  }
}

void FsdpParamGroup::start_unshard() {
  if (may_be_stale() && changed()) reshard();
  if (state_ != State::kSharded) return;
  const c10::NoGradGuard no_grad;
  // The version counters of the shards are read before the gather starts. If a shard is written during the gather, its
  // counter is newer afterwards, and the next start_unshard() gathers again.
  const bool replaced = shards_.replaced();
  shards_.adopt_replaced();
  gathered_version_ = shards_.version();
  const bool written = replaced || gathered_version_ != ordered_version_;
  if (plan_.method == UnshardMethod::kAlias) {
    for (auto& param : params()) param.whole = param.local.detach();
    state_ = State::kUnsharded;
    return count(1);
  }
  const c10::ScalarType dtype = shards_.wire_dtype();
  const int64_t numel = shards_.ranks() * plan_.layout.part_bytes / static_cast<int64_t>(c10::elementSize(dtype));
  const bool in_place = plan_.gathers_into_whole();
  if (in_place) allocate_unsharded();
  // The gather stream waits for the compute stream only in two cases: the shards have been written since the gather
  // stream was last ordered after the compute stream (ordered_version_), or the gather is in place, so that its output
  // was allocated on the compute stream. Otherwise the gather overlaps all computation.
  if (written || in_place) streams_->gather.wait_current_stream();
  ordered_version_ = gathered_version_;
  const auto beside = streams_->gather.make_current();
  gathered_ = in_place ? whole_.tensor(0, {numel}, dtype) : pool_->empty(numel, dtype, mesh()->device());
  state_ = State::kGathering;
  count(1);
  if (shards_.ranks() == 1) {
    shards_.copy_to(gathered_, plan_.layout);
    filled_ = streams_->gather.record_event();
    return;
  }
  input_ = shards_.all_gather_input(plan_.layout, *pool_);
  filled_ = streams_->gather.record_event();
  pending_ = comm::all_gather_into(shards_.group(), gathered_, input_, name());
  if (stats_ == nullptr) return;
  ++stats_->all_gathers;
  stats_->piecewise_gathers += !shards_.is_in_flat_buffer();
}

void FsdpParamGroup::finish_unshard() {
  if (state_ != State::kGathering) return;
  const c10::NoGradGuard no_grad;
  pending_.wait();
  filled_.block_current_stream();
  // The two calls above made the current stream wait for the all-gather, so copies on this stream may read `gathered_`.
  // The copies below still read `gathered_` when this function returns. So buffers that were allocated on the gather
  // stream are not freed here, but given to CommStreams::retire(), which frees them later.
  if (!streams_->gather.exists()) input_.reset();
  if (!plan_.gathers_into_whole()) allocate_unsharded();
  copy_to_unsharded(plan_, gathered_, whole_, *pool_);
  if (plan_.gathers_into_whole()) gathered_.reset();
  streams_->retire({std::exchange(input_, {}), std::exchange(gathered_, {})});
  state_ = State::kUnsharded;
}

// Abandons a prefetched gather. The compute stream waits for the copies into the gather's buffers, and the gather
// stream waits for the compute stream, so buffers of both streams can be freed. If the shards are in host memory, the
// host waits, too, because the caller may write to them as soon as this function returns.
void FsdpParamGroup::abandon_gather() {
  filled_.block_current_stream();
  streams_->gather.wait_current_stream();
  if (shards_.on_host()) filled_.wait();
}

void FsdpParamGroup::reshard() {
  if (state_ == State::kSharded) return;
  // If the gather in flight fails, its error is thrown at the end of this function, after the group has been resharded
  // completely.
  const auto failure = wait_for_failure(pending_);
  if (state_ == State::kGathering) abandon_gather();
  if (uses_unsharded_params_) use_sharded_params();
  input_.reset();
  gathered_.reset();
  if (plan_.method == UnshardMethod::kAlias) {
    for (auto& param : params()) param.whole.reset();
  } else {
    whole_.free("[fsdp.backward] " + name() +
                ": its parameters are freed. A tensor computed from them reached backward without passing "
                "an output of the module's forward; return it from forward.");
  }
  count(-1);
  state_ = State::kSharded;
  if (failure) std::rethrow_exception(failure);
}

std::vector<at::Tensor> FsdpParamGroup::unsharded_tensors() const {
  std::vector<at::Tensor> out;
  for (const auto& param : shards_.params()) {
    out.push_back(param.forward_tensor(plan_.method == UnshardMethod::kAlias ? param.whole.detach()
                                                                             : param.whole.variable_data()));
  }
  return out;
}

std::vector<at::Tensor> FsdpParamGroup::leaves(const std::vector<size_t>& trainable) const {
  std::vector<at::Tensor> out;
  for (size_t index : trainable) {
    const auto& param = shards_.params()[index];
    // If an activation checkpoint around this module recomputes it, the module's member holds a leaf of the
    // checkpoint's own graph in place of the parameter, and the gradient must go to this leaf.
    const at::Tensor& shown = *param.slots[0].get().slot;
    const bool stands_for_shards = is_dtensor(shown) && shown.is_leaf() && shown.requires_grad();
    out.push_back(stands_for_shards ? shown : param.parameter);
  }
  return out;
}

void FsdpParamGroup::use_unsharded_params(const std::vector<at::Tensor>& tensors) {
  for (size_t i = 0; i < params().size(); ++i) {
    for (const auto& ref : params()[i].slots) *ref.get().slot = tensors[i];
  }
  uses_unsharded_params_ = true;
}

void FsdpParamGroup::use_sharded_params() {
  shards_.use_sharded_params();
  uses_unsharded_params_ = false;
}

}  // namespace tessera
