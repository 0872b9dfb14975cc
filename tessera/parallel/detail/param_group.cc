#include "tessera/parallel/detail/param_group.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera::parallel {
namespace {

std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t d = shape.size(); d-- > 1;) strides[d - 1] = strides[d] * std::max<int64_t>(shape[d], 1);
  return strides;
}

int64_t itemsize(c10::ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); }

// A tensor over part of a storage, with a version counter of its own.
at::Tensor tensor_over(const c10::Storage& storage, int64_t offset_bytes, const std::vector<int64_t>& shape,
                c10::ScalarType dtype) {
  return at::empty({0}, at::TensorOptions().dtype(dtype).device(storage.device()))
      .set_(storage, offset_bytes / itemsize(dtype), shape, contiguous_strides(shape));
}

Placements shard_placements(const DeviceMesh& mesh) {
  return mesh.ndim() == 2 ? Placements{Replicate(), Shard(0)} : Placements{Shard(0)};
}

// Access to freed memory raises `why`, which allow_access takes back. libtorch 2.11 cannot take it back: there such an
// access meets a null pointer.
template <class Storage>
void forbid_access(Storage& storage, std::string why) {
  if constexpr (requires { storage.clear_data_ptr_access_error_msg_(); }) {
    storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(why));
  }
}
template <class Storage>
void allow_access(Storage& storage) {
  if constexpr (requires { storage.clear_data_ptr_access_error_msg_(); }) storage.clear_data_ptr_access_error_msg_();
}

}  // namespace

ParamGroup::ParamGroup(std::vector<ShardedParam> params, MeshPtr mesh, const MixedPrecisionPolicy& policy)
    : divide(static_cast<double>(mesh->size())),
      params_(std::move(params)),
      mesh_(std::move(mesh)),
      ranks_(mesh_->size(mesh_->ndim() - 1)),
      rank_(mesh_->local_rank(mesh_->ndim() - 1)),
      shard_layout_(ranks_),
      gather_layout_(ranks_),
      pool_(std::make_shared<BufferPool>()),
      reducer_(mesh_, pool_, policy.reduce_dtype) {
  name_ = params_[0].name;
  lead_with_largest();
  for (auto& param : params_) {
    const bool floating = c10::isFloatingType(param.dtype);
    param.gather_dtype = floating ? policy.param_dtype.value_or(param.dtype) : param.dtype;
    casts_ = casts_ || param.gather_dtype != param.dtype;
    uniform_ = uniform_ && param.dtype == params_[0].dtype && param.gather_dtype == params_[0].gather_dtype;
    shard_layout_.append(param.rows(), param.row_numel(), itemsize(param.dtype));
    gather_layout_.append(param.rows(), param.row_numel(), itemsize(param.gather_dtype));
  }
  lay_out_whole();
  const bool meta = params_[0].parameter.is_meta();
  for (const auto& param : params_) originals_.emplace_back(param.parameter.getIntrusivePtr());
  for (const auto& param : params_) {
    TESSERA_CHECK(param.parameter.is_meta() == meta, ErrorKind::kShape,
                  "[fsdp.shard] {} and {}: one is on the meta device, the other is not; wanted all or none of a group.",
                  params_[0].name, param.name);
  }
  create_shards(meta ? c10::Device(c10::kMeta) : mesh_->device(), !meta);
}

void ParamGroup::lead_with_largest() {
  const auto elements = [](const ShardedParam& param) { return param.rows() * param.row_numel(); };
  const auto largest = std::max_element(params_.begin(), params_.end(), [&](const auto& a, const auto& b) { return elements(a) < elements(b); });
  int64_t all = 0;
  for (const auto& param : params_) all += elements(param);
  compacts_ = !gathers_in_place() && mesh_->device().is_cpu() && all > 0 && 4 * elements(*largest) >= 3 * all;
  if (compacts_) std::rotate(params_.begin(), largest, largest + 1);
}

void ParamGroup::lay_out_whole() {
  if (gathers_in_place()) {
    for (const auto& entry : gather_layout_.entries) whole_offsets_.push_back(entry.offset);
    whole_bytes_ = ranks_ * gather_layout_.part_bytes;
    return;
  }
  for (const auto& entry : gather_layout_.entries) {
    const int64_t unit = 64 * entry.itemsize;
    whole_offsets_.push_back((whole_bytes_ + unit - 1) / unit * unit);
    whole_bytes_ = whole_offsets_.back() + entry.numel() * entry.itemsize;
  }
  if (compacts_) whole_bytes_ = std::max(whole_bytes_, ranks_ * gather_layout_.part_bytes);
}

// Replaces the parameters by DTensors over a new flat buffer, with this rank's rows of them when asked.
void ParamGroup::create_shards(c10::Device device, bool copy_values) {
  c10::NoGradGuard no_grad;
  if (!device.is_meta()) flat_shard_ = pool_->empty(shard_layout_.part_bytes, c10::kByte, device, sent_memory());
  for (size_t i = 0; i < params_.size(); ++i) {
    auto& param = params_[i];
    const auto& entry = shard_layout_.entries[i];
    std::vector<int64_t> shape = param.shape;
    shape[0] = entry.rows_on(rank_);
    if (device.is_meta()) {
      param.local = at::empty(shape, at::TensorOptions().dtype(param.dtype).device(device));
    } else {
      param.local = tensor_over(flat_shard_.storage(), entry.offset, shape, param.dtype);
      if (copy_values && shape[0] > 0) {
        param.local.copy_(param.parameter.narrow(0, rank_ * entry.chunk_rows, shape[0]));
      }
    }
    const bool requires_grad = param.parameter.requires_grad();
    param.parameter = from_local(param.local, mesh_, shard_placements(*mesh_),
                                 {.shape = param.shape, .stride = contiguous_strides(param.shape)});
    param.parameter.set_requires_grad(requires_grad);
    for (const auto& slot : param.slots) nn::Module::set_parameter(slot.get(), param.parameter);
  }
}

c10::Allocator* ParamGroup::sent_memory() const {
  return mesh_->group(mesh_->ndim() - 1)->allocator(mesh_->device().type());
}

bool ParamGroup::on_meta() const {
  for (const auto& param : params_) {
    if (param.local.is_meta()) return true;
  }
  return false;
}

void ParamGroup::materialize() {
  if (on_meta()) create_shards(mesh_->device(), false);
}

void ParamGroup::check_slots() {
  for (auto& param : params_) {
    for (const auto& slot : param.slots) {
      const at::Tensor& now = slot.get().parameter;
      if (now.is_same(param.parameter)) continue;
      TESSERA_CHECK(is_dtensor(now) && *device_mesh(now) == *mesh_ && placements(now) == shard_placements(*mesh_) &&
                        now.sizes() == at::IntArrayRef(param.shape) && now.scalar_type() == param.dtype,
                    ErrorKind::kShape,
                    "[fsdp.forward] {}: the parameter was replaced by one that is not sharded alike. Copy values into it "
                    "instead, or replace it before fully_shard.",
                    param.name);
      param.parameter = now;
      param.local = to_local(now.detach());
      replaced_ = true;
    }
    for (const auto& slot : param.slots) slot.get().parameter = param.parameter;
  }
}

void ParamGroup::join(std::shared_ptr<BufferPool> pool, FsdpStats* stats) {
  pool_ = std::move(pool);
  reducer_.set_pool(pool_);
  stats_ = stats;
  if (state_ != State::kSharded) count(1);  // gathered by hand before
}

uint64_t ParamGroup::version() const {
  uint64_t sum = 0;
  for (const auto& param : params_) sum += param.local.is_inference() ? 0 : static_cast<uint64_t>(param.local._version());
  return sum;
}

void ParamGroup::count(int64_t groups) {
  if (stats_ == nullptr) return;
  stats_->unsharded_groups += groups;
  stats_->unsharded_bytes += groups * (aliases_shards() ? 0 : whole_bytes_);
  stats_->peak_unsharded_groups = std::max(stats_->peak_unsharded_groups, stats_->unsharded_groups);
}

void ParamGroup::fill_storage() {
  if (!whole_storage_) {
    whole_storage_ = c10::Storage(c10::Storage::use_byte_size_t{}, 0, c10::DataPtr(nullptr, mesh_->device()), nullptr, false);
  }
  auto* storage = whole_storage_.unsafeGetStorageImpl();
  allow_access(*storage);
  storage->set_data_ptr_noswap(pool_->allocate(static_cast<size_t>(whole_bytes_), mesh_->device()));
  storage->set_nbytes(static_cast<size_t>(whole_bytes_));
  bind_whole();
}

void ParamGroup::bind_whole() {
  for (size_t i = 0; i < params_.size(); ++i) {
    auto& param = params_[i];
    if (!param.whole.defined()) param.whole = tensor_over(whole_storage_, whole_offsets_[i], param.shape, param.gather_dtype);
  }
}

void ParamGroup::free_storage() {
  auto* storage = whole_storage_.unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, mesh_->device()));  // its size stays: views are made of it
  forbid_access(*storage, "[fsdp.backward] " + name_ +
                              ": its parameters are freed. A tensor computed from them reached backward without passing "
                              "an output of the module's forward; return it from forward.");
}

// This rank's part, in the gathered dtype.
void ParamGroup::write_input(const at::Tensor& target) const {
  if (flat_input()) {
    target.copy_(tensor_over(flat_shard_.storage(), 0, {target.numel()}, params_[0].dtype));
    return;
  }
  for (size_t i = 0; i < params_.size(); ++i) {
    const auto& param = params_[i];
    const int64_t offset = target.storage_offset() * static_cast<int64_t>(target.itemsize()) + gather_layout_.entries[i].offset;
    tensor_over(target.storage(), offset, param.local.sizes().vec(), param.gather_dtype).copy_(param.local);
  }
}

void ParamGroup::start_unshard() {
  if (state_ == State::kUnsharded && version() != gathered_version_ && !aliases_shards()) reshard();
  if (state_ != State::kSharded) return;
  c10::NoGradGuard no_grad;
  check_slots();
  gathered_version_ = version();
  if (aliases_shards()) {
    for (auto& param : params_) param.whole = param.local.detach();
    state_ = State::kUnsharded;
    count(1);
    return;
  }
  const c10::ScalarType dtype = wire_dtype();
  const int64_t part = gather_layout_.part_bytes / itemsize(dtype);
  if (gathers_in_place() || compacts_) {
    fill_storage();
    gathered_ = tensor_over(whole_storage_, 0, {ranks_ * part}, dtype);
  } else {
    gathered_ = pool_->empty(ranks_ * part, dtype, mesh_->device());
  }
  state_ = State::kGathering;
  count(1);
  if (ranks_ == 1) return write_input(gathered_);
  if (flat_input() && !casts_) {
    input_ = tensor_over(flat_shard_.storage(), 0, {part}, dtype);
  } else {
    input_ = pool_->empty(part, dtype, mesh_->device(), sent_memory());
    write_input(input_);
  }
  pending_ = comm::all_gather_into(*mesh_->group(mesh_->ndim() - 1), gathered_, input_, name_);
  if (stats_ != nullptr) ++stats_->all_gathers;
}

void ParamGroup::finish_unshard() {
  if (state_ != State::kGathering) return;
  pending_.wait();
  input_.reset();
  unpack();
  gathered_.reset();
  state_ = State::kUnsharded;
}

void ParamGroup::unpack() {
  if (gathers_in_place()) return;
  c10::NoGradGuard no_grad;
  if (!compacts_) {
    fill_storage();
    return unpack_parts(gather_layout_, gathered_, tensor_over(whole_storage_, 0, {whole_bytes_}, c10::kByte), whole_offsets_);
  }
  const int64_t rest = whole_offsets_[1];
  std::vector<int64_t> offsets = whole_offsets_;
  for (auto& offset : offsets) offset -= rest;
  const at::Tensor others = pool_->empty(whole_bytes_ - rest, c10::kByte, mesh_->device());
  unpack_parts(gather_layout_, gathered_, others, offsets, 1);
  compact_first(gather_layout_, gathered_);
  tensor_over(whole_storage_, rest, {whole_bytes_ - rest}, c10::kByte).copy_(others);
}

void ParamGroup::reshard() {
  if (state_ == State::kSharded) return;
  std::exception_ptr failure;
  try {
    pending_.wait();
  } catch (...) {
    failure = std::current_exception();
  }
  if (shows_whole_) show_shards();
  input_.reset();
  gathered_.reset();
  if (aliases_shards()) {
    for (auto& param : params_) param.whole.reset();
  } else if (whole_storage_) {
    free_storage();
  }
  count(-1);
  state_ = State::kSharded;
  if (failure) std::rethrow_exception(failure);
}

std::vector<at::Tensor> ParamGroup::whole_tensors() const {
  std::vector<at::Tensor> out;
  out.reserve(params_.size());
  for (const auto& param : params_) out.push_back(aliases_shards() ? param.whole.detach() : param.whole.variable_data());
  return out;
}

std::vector<size_t> ParamGroup::trainable() const {
  std::vector<size_t> out;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!params_[i].parameter.requires_grad()) continue;
    TESSERA_CHECK(out.empty() || params_[i].dtype == params_[out[0]].dtype, ErrorKind::kShape,
                  "[fsdp.forward] {}: stored as {}, while {} is {}; FSDP expects uniform original parameter dtype among "
                  "the trainable parameters of a group. Shard these modules separately.",
                  params_[i].name, c10::toString(params_[i].dtype), params_[out[0]].name,
                  c10::toString(params_[out[0]].dtype));
    out.push_back(i);
  }
  return out;
}

void ParamGroup::show_whole(const std::vector<at::Tensor>& tensors) {
  for (size_t i = 0; i < params_.size(); ++i) {
    for (const auto& ref : params_[i].slots) *ref.get().slot = tensors[i];
  }
  shows_whole_ = true;
}

void ParamGroup::show_shards() {
  for (const auto& param : params_) {
    for (const auto& ref : param.slots) *ref.get().slot = param.parameter;
  }
  shows_whole_ = false;
}

}  // namespace tessera::parallel
