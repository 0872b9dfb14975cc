#include "tessera/parallel/detail/grad_reducer.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/parallel/detail/data_parallel_state.h"

namespace tessera::parallel {
namespace {

std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t d = shape.size(); d-- > 1;) strides[d - 1] = strides[d] * std::max<int64_t>(shape[d], 1);
  return strides;
}

}  // namespace

GradReducer::GradReducer(MeshPtr mesh, std::shared_ptr<BufferPool> pool, std::optional<c10::ScalarType> reduce_dtype)
    : mesh_(std::move(mesh)), pool_(std::move(pool)), reduce_dtype_(reduce_dtype), shard_dim_(mesh_->ndim() - 1) {}

void GradReducer::begin(std::vector<ShardedParam>& params, const std::vector<size_t>& trainable, c10::ScalarType dtype) {
  params_ = &params;
  trainable_ = trainable;
  layout_ = FlatLayout(mesh_->size(shard_dim_));
  const auto itemsize = static_cast<int64_t>(c10::elementSize(dtype));
  for (size_t index : trainable) layout_.append(params[index].rows(), params[index].row_numel(), itemsize);
  flags_offset_ = layout_.append_extra(static_cast<int64_t>(trainable.size()), itemsize) / itemsize;
  filled_.assign(trainable.size(), false);
  const c10::Device device = mesh_->device();
  parts_ = pool_->empty(layout_.ranks * layout_.part_bytes / itemsize, dtype, device,
                        mesh_->group(shard_dim_)->allocator(device.type()));
  stage_ = Stage::kAccumulated;
}

void GradReducer::accumulate(std::vector<ShardedParam>& params, const std::vector<size_t>& trainable,
                             std::vector<at::Tensor>&& gradients, const std::string& subject) {
  c10::NoGradGuard no_grad;
  if (in_flight()) finish(subject);  // the group was used twice in one graph
  std::optional<c10::ScalarType> dtype;
  for (const auto& gradient : gradients) {
    if (!gradient.defined()) continue;
    TESSERA_CHECK(!dtype || *dtype == gradient.scalar_type(), ErrorKind::kShape,
                  "[fsdp.backward] {}: gradients are {} and {}, wanted one dtype. Set MixedPrecisionPolicy::param_dtype "
                  "or shard these modules separately.",
                  subject, c10::toString(*dtype), c10::toString(gradient.scalar_type()));
    dtype = gradient.scalar_type();
  }
  if (!dtype) return;
  if (stage_ == Stage::kIdle) begin(params, trainable, reduce_dtype_.value_or(*dtype));
  TESSERA_CHECK(trainable == trainable_, ErrorKind::kShape,
                "[fsdp.backward] {}: requires_grad changed while gradients were accumulating without synchronisation. "
                "Run a synchronised backward first.",
                subject);
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined()) continue;
    pack_gradient(layout_, i, gradients[i], parts_, filled_[i]);
    filled_[i] = true;
    gradients[i].reset();
  }
}

bool GradReducer::start(double divide, const std::string& subject) {
  if (stage_ != Stage::kAccumulated) return false;
  c10::NoGradGuard no_grad;
  zero_unfilled(layout_, parts_, filled_);
  const int64_t part = parts_.numel() / layout_.ranks;
  for (size_t i = 0; i < filled_.size(); ++i) {
    if (!filled_[i]) continue;
    parts_.as_strided({layout_.ranks}, {part}, flags_offset_ + static_cast<int64_t>(i)).fill_(1);
  }
  double pre_divisor = 1;
  if (parts_.scalar_type() == c10::kHalf && divide != 1.0) {
    pre_divisor = fp16_pre_divisor(divide);
    parts_.as_strided({layout_.ranks, flags_offset_}, {part, 1}, 0).mul_(1.0 / pre_divisor);
  }
  post_scale_ = pre_divisor / divide;
  if (layout_.ranks == 1) {
    output_ = parts_;
  } else {
    const c10::Device device = parts_.device();
    c10::Allocator* const sent = mesh_->ndim() == 2 ? mesh_->group(0)->allocator(device.type()) : nullptr;
    output_ = pool_->empty(part, parts_.scalar_type(), device, sent);
    pending_ = comm::reduce_scatter_into(*mesh_->group(shard_dim_), output_, parts_, comm::ReduceOp::kSum, subject);
  }
  stage_ = Stage::kReduceScatter;
  return true;
}

bool GradReducer::advance(const std::string& subject) {
  if (!in_flight()) return false;
  pending_.wait();
  parts_.reset();
  if (stage_ == Stage::kReduceScatter && mesh_->ndim() == 2 && mesh_->size(0) > 1) {
    pending_ = comm::all_reduce(*mesh_->group(0), output_, comm::ReduceOp::kSum, subject);
    stage_ = Stage::kAllReduce;
    return true;
  }
  set_gradients();
  output_.reset();
  stage_ = Stage::kIdle;
  return false;
}

void GradReducer::finish(const std::string& subject) {
  while (advance(subject)) {
  }
}

void GradReducer::set_gradients() {
  c10::NoGradGuard no_grad;
  // What this rank has used, all ranks count as used: only the others need the reduced flags.
  at::Tensor flags;
  for (size_t i = 0; i < filled_.size() && !flags.defined(); ++i) {
    if (!filled_[i]) flags = output_.narrow(0, flags_offset_, static_cast<int64_t>(filled_.size())).to(c10::kCPU, c10::kFloat);
  }
  if (post_scale_ != 1.0) output_.mul_(post_scale_);
  Placements placements;
  if (mesh_->ndim() == 2) placements.push_back(Replicate());
  placements.push_back(Shard(0));
  const c10::ScalarType dtype = (*params_)[trainable_[0]].dtype;
  at::Tensor values = output_;
  if (values.scalar_type() != dtype) {
    values = pool_->empty(output_.numel(), dtype, output_.device());
    values.copy_(output_);
  }
  const int64_t rank = mesh_->local_rank(shard_dim_);
  for (size_t i = 0; i < trainable_.size(); ++i) {
    if (!filled_[i] && !(flags.const_data_ptr<float>()[i] > 0)) continue;
    auto& param = (*params_)[trainable_[i]];
    const auto& entry = layout_.entries[i];
    std::vector<int64_t> shape = param.shape;
    shape[0] = entry.rows_on(rank);
    at::Tensor local = values.narrow(0, entry.offset / entry.itemsize, shape[0] * entry.row_numel).view(shape);
    at::Tensor& grad = param.parameter.mutable_grad();
    if (grad.defined()) {
      to_local(grad).add_(local);
    } else {
      grad = from_local(local, mesh_, placements, {.shape = param.shape, .stride = contiguous_strides(param.shape)});
    }
  }
}

void GradReducer::drop() {
  if (in_flight()) {
    try {
      pending_.wait();
    } catch (const Error&) {  // the error that led here has been reported already
    }
  }
  parts_.reset();
  output_.reset();
  stage_ = Stage::kIdle;
}

}  // namespace tessera::parallel
