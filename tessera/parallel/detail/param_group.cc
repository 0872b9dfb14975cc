#include "tessera/parallel/detail/param_group.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera::parallel {
namespace {

std::vector<ParamGroup::WeakTensor> weak_handles(const std::vector<ShardedParam>& params) {
  std::vector<ParamGroup::WeakTensor> out;
  for (const auto& param : params) out.emplace_back(param.parameter.getIntrusivePtr());
  return out;
}

}  // namespace

ParamGroup::ParamGroup(std::vector<ShardedParam> params, MeshPtr mesh, const MixedPrecisionPolicy& policy, bool on_host)
    : GatheredGroup(params[0].name, static_cast<double>(mesh->size())),
      originals_(weak_handles(params)),
      plan_(plan_gather(params, *mesh, policy, on_host)),
      shards_(std::move(params), mesh, on_host),
      whole_(mesh->device()),
      reducer_(mesh, pool_, policy.reduce_dtype, on_host) {}

void ParamGroup::on_joined() {
  reducer_.set_pool(pool_);
  if (state_ != State::kSharded) count(1);  // gathered by hand before
}

void ParamGroup::fill_whole() {
  whole_.fill(*pool_, plan_.whole_bytes);
  for (size_t i = 0; i < params().size(); ++i) {
    auto& param = params()[i];
    if (!param.whole.defined()) param.whole = whole_.tensor(plan_.whole_offsets[i], param.shape, param.gather_dtype);
  }
}

void ParamGroup::start_unshard() {
  if (may_be_stale() && changed()) reshard();
  if (state_ != State::kSharded) return;
  const c10::NoGradGuard no_grad;
  shards_.adopt_replaced();
  gathered_version_ = shards_.version();
  if (plan_.way == GatherWay::kAlias) {
    for (auto& param : params()) param.whole = param.local.detach();
    state_ = State::kUnsharded;
    return count(1);
  }
  const c10::ScalarType dtype = shards_.wire_dtype();
  const int64_t numel = shards_.ranks() * plan_.layout.part_bytes / static_cast<int64_t>(c10::elementSize(dtype));
  if (plan_.gathers_into_whole()) {
    fill_whole();
    gathered_ = whole_.tensor(0, {numel}, dtype);
  } else {
    gathered_ = pool_->empty(numel, dtype, mesh()->device());
  }
  state_ = State::kGathering;
  count(1);
  if (shards_.ranks() == 1) return shards_.write_to(gathered_, plan_.layout);
  input_ = shards_.to_send(plan_.layout, *pool_);
  pending_ = comm::all_gather_into(shards_.group(), gathered_, input_, name());
  if (stats_ == nullptr) return;
  ++stats_->all_gathers;
  stats_->piecewise_gathers += !shards_.lies_flat();
}

void ParamGroup::finish_unshard() {
  if (state_ != State::kGathering) return;
  const c10::NoGradGuard no_grad;
  pending_.wait();
  input_.reset();
  if (!plan_.gathers_into_whole()) fill_whole();
  lay_out(plan_, gathered_, whole_, *pool_);
  gathered_.reset();
  state_ = State::kUnsharded;
}

void ParamGroup::reshard() {
  if (state_ == State::kSharded) return;
  const auto failure = wait_for_failure(pending_);
  if (shows_whole_) show_shards();
  input_.reset();
  gathered_.reset();
  if (plan_.way == GatherWay::kAlias) {
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

std::vector<at::Tensor> ParamGroup::whole_tensors() const {
  std::vector<at::Tensor> out;
  for (const auto& param : shards_.params()) {
    out.push_back(param.as_seen(plan_.way == GatherWay::kAlias ? param.whole.detach() : param.whole.variable_data()));
  }
  return out;
}

std::vector<at::Tensor> ParamGroup::leaves(const std::vector<size_t>& trainable) const {
  std::vector<at::Tensor> out;
  for (size_t index : trainable) {
    const auto& param = shards_.params()[index];
    // An activation checkpoint around the unit shows a leaf of its own, whose graph ends there.
    const at::Tensor& shown = *param.slots[0].get().slot;
    const bool stands_for_shards = is_dtensor(shown) && shown.is_leaf() && shown.requires_grad();
    out.push_back(stands_for_shards ? shown : param.parameter);
  }
  return out;
}

void ParamGroup::show_whole(const std::vector<at::Tensor>& tensors) {
  for (size_t i = 0; i < params().size(); ++i) {
    for (const auto& ref : params()[i].slots) *ref.get().slot = tensors[i];
  }
  shows_whole_ = true;
}

void ParamGroup::show_shards() {
  shards_.show();
  shows_whole_ = false;
}

}  // namespace tessera::parallel
