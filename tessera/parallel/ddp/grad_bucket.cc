#include "tessera/parallel/ddp/grad_bucket.h"

#include <c10/core/GradMode.h>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/local_tensor.h"

namespace tessera {

GradBucket::GradBucket(std::vector<ReplicatedParam*> params, c10::ScalarType dtype, std::shared_ptr<BufferPool> pool,
                       std::shared_ptr<CommStreams> streams, c10::Allocator* memory, std::string name)
    : params_(std::move(params)),
      dtype_(dtype),
      memory_(memory),
      name_(std::move(name)),
      flat_(pool),
      pool_(std::move(pool)),
      streams_(std::move(streams)) {
  stages_.set_streams(streams_);
  const c10::NoGradGuard no_grad;
  const auto itemsize = static_cast<int64_t>(c10::elementSize(dtype));
  // The buffer is all-reduced as a whole and not split among the ranks. So its FlatLayout has a single part, in which
  // each parameter is stored as one row of all its elements.
  for (const auto* param : params_) layout_.append(1, local_tensor_of(param->parameter).numel(), itemsize);
  exposed_.assign(params_.size(), false);
}

GradBucket::~GradBucket() = default;
GradBucket::GradBucket(GradBucket&&) noexcept = default;

void GradBucket::open_buffer() { flat_.open(layout_, dtype_, params_[0]->parameter.device(), memory_); }

// Returns a view of the 1-d `values` with the shape of the parameter. If the parameter is a DTensor, the view is a
// DTensor with the parameter's placements.
at::Tensor GradBucket::view_as_parameter(const at::Tensor& values, size_t position) const {
  const auto& parameter = params_[position]->parameter;
  at::Tensor local = values.view(local_tensor_of(parameter).sizes());
  if (!is_dtensor(parameter)) return local;
  return from_local(local, device_mesh(parameter), placements(parameter),
                    {.shape = parameter.sizes().vec(), .stride = parameter.strides().vec()});
}

// Discards the accumulated gradient of each parameter whose grad() was a view of the bucket and is no longer one, for
// example after zero_grad().
void GradBucket::discard_zeroed_gradients() {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!exposed_[i]) continue;
    const at::Tensor& grad = params_[i]->parameter.grad();
    if (grad.defined() && flat_.holds(local_tensor_of(grad))) continue;
    exposed_[i] = false;
    flat_.forget(i);
  }
}

at::Tensor GradBucket::prepare(size_t position, const at::Tensor& gradient) {
  const c10::NoGradGuard no_grad;
  const auto& param = *params_[position];
  TESSERA_CHECK(gradient.layout() == c10::kStrided, ErrorKind::kShape,
                "[replicate.backward] {}: its gradient is sparse; only dense ones are reduced. Use a dense embedding.",
                param.name);
  if (!flat_.is_open()) open_buffer();
  if (exposed_[position]) discard_zeroed_gradients();
  if (!is_dtensor(gradient)) return gradient;
  const auto& target = placements(param.parameter);
  return to_local(placements(gradient) == target ? gradient : redistribute(gradient, target));
}

void GradBucket::add(size_t position, const at::Tensor& local) { flat_.add(position, local); }

void GradBucket::expose_accumulated() {
  if (!accumulated()) return;
  const c10::NoGradGuard no_grad;
  discard_zeroed_gradients();
  for (size_t i = 0; i < params_.size(); ++i) {
    auto& parameter = params_[i]->parameter;
    if (!flat_.has(i) || exposed_[i] || parameter.grad().defined() || parameter.scalar_type() != dtype_) continue;
    parameter.mutable_grad() = view_as_parameter(flat_.accumulated(i), i);
    exposed_[i] = true;
  }
}

void GradBucket::start(const std::shared_ptr<comm::Group>& group, double divide) {
  const c10::NoGradGuard no_grad;
  if (!flat_.is_open()) open_buffer();
  discard_zeroed_gradients();
  at::Tensor sent;
  // The bucket's buffer may have just been allocated on the compute stream, so the stream `reduce`, which packs
  // gradients into it, waits for the compute stream.
  streams_->reduce.wait_current_stream();
  {
    const auto beside = streams_->reduce.make_current();
    sent = flat_.close(divide);
  }
  started_ = true;
  // The all-reduce is the replica stage of ReductionStages, without a reduce-scatter stage before it, so it runs on the
  // stream `replicas`.
  stages_.start({.replicas = group}, std::move(sent), *pool_, name_);
  stages_.advance(name_, /*at_end=*/false);
}

void GradBucket::write_values() {
  if (!started() || sum_.defined()) return;
  const c10::NoGradGuard no_grad;
  while (stages_.advance(name_, /*at_end=*/true)) {
  }
  sum_ = stages_.take_result(streams_->replicas);
  values_ = flat_.allocate_values(sum_, params_[0]->parameter.scalar_type());
  // Unless values_ is sum_, it was allocated just now on the compute stream, where earlier work may still use its
  // memory. The stream `replicas`, which writes values_, therefore waits for the compute stream.
  if (!values_.is_same(sum_)) streams_->replicas.wait_current_stream();
  const auto beside = streams_->replicas.make_current();
  flat_.write_values(sum_, values_);
  values_written_ = streams_->replicas.record_event();
}

void GradBucket::set_gradient(size_t position, const at::Tensor& values) {
  // A grad() that is a view of this bucket holds the reduced values already. Any other grad() was reduced by an earlier
  // backward, and the new values are added to it.
  at::Tensor& grad = params_[position]->parameter.mutable_grad();
  if (!grad.defined()) {
    grad = view_as_parameter(values, position);
  } else if (!exposed_[position]) {
    local_tensor_of(grad).add_(local_tensor_of(view_as_parameter(values, position)));
  }
}

void GradBucket::finish() {
  if (!started()) return;
  const c10::NoGradGuard no_grad;
  write_values();
  values_written_.block_current_stream();
  flat_.deliver_values(sum_, values_, 0,
                       [&](size_t position, const at::Tensor& values) { set_gradient(position, values); });
  sum_.reset(), values_.reset();  // the gradients keep the memory alive
  started_ = false;
  exposed_.assign(exposed_.size(), false);
}

void GradBucket::drop() {
  stages_.drop();
  for (size_t i = 0; i < params_.size(); ++i) {
    if (exposed_[i]) params_[i]->parameter.mutable_grad().reset();
  }
  flat_.drop();
  sum_.reset(), values_.reset();
  started_ = false;
  exposed_.assign(exposed_.size(), false);
}

}  // namespace tessera
