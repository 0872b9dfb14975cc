#include "tessera/parallel/fsdp/shards.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/local_tensor.h"
#include "tessera/mesh/host_memory.h"
#include "tessera/parallel/fsdp/unsharded_storage.h"

namespace tessera {

FlatShards::FlatShards(std::vector<ShardedParam> params, MeshPtr mesh, bool on_host)
    : params_(std::move(params)),
      mesh_(std::move(mesh)),
      on_host_(on_host),
      shard_dim_(mesh_->ndim() - 1),
      layout_(mesh_->size(shard_dim_)) {
  const bool meta = local_tensor_of(params_[0].parameter).is_meta();
  for (const auto& param : params_) {
    TESSERA_CHECK(local_tensor_of(param.parameter).is_meta() == meta, ErrorKind::kShape,
                  "[fsdp.shard] {} and {}: one is on the meta device, the other is not; wanted all or none of a group.",
                  params_[0].name, param.name);
    uniform_ = uniform_ && param.dtype == params_[0].dtype && param.gather_dtype == params_[0].gather_dtype;
    layout_.append(param.rows(), param.row_numel(), static_cast<int64_t>(c10::elementSize(param.dtype)));
  }
  create(meta ? c10::Device(c10::kMeta) : mesh_->device(), !meta);
}

// Replaces the parameters by DTensors over a new flat buffer. With `copy_values`, copies this rank's rows into the
// buffer.
void FlatShards::create(c10::Device device, bool copy_values) {
  const c10::NoGradGuard no_grad;
  if (!device.is_meta()) {
    buffer_ = on_host_ ? at::Tensor(pinned_empty(layout_.part_bytes, c10::kByte, device))
                       : BufferPool().empty(layout_.part_bytes, c10::kByte, device, comm_allocator());
  }
  const int64_t rank = mesh_->local_rank(shard_dim_);
  for (size_t i = 0; i < params_.size(); ++i) {
    auto& param = params_[i];
    const auto& entry = layout_.entries[i];
    std::vector<int64_t> shape = param.shape;
    shape[0] = entry.rows_on(rank);
    if (device.is_meta()) {
      param.local = at::empty(shape, at::TensorOptions().dtype(param.dtype).device(device));
    } else {
      param.local = tensor_over(buffer_.storage(), entry.offset, shape, param.dtype);
      if (copy_values && shape[0] > 0) {
        param.local.copy_(local_tensor_of(param.parameter).narrow(0, rank * entry.chunk_rows, shape[0]));
      }
    }
    const bool requires_grad = param.parameter.requires_grad();
    param.parameter = param.as_dtensor(param.local, mesh_);
    param.parameter.set_requires_grad(requires_grad);
    for (const auto& slot : param.slots) nn::Module::set_parameter(slot.get(), param.parameter);
  }
}

c10::Allocator* FlatShards::comm_allocator() const { return group().allocator(mesh_->device().type()); }

// The reduced gradients of a group share one buffer and one dtype, so all trainable parameters must have the same
// stored dtype.
std::vector<size_t> FlatShards::trainable() const {
  std::vector<size_t> out;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!params_[i].parameter.requires_grad()) continue;
    TESSERA_CHECK(
        out.empty() || params_[i].dtype == params_[out[0]].dtype, ErrorKind::kShape,
        "[fsdp.forward] {}: stored as {}, while {} is {}; FSDP expects uniform original parameter dtype among "
        "the trainable parameters of a group. Shard these modules separately.",
        params_[i].name, c10::toString(params_[i].dtype), params_[out[0]].name, c10::toString(params_[out[0]].dtype));
    out.push_back(i);
  }
  return out;
}

void FlatShards::allocate_meta_shards() {
  const auto on_meta = [](const ShardedParam& param) { return param.local.is_meta(); };
  if (std::ranges::any_of(params_, on_meta)) create(mesh_->device(), false);
}

// A tied parameter has several slots. If loading replaced the parameter in only one of them, the replacement is set in
// all of them.
void FlatShards::adopt_replaced() {
  for (auto& param : params_) {
    for (const auto& slot : param.slots) {
      const at::Tensor& now = slot.get().parameter;
      if (now.is_same(param.parameter)) continue;
      TESSERA_CHECK(
          is_dtensor(now) && *device_mesh(now) == *param.mesh_of(mesh_) &&
              placements(now) == param.placements_on(*mesh_) && now.sizes() == at::IntArrayRef(param.full_shape()) &&
              now.scalar_type() == param.dtype,
          ErrorKind::kShape,
          "[fsdp.forward] {}: the parameter was replaced by a tensor with another mesh, placements, shape or dtype. "
          "Copy values into the parameter instead, or replace it before fully_shard.",
          param.name);
      param.parameter = now;
      param.local = to_local(now.detach());
      flat_ = false;
    }
    for (const auto& slot : param.slots) slot.get().parameter = param.parameter;
  }
}

bool FlatShards::replaced() const {
  for (const auto& param : params_) {
    for (const auto& slot : param.slots) {
      if (!slot.get().parameter.is_same(param.parameter)) return true;
    }
  }
  return false;
}

// Returns the sum of the version counters of all shards. A tensor's counter only grows, so the sum changes if any shard
// is written. A tensor that replaces a shard may have a smaller counter; replaced() detects replacements.
uint64_t FlatShards::version() const {
  uint64_t sum = 0;
  const auto add = [&](const at::Tensor& tensor) {
    sum += tensor.is_inference() ? 0 : static_cast<uint64_t>(tensor._version());
  };
  for (const auto& param : params_) {
    add(param.local);
    add(param.parameter);  // operations on the DTensor increment its own version
  }
  return sum;
}

void FlatShards::use_sharded_params() const {
  for (const auto& param : params_) {
    for (const auto& slot : param.slots) *slot.get().slot = param.parameter;
  }
}

// The flat buffer already has the layout of the all-gather's input. The shards are copied to another buffer only if
// they must be cast or are offloaded, if the parameters have several dtypes, or if a parameter was replaced by another
// tensor, which is not in the flat buffer.
at::Tensor FlatShards::all_gather_input(const FlatLayout& layout, BufferPool& pool) const {
  const c10::ScalarType dtype = wire_dtype();
  const int64_t numel = layout.part_bytes / static_cast<int64_t>(c10::elementSize(dtype));
  const auto casts = [](const ShardedParam& param) { return param.gather_dtype != param.dtype; };
  if (!on_host_ && flat_ && uniform_ && !casts(params_[0])) return tensor_over(buffer_.storage(), 0, {numel}, dtype);
  at::Tensor part = pool.empty(numel, dtype, mesh_->device(), comm_allocator());
  copy_to(part, layout);
  return part;
}

void FlatShards::copy_to(const at::Tensor& part, const FlatLayout& layout) const {
  const c10::NoGradGuard no_grad;
  if (on_host_) return copy_from_host(part, layout);
  if (flat_ && uniform_) {  // one cast for all: offsets in elements do not depend on the dtype
    part.copy_(tensor_over(buffer_.storage(), 0, {part.numel()}, params_[0].dtype));
    return;
  }
  const int64_t begin = part.storage_offset() * static_cast<int64_t>(part.itemsize());
  for (size_t i = 0; i < params_.size(); ++i) {
    const auto& param = params_[i];
    tensor_over(part.storage(), begin + layout.entries[i].offset, param.local.sizes(), param.gather_dtype)
        .copy_(param.local);
  }
}

// Copies the shards from host memory in their stored dtype. If they are in the pinned flat buffer, this is one
// asynchronous copy, for which the host does not wait. Casts run on the device afterwards.
void FlatShards::copy_from_host(const at::Tensor& part, const FlatLayout& layout) const {
  const int64_t begin = part.storage_offset() * static_cast<int64_t>(part.itemsize());
  const bool casts = !uniform_ || params_[0].gather_dtype != params_[0].dtype;
  const at::Tensor stored =
      casts ? at::empty({layout_.part_bytes}, at::TensorOptions().dtype(c10::kByte).device(mesh_->device()))
            : tensor_over(part.storage(), begin, {layout_.part_bytes}, c10::kByte);
  const int64_t first = stored.storage_offset();
  const auto place = [&](size_t i) {
    return tensor_over(stored.storage(), first + layout_.entries[i].offset, params_[i].local.sizes(), params_[i].dtype);
  };
  if (flat_) {
    stored.copy_(buffer_, /*non_blocking=*/true);
  } else {
    for (size_t i = 0; i < params_.size(); ++i) place(i).copy_(params_[i].local);
  }
  if (!casts) return;
  if (uniform_) {
    part.copy_(tensor_over(stored.storage(), first, {part.numel()}, params_[0].dtype));
    return;
  }
  for (size_t i = 0; i < params_.size(); ++i) {
    tensor_over(part.storage(), begin + layout.entries[i].offset, params_[i].local.sizes(), params_[i].gather_dtype)
        .copy_(place(i));
  }
}

}  // namespace tessera
