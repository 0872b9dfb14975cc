#include "tessera/fsdp1/flat_param_group.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/parallel/layers/forward_parameters.h"

namespace tessera {
namespace {

// The storages of all shards in this process. Threads may run different ranks, so a mutex guards them.
struct FlatUnits {
  std::mutex mutex;
  std::set<const c10::StorageImpl*> storages;  // a tensor over one of these storages is a piece of a flat parameter
};
FlatUnits& flat_units() {
  static FlatUnits units;
  return units;
}

// Returns a view of a storage with the given offset and strides, in elements.
at::Tensor strided_over(const c10::Storage& storage, int64_t offset, c10::IntArrayRef shape, c10::IntArrayRef strides,
                        c10::ScalarType dtype) {
  return at::empty({0}, at::TensorOptions().dtype(dtype).device(storage.device()))
      .set_(storage, offset, shape, strides);
}

// Lets both tensors use one version counter, so that a write to one of them is seen as a write to both.
void share_version(const at::Tensor& leaf, const at::Tensor& shard) {
  leaf.unsafeGetTensorImpl()->set_version_counter(shard.unsafeGetTensorImpl()->version_counter());
}

std::vector<FlatParamGroup::WeakTensor> weak_originals(const std::vector<OriginalParam>& original_params) {
  std::vector<FlatParamGroup::WeakTensor> out;
  for (const auto& original : original_params) out.emplace_back(original.tensor.getIntrusivePtr());
  return out;
}

}  // namespace

bool is_in_flat_parameter(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return false;
  auto& units = flat_units();
  const std::lock_guard lock(units.mutex);
  return units.storages.contains(tensor.storage().unsafeGetStorageImpl());
}

FlatParamGroup::FlatParamGroup(nn::Module& module, std::shared_ptr<comm::Group> group,
                               const FlatParamGroupOptions& options, FlatParameterLayout layout,
                               std::vector<OriginalParam> original_params)
    : ShardedParamGroup(original_params[0].member.fqn,
                        static_cast<double>(group->size() * (options.replicas ? options.replicas->size() : 1))),
      group_(std::move(group)),
      options_(options),
      layout_(std::move(layout)),
      originals_(weak_originals(original_params)),
      unsharded_storage_(layout_.members()[0].device),
      reducer_(layout_, group_, layout_.members()[0].device,
               {.sharded = options.sharded,
                .flags = layout_.use_orig_params(),
                .dtype = options.reduce_dtype,
                .replicas = options.replicas}) {
  const c10::NoGradGuard no_grad;
  const c10::Device device = layout_.members()[0].device;
  std::vector<at::Tensor> tensors;
  for (const auto& original : original_params) tensors.push_back(original.tensor.detach());
  at::Tensor flat = layout_.flatten(tensors);
  if (options_.sharded) flat = layout_.shard(flat, group_->rank());
  // The shard is in memory of the group's allocator, so the back-end can send it without a copy.
  shard_ = BufferPool().empty(flat.numel(), layout_.dtype(), device, group_->allocator(device.type()));
  shard_.copy_(flat);
  {
    auto& units = flat_units();
    const std::lock_guard lock(units.mutex);
    units.storages.insert(shard_.storage().unsafeGetStorageImpl());
  }
  members_.resize(original_params.size());
  for (size_t i = 0; i < original_params.size(); ++i) {
    for (const auto& slot : original_params[i].slots) members_[i].shown.push_back(slot.get().slot);
  }
  if (has_unsharded_storage()) make_unsharded_views();
  layout_.use_orig_params() ? make_pieces(original_params) : make_flat_parameter(module, original_params);
  use_sharded_params();
}

// Waits for an all-gather in flight before its memory is freed.
FlatParamGroup::~FlatParamGroup() {
  if (state_ != State::kSharded && has_unsharded_storage()) {
    { const comm::PendingCollective abandoned = std::move(pending_); }  // the destructor waits
    free_unsharded();
  }
  for (const auto& removed : removed_slots_) remove_unregistered_member(*removed.owner, removed.slot.slot);
  auto& units = flat_units();
  const std::lock_guard lock(units.mutex);
  units.storages.erase(shard_.storage().unsafeGetStorageImpl());
}

std::vector<ShardParamInfo> FlatParamGroup::param_infos() const {
  return options_.sharded ? layout_.shard_param_infos(group_->rank()) : layout_.whole_param_infos();
}

// With use_orig_params: puts each original parameter's piece of the shard into its slots. Without sharding the piece
// has the parameter's own shape and strides.
void FlatParamGroup::make_pieces(const std::vector<OriginalParam>& original_params) {
  const auto infos = param_infos();
  for (size_t i = 0; i < members_.size(); ++i) {
    auto& [shown, slots, piece, whole] = members_[i];
    const auto& member = layout_.members()[i];
    if (options_.sharded) {
      piece = tensor_over(shard_.storage(), infos[i].offset_in_shard * static_cast<int64_t>(shard_.itemsize()),
                          {infos[i].numel_in_shard}, layout_.dtype());
    } else {
      piece = strided_over(shard_.storage(), layout_.offset(i), member.shape, member.strides, layout_.dtype());
    }
    share_version(piece, shard_);
    piece.set_requires_grad(member.requires_grad);
    slots = original_params[i].slots;
    for (const auto& slot : slots) nn::Module::set_parameter(slot.get(), piece);
  }
}

// Without use_orig_params: replaces the slots of the original parameters by one slot "_flat_param" of `module`. The
// flat parameter gets weight decay when any of the original parameters would.
void FlatParamGroup::make_flat_parameter(nn::Module& module, const std::vector<OriginalParam>& original_params) {
  bool decay = false;
  for (const auto& original : original_params) decay = decay || original.slots[0].get().decay;
  remove_slots(original_params);
  flat_ = tensor_over(shard_.storage(), 0, shard_.sizes(), layout_.dtype());
  share_version(flat_, shard_);
  flat_.set_requires_grad(layout_.requires_grad());
  flat_shown_ = flat_;
  flat_slot_ = {&module, module.own_parameters().size()};
  module.own_parameters().push_back({kFlatParam, &flat_shown_, flat_, decay, 0});
}

// Removes the parameter slots from own_parameters() of their modules; the module members (at::Tensor fields) stay.
// Slots are erased from the highest index down, so that the recorded indices stay valid. summon_full_params inserts the
// slots again in the opposite order.
void FlatParamGroup::remove_slots(const std::vector<OriginalParam>& original_params) {
  for (size_t i = 0; i < original_params.size(); ++i) {
    for (const auto& slot : original_params[i].slots) {
      removed_slots_.push_back({slot.owner, slot.index, slot.get(), i});
      add_unregistered_member(*slot.owner, slot.get().slot);
    }
  }
  std::ranges::sort(removed_slots_, [](const RemovedSlot& a, const RemovedSlot& b) {
    return std::pair(a.owner, a.index) < std::pair(b.owner, b.index);
  });
  for (auto removed = removed_slots_.rbegin(); removed != removed_slots_.rend(); ++removed) {
    auto& own = removed->owner->own_parameters();
    own.erase(own.begin() + static_cast<std::ptrdiff_t>(removed->index));
    removed->slot.parameter.reset();
  }
}

// Makes members_[i].whole, the views of the gathered storage. They are made once, because the storage object stays the
// same: only its memory is allocated for each all-gather and freed afterwards.
void FlatParamGroup::make_unsharded_views() {
  BufferPool passing;
  unsharded_storage_.fill(passing, unsharded_bytes());
  const c10::Storage storage = unsharded_storage_.tensor(0, {0}, compute_dtype()).storage();
  for (size_t i = 0; i < members_.size(); ++i) {
    const auto& member = layout_.members()[i];
    members_[i].whole = strided_over(storage, layout_.offset(i), member.shape, member.strides, compute_dtype());
  }
  free_unsharded();
}

int64_t FlatParamGroup::unsharded_bytes() const {
  if (!has_unsharded_storage()) return 0;
  const int64_t numel = options_.sharded ? layout_.padded_numel() : layout_.unpadded_numel();
  return numel * static_cast<int64_t>(c10::elementSize(compute_dtype()));
}

void FlatParamGroup::on_joined() { reducer_.join(pool_, streams_); }

std::vector<at::Tensor> FlatParamGroup::all_leaves() const {
  if (!layout_.use_orig_params()) return {flat_};
  std::vector<at::Tensor> out;
  for (const auto& member : members_) out.push_back(member.piece);
  return out;
}

uint64_t FlatParamGroup::version() const {
  return shard_.is_inference() ? 0 : static_cast<uint64_t>(shard_._version());
}

void FlatParamGroup::check_not_replaced() const {
  const auto check = [&](const nn::ParameterSlot& slot, const at::Tensor& leaf) {
    TESSERA_CHECK(
        slot.parameter.is_same(leaf), ErrorKind::kShape,
        "[fsdp1.forward] {}: parameter '{}' was replaced by another tensor, which the flat parameter does not "
        "hold. Copy values into it instead, or replace it before wrap_fsdp1.",
        name(), slot.name);
  };
  if (!layout_.use_orig_params()) return check(flat_slot_.get(), flat_);
  for (const auto& member : members_) {
    for (const auto& slot : member.slots) check(slot.get(), member.piece);
  }
}

// A gather is started only from the sharded state. When the shard was written after the last gather (its version
// changed), the gathered copy is stale and is freed first.
void FlatParamGroup::start_unshard() {
  TESSERA_CHECK(!summoned_, ErrorKind::kShape,
                "[fsdp1.forward] {}: a forward or backward pass ran inside summon_full_params. Run it before or after.",
                name());
  if (may_be_stale() && changed()) reshard();
  if (state_ != State::kSharded) return;
  const c10::NoGradGuard no_grad;
  check_not_replaced();
  state_ = State::kUnsharded;
  count(1, unsharded_bytes());
  if (!has_unsharded_storage()) return;
  gathered_version_ = version();
  // If the shard was written since the gather stream last waited, the gather stream waits for the current stream, so
  // that the all-gather reads the new values.
  if (gathered_version_ != ordered_version_) streams_->gather.wait_current_stream();
  ordered_version_ = gathered_version_;
  const auto on_gather_stream = streams_->gather.make_current();
  // Everything from here is enqueued on the gather stream.
  unsharded_storage_.fill(*pool_, unsharded_bytes());
  const int64_t numel = options_.sharded ? layout_.padded_numel() : layout_.unpadded_numel();
  if (numel == 0) return;
  state_ = State::kGathering;
  const at::Tensor gathered = unsharded_storage_.tensor(0, {numel}, compute_dtype());
  if (!options_.sharded) {
    gathered.copy_(shard_);
    cast_done_ = streams_->gather.record_event();
    return;
  }
  const at::Tensor sent = all_gather_input(gathered);
  cast_done_ = streams_->gather.record_event();
  pending_ = comm::all_gather_into(*group_, gathered, sent, name());
  if (stats_ != nullptr) ++stats_->all_gathers;
}

// Returns the shard in the dtype of the gather. On an accelerator the cast is written directly to this rank's place in
// `gathered`, so no further buffer is needed and the all-gather works in place. On the CPU the cast needs a buffer of
// its own.
at::Tensor FlatParamGroup::all_gather_input(const at::Tensor& gathered) {
  if (compute_dtype() == layout_.dtype()) return shard_;
  const c10::Device device = shard_.device();
  at::Tensor sent;
  if (device.is_cpu()) {
    sent = cast_shard_ = pool_->empty(shard_.numel(), compute_dtype(), device, group_->allocator(device.type()));
  } else {
    sent = gathered.narrow(0, group_->rank() * shard_.numel(), shard_.numel());
  }
  return sent.copy_(shard_);
}

void FlatParamGroup::finish_unshard() {
  if (state_ != State::kGathering) return;
  // cast_done_ makes the current stream, not the host, wait for the cast of the shard (without sharding: for its copy
  // to the gathered storage).
  pending_.wait();
  cast_done_.block_current_stream();
  cast_shard_.reset();
  state_ = State::kUnsharded;
}

void FlatParamGroup::free_unsharded() {
  streams_->retire(unsharded_storage_.free(
      "[fsdp1] " + name() +
      ": its parameters are freed. They are there from the start of its module's forward to its end, and for its "
      "backward, which only outputs of forward start: return from forward what backward needs."));
}

void FlatParamGroup::reshard() {
  if (state_ == State::kSharded) return;
  // Waits for an all-gather in flight, because its memory is freed below. An error of the all-gather is thrown only
  // after the unit is sharded again, so that the unit stays usable.
  const auto failure = wait_for_failure(pending_);
  if (state_ == State::kGathering) cast_done_.block_current_stream();
  cast_shard_.reset();
  if (uses_unsharded_params_) use_sharded_params();
  if (has_unsharded_storage()) free_unsharded();
  count(-1, unsharded_bytes());
  state_ = State::kSharded;
  if (failure) std::rethrow_exception(failure);
}

// Returns the views that forward reads: of the gathered storage, or of the flat parameter when nothing is gathered.
// variable_data() and detach() give tensors without autograd history.
std::vector<at::Tensor> FlatParamGroup::unsharded_tensors() const {
  const c10::NoGradGuard no_grad;
  std::vector<at::Tensor> out;
  if (has_unsharded_storage()) {
    for (const auto& member : members_) out.push_back(member.whole.variable_data());
  } else if (layout_.use_orig_params()) {
    for (const auto& member : members_) out.push_back(member.piece.detach());
  } else {
    for (const auto& view : layout_.unflatten(flat_.detach())) out.push_back(view.detach());
  }
  return out;
}

void FlatParamGroup::use_unsharded_params(const std::vector<at::Tensor>& tensors) {
  for (size_t i = 0; i < members_.size(); ++i) {
    for (at::Tensor* shown : members_[i].shown) *shown = tensors[i];
  }
  uses_unsharded_params_ = true;
}

// Sets the modules' at::Tensor fields for the sharded state: with use_orig_params to the parameters' pieces of the
// shard, otherwise to views of the freed memory, which throw when they are used.
void FlatParamGroup::use_sharded_params() {
  const auto wholes = layout_.use_orig_params() ? std::vector<at::Tensor>{} : unsharded_tensors();
  for (size_t i = 0; i < members_.size(); ++i) {
    const at::Tensor& shown_tensor = layout_.use_orig_params() ? members_[i].piece : wholes[i];
    for (at::Tensor* shown : members_[i].shown) *shown = shown_tensor;
  }
  uses_unsharded_params_ = false;
}

std::vector<size_t> FlatParamGroup::trainable() const {
  std::vector<size_t> out;
  for (size_t i = 0; i < members_.size(); ++i) {
    if ((layout_.use_orig_params() ? members_[i].piece : flat_).requires_grad()) out.push_back(i);
  }
  return out;
}

std::vector<at::Tensor> FlatParamGroup::leaves(const std::vector<size_t>& trainable) const {
  // If an activation checkpoint wraps the unit, it puts other autograd leaves in place of the module's parameters
  // during its recomputation: into `flat_shown_`, or with use_orig_params into the tensors in Member::shown. The
  // gradients are then computed for these leaves, and not for `flat_` or Member::piece.
  const auto shown_or = [](const at::Tensor& shown, const at::Tensor& leaf) {
    return shown.is_leaf() && shown.requires_grad() ? shown : leaf;
  };
  if (!layout_.use_orig_params()) return {shown_or(flat_shown_, flat_)};
  std::vector<at::Tensor> out;
  for (size_t index : trainable) out.push_back(shown_or(*members_[index].shown[0], members_[index].piece));
  return out;
}

void FlatParamGroup::accumulate(const std::vector<size_t>& trainable, std::vector<at::Tensor>&& gradients) {
  // When a unit is used twice in one autograd graph, its second gradients can arrive while the reduction of its first
  // gradients runs. That reduction is finished before the second gradients are added.
  while (advance_reduction(/*at_end=*/true)) {
  }
  // The gradient buffer is allocated even if this rank has no gradient: other ranks may have gradients, and all ranks
  // must take part in the reduction.
  reducer_.allocate_buffer();
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined()) continue;
    reducer_.add(trainable[i], gradients[i]);
    gradients[i].reset();
  }
}

bool FlatParamGroup::start_reduction() {
  if (!reducer_.has_buffer()) return false;
  reducer_.start(divide, name());
  return true;
}

// Adds `sum` to grad() in the parameter's dtype, as PyTorch does. With keep_low_precision_grads the total is cast back
// to the low precision afterwards.
void FlatParamGroup::set_gradient(const at::Tensor& leaf, const at::Tensor& sum) const {
  at::Tensor& grad = leaf.mutable_grad();
  at::Tensor total = sum.to(layout_.dtype());
  if (grad.defined() && grad.scalar_type() == total.scalar_type()) {
    total = grad.add_(total);
  } else if (grad.defined()) {
    total = total + grad.to(layout_.dtype());
  }
  if (options_.keep_low_precision_grads) total = total.to(options_.sharded ? compute_dtype() : sum.scalar_type());
  grad = total;
}

bool FlatParamGroup::advance_reduction(bool) {
  if (!reducer_.in_flight()) return false;
  const c10::NoGradGuard no_grad;
  if (reducer_.advance(name())) return true;
  const auto reduced = reducer_.finish(trainable());
  if (!layout_.use_orig_params()) {
    set_gradient(flat_, reduced.values);
    return false;
  }
  const auto infos = param_infos();
  for (size_t i = 0; i < members_.size(); ++i) {
    const auto& [shown, slots, piece, whole] = members_[i];
    // As in PyTorch, a parameter without elements on this rank gets no gradient, so the optimizer skips it.
    if (!piece.requires_grad() || !reduced.has_gradient[i] || !infos[i].in_shard) continue;
    set_gradient(piece, options_.sharded
                            ? reduced.values.narrow(0, infos[i].offset_in_shard, infos[i].numel_in_shard)
                            : reduced.values.as_strided(piece.sizes(), piece.strides(),
                                                        reduced.values.storage_offset() + layout_.offset(i)));
  }
  return false;
}

}  // namespace tessera
