#include "tessera/parallel/detail/grad_bucket.h"

#include <c10/core/GradMode.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/parallel/detail/data_parallel_state.h"

namespace tessera::parallel {
namespace {

at::Tensor local_part(const at::Tensor& tensor) { return is_dtensor(tensor) ? to_local(tensor) : tensor; }

}  // namespace

GradBucket::GradBucket(std::vector<ReplicatedParam*> params, c10::ScalarType dtype, std::shared_ptr<BufferPool> pool,
                       c10::Allocator* memory, std::string name)
    : params_(std::move(params)), dtype_(dtype), pool_(std::move(pool)), memory_(memory), name_(std::move(name)) {
  const c10::NoGradGuard no_grad;
  const auto itemsize = static_cast<int64_t>(c10::elementSize(dtype));
  for (const auto* param : params_) layout_.append(1, local_part(param->parameter).numel(), itemsize);
  flags_offset_ = layout_.append_extra(static_cast<int64_t>(params_.size()), itemsize) / itemsize;
  filled_.assign(params_.size(), false);
  shown_.assign(params_.size(), false);
}

GradBucket::~GradBucket() = default;

void GradBucket::begin() {
  const auto& first = params_[0]->parameter;
  const auto itemsize = static_cast<int64_t>(c10::elementSize(dtype_));
  buffer_ = pool_->empty(layout_.part_bytes / itemsize, dtype_, first.device(), memory_);
}

at::Tensor GradBucket::view_of(const at::Tensor& values, size_t position) const {
  const auto& entry = layout_.entries[position];
  const auto& parameter = params_[position]->parameter;
  const at::Tensor local =
      values.narrow(0, entry.offset / entry.itemsize, entry.numel()).view(local_part(parameter).sizes());
  if (!is_dtensor(parameter)) return local;
  return from_local(local, device_mesh(parameter), placements(parameter),
                    {.shape = parameter.sizes().vec(), .stride = parameter.strides().vec()});
}

// Where grad() showed what has accumulated and shows it no longer (zero_grad), that is forgotten.
void GradBucket::forget_dropped() {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!shown_[i]) continue;
    const at::Tensor& grad = params_[i]->parameter.grad();
    if (grad.defined() && local_part(grad).is_alias_of(buffer_)) continue;
    shown_[i] = filled_[i] = false;
  }
}

void GradBucket::add(size_t position, const at::Tensor& gradient) {
  const c10::NoGradGuard no_grad;
  const auto& param = *params_[position];
  TESSERA_CHECK(gradient.layout() == c10::kStrided, ErrorKind::kShape,
                "[replicate.backward] {}: its gradient is sparse; only dense ones are reduced. Use a dense embedding.",
                param.name);
  if (!buffer_.defined()) begin();
  if (shown_[position]) forget_dropped();
  at::Tensor local = gradient;
  if (is_dtensor(gradient)) {
    const auto& wanted = placements(param.parameter);
    local = to_local(placements(gradient) == wanted ? gradient : redistribute(gradient, wanted));
  }
  pack_gradient(layout_, position, local, buffer_, filled_[position]);
  filled_[position] = true;
}

void GradBucket::show_accumulated() {
  if (!accumulated()) return;
  const c10::NoGradGuard no_grad;
  forget_dropped();
  for (size_t i = 0; i < params_.size(); ++i) {
    auto& parameter = params_[i]->parameter;
    if (!filled_[i] || shown_[i] || parameter.grad().defined() || parameter.scalar_type() != dtype_) continue;
    parameter.mutable_grad() = view_of(buffer_, i);
    shown_[i] = true;
  }
}

void GradBucket::start(comm::Group& group, double divide) {
  const c10::NoGradGuard no_grad;
  if (!buffer_.defined()) begin();
  forget_dropped();
  zero_unfilled(layout_, buffer_, filled_);
  for (size_t i = 0; i < filled_.size(); ++i) {
    if (filled_[i]) buffer_.narrow(0, flags_offset_ + static_cast<int64_t>(i), 1).fill_(1);
  }
  double pre_divisor = 1;
  if (dtype_ == c10::kHalf && divide != 1.0) {
    pre_divisor = fp16_pre_divisor(divide);
    buffer_.narrow(0, 0, flags_offset_).mul_(1.0 / pre_divisor);
  }
  post_scale_ = pre_divisor / divide;
  started_ = true;
  if (group.size() > 1) pending_ = comm::all_reduce(group, buffer_, comm::ReduceOp::kSum, name_);
}

void GradBucket::set_gradient(size_t position, const at::Tensor& values) {
  at::Tensor& grad = params_[position]->parameter.mutable_grad();
  if (!grad.defined()) {
    grad = view_of(values, position);
  } else if (!shown_[position]) {  // reduced in an earlier backward
    local_part(grad).add_(local_part(view_of(values, position)));
  }
}

void GradBucket::finish() {
  if (!started_) return;
  const c10::NoGradGuard no_grad;
  pending_.wait();
  // What this rank has used, all ranks count as used: only the others need the reduced flags.
  at::Tensor flags;
  if (std::find(filled_.begin(), filled_.end(), false) != filled_.end()) {
    flags = buffer_.narrow(0, flags_offset_, static_cast<int64_t>(filled_.size())).to(c10::kCPU, c10::kFloat);
  }
  if (post_scale_ != 1.0) buffer_.narrow(0, 0, flags_offset_).mul_(post_scale_);
  at::Tensor values = buffer_;
  if (const auto dtype = params_[0]->parameter.scalar_type(); dtype != dtype_) {
    values = pool_->empty(buffer_.numel(), dtype, buffer_.device());
    values.copy_(buffer_);
  }
  for (size_t i = 0; i < params_.size(); ++i) {
    if (filled_[i] || flags.const_data_ptr<float>()[i] > 0) set_gradient(i, values);
  }
  buffer_.reset();  // the gradients hold it
  std::fill(filled_.begin(), filled_.end(), false);
  std::fill(shown_.begin(), shown_.end(), false);
  started_ = false;
}

void GradBucket::drop() {
  if (started_) {
    try {
      pending_.wait();
    } catch (const Error&) {  // the error that led here has been reported already
    }
  }
  for (size_t i = 0; i < params_.size(); ++i) {
    if (shown_[i]) params_[i]->parameter.mutable_grad().reset();
  }
  buffer_.reset();
  std::fill(filled_.begin(), filled_.end(), false);
  std::fill(shown_.begin(), shown_.end(), false);
  started_ = false;
}

}  // namespace tessera::parallel
