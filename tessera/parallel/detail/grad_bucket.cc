#include "tessera/parallel/detail/grad_bucket.h"

#include <c10/core/GradMode.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/local_part.h"

namespace tessera::parallel {

GradBucket::GradBucket(std::vector<ReplicatedParam*> params, c10::ScalarType dtype, std::shared_ptr<BufferPool> pool,
                       c10::Allocator* memory, std::string name)
    : params_(std::move(params)), dtype_(dtype), memory_(memory), name_(std::move(name)), flat_(std::move(pool)) {
  const c10::NoGradGuard no_grad;
  const auto itemsize = static_cast<int64_t>(c10::elementSize(dtype));
  for (const auto* param : params_) layout_.append(1, local_part(param->parameter).numel(), itemsize);
  shown_.assign(params_.size(), false);
}

GradBucket::~GradBucket() = default;
GradBucket::GradBucket(GradBucket&&) noexcept = default;

void GradBucket::begin() { flat_.open(layout_, dtype_, params_[0]->parameter.device(), memory_); }

// Flat values as a gradient of the parameter.
at::Tensor GradBucket::shaped(const at::Tensor& values, size_t position) const {
  const auto& parameter = params_[position]->parameter;
  const at::Tensor local = values.view(local_part(parameter).sizes());
  if (!is_dtensor(parameter)) return local;
  return from_local(local, device_mesh(parameter), placements(parameter),
                    {.shape = parameter.sizes().vec(), .stride = parameter.strides().vec()});
}

// Where grad() showed what has accumulated and shows it no longer (zero_grad), that is forgotten.
void GradBucket::forget_dropped() {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!shown_[i]) continue;
    const at::Tensor& grad = params_[i]->parameter.grad();
    if (grad.defined() && flat_.holds(local_part(grad))) continue;
    shown_[i] = false;
    flat_.forget(i);
  }
}

void GradBucket::add(size_t position, const at::Tensor& gradient) {
  const c10::NoGradGuard no_grad;
  const auto& param = *params_[position];
  TESSERA_CHECK(gradient.layout() == c10::kStrided, ErrorKind::kShape,
                "[replicate.backward] {}: its gradient is sparse; only dense ones are reduced. Use a dense embedding.",
                param.name);
  if (!flat_.is_open()) begin();
  if (shown_[position]) forget_dropped();
  at::Tensor local = gradient;
  if (is_dtensor(gradient)) {
    const auto& wanted = placements(param.parameter);
    local = to_local(placements(gradient) == wanted ? gradient : redistribute(gradient, wanted));
  }
  flat_.add(position, local);
}

void GradBucket::show_accumulated() {
  if (!accumulated()) return;
  const c10::NoGradGuard no_grad;
  forget_dropped();
  for (size_t i = 0; i < params_.size(); ++i) {
    auto& parameter = params_[i]->parameter;
    if (!flat_.has(i) || shown_[i] || parameter.grad().defined() || parameter.scalar_type() != dtype_) continue;
    parameter.mutable_grad() = shaped(flat_.accumulated(i), i);
    shown_[i] = true;
  }
}

void GradBucket::start(comm::Group& group, double divide) {
  const c10::NoGradGuard no_grad;
  if (!flat_.is_open()) begin();
  forget_dropped();
  sent_ = flat_.close(divide);
  if (group.size() > 1) pending_ = comm::all_reduce(group, sent_, comm::ReduceOp::kSum, name_);
}

void GradBucket::set_gradient(size_t position, const at::Tensor& values) {
  at::Tensor& grad = params_[position]->parameter.mutable_grad();
  if (!grad.defined()) {
    grad = shaped(values, position);
  } else if (!shown_[position]) {  // reduced in an earlier backward
    local_part(grad).add_(local_part(shaped(values, position)));
  }
}

void GradBucket::finish() {
  if (!started()) return;
  const c10::NoGradGuard no_grad;
  pending_.wait();
  flat_.unpack(sent_, 0, params_[0]->parameter.scalar_type(),
               [&](size_t position, const at::Tensor& values) { set_gradient(position, values); });
  sent_.reset();  // the gradients hold it
  std::fill(shown_.begin(), shown_.end(), false);
}

void GradBucket::drop() {
  if (started()) {
    try {
      pending_.wait();
    } catch (const Error&) {  // the error that led here has been reported already
    }
  }
  for (size_t i = 0; i < params_.size(); ++i) {
    if (shown_[i]) params_[i]->parameter.mutable_grad().reset();
  }
  flat_.drop();
  sent_.reset();
  std::fill(shown_.begin(), shown_.end(), false);
}

}  // namespace tessera::parallel
