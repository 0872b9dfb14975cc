#include "tessera/parallel/fsdp/grad_reducer.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_add.h>
#include <c10/core/GradMode.h>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/local_part.h"

namespace tessera {

GradReducer::GradReducer(MeshPtr mesh, std::shared_ptr<BufferPool> pool, std::optional<c10::ScalarType> reduce_dtype,
                         bool to_host)
    : mesh_(std::move(mesh)),
      pool_(std::move(pool)),
      reduce_dtype_(reduce_dtype),
      to_host_(to_host),
      shard_dim_(mesh_->ndim() - 1),
      reduces_(mesh_->group(shard_dim_)),
      flat_(pool_) {}

void GradReducer::join(std::shared_ptr<BufferPool> pool, std::shared_ptr<CommStreams> streams) {
  flat_.set_pool(pool);
  pool_ = std::move(pool);
  reduces_ = streams->second_group(mesh_->group(shard_dim_));
  stages_.set_streams(std::move(streams));
}

void GradReducer::begin(std::vector<ShardedParam>& params, const std::vector<size_t>& trainable,
                        c10::ScalarType dtype) {
  params_ = &params;
  trainable_ = trainable;
  FlatLayout layout(mesh_->size(shard_dim_));
  const auto itemsize = static_cast<int64_t>(c10::elementSize(dtype));
  for (size_t index : trainable) layout.append(params[index].rows(), params[index].row_numel(), itemsize);
  const c10::Device device = mesh_->device();
  flat_.open(std::move(layout), dtype, device, mesh_->group(shard_dim_)->allocator(device.type()));
}

void GradReducer::accumulate(std::vector<ShardedParam>& params, const std::vector<size_t>& trainable,
                             std::vector<at::Tensor>&& gradients, const std::string& subject) {
  c10::NoGradGuard no_grad;
  if (in_flight()) finish(subject);  // the group was used twice in one graph
  std::optional<c10::ScalarType> dtype;
  for (const auto& gradient : gradients) {
    if (!gradient.defined()) continue;
    TESSERA_CHECK(
        !dtype || *dtype == gradient.scalar_type(), ErrorKind::kShape,
        "[fsdp.backward] {}: gradients are {} and {}, wanted one dtype. Set MixedPrecisionPolicy::param_dtype "
        "or shard these modules separately.",
        subject, c10::toString(*dtype), c10::toString(gradient.scalar_type()));
    dtype = gradient.scalar_type();
  }
  if (!dtype) return;
  if (!flat_.is_open()) begin(params, trainable, reduce_dtype_.value_or(*dtype));
  TESSERA_CHECK(trainable == trainable_, ErrorKind::kShape,
                "[fsdp.backward] {}: requires_grad changed while gradients were accumulating without synchronisation. "
                "Run a synchronised backward first.",
                subject);
  bring_to_parameters(params, trainable, gradients, subject);
  for (auto& gradient : gradients) {
    if (gradient.defined()) gradient = local_part(gradient);
  }
  flat_.add_all(std::move(gradients));
}

// Gradients of tensor-parallel parameters, as the parameters lie. All of them start before the first is waited for.
void GradReducer::bring_to_parameters(const std::vector<ShardedParam>& params, const std::vector<size_t>& trainable,
                                      std::vector<at::Tensor>& gradients, const std::string& subject) const {
  for (size_t i = 0; i < gradients.size(); ++i) {
    const auto& param = params[trainable[i]];
    at::Tensor& gradient = gradients[i];
    if (!gradient.defined()) continue;
    const bool wanted = param.tensor_parallel && !param.tensor_parallel->plain;
    TESSERA_CHECK(
        is_dtensor(gradient) == wanted, ErrorKind::kShape,
        "[fsdp.backward] {}: the gradient of {} is {}, wanted {}. Let its module compute on DTensors alone, or "
        "on plain tensors alone.",
        subject, param.name, is_dtensor(gradient) ? "a DTensor" : "a plain tensor",
        wanted ? "a DTensor" : "a plain tensor");
    if (wanted) gradient = redistribute(gradient, param.tensor_parallel->placements, {.async_op = true});
  }
}

bool GradReducer::start(double divide, const std::string& subject) {
  if (!flat_.is_open()) return false;
  const c10::NoGradGuard no_grad;
  stages_.start({.group = reduces_, .replicas = mesh_->ndim() == 2 ? mesh_->group(0) : nullptr, .to_host = to_host_},
                flat_.close(divide), *pool_, subject);
  return true;
}

bool GradReducer::advance(const std::string& subject, bool at_end) {
  if (!in_flight()) return false;
  if (stages_.advance(subject, at_end)) return true;
  set_gradients(stages_.take());
  if (hook_) {
    std::vector<at::Tensor> parameters;
    for (const size_t index : trainable_) parameters.push_back((*params_)[index].parameter);
    hook_(parameters);
  }
  return false;
}

void GradReducer::finish(const std::string& subject) {
  while (advance(subject, /*at_end=*/true)) {
  }
}

void GradReducer::set_gradients(const at::Tensor& sum) {
  const c10::NoGradGuard no_grad;
  const c10::ScalarType dtype = (*params_)[trainable_[0]].dtype;
  std::vector<at::Tensor> earlier, more;
  flat_.unpack(sum, mesh_->local_rank(shard_dim_), dtype, [&](size_t index, const at::Tensor& values) {
    auto& param = (*params_)[trainable_[index]];
    const at::Tensor local = values.view(param.local.sizes());
    at::Tensor& grad = param.parameter.mutable_grad();
    if (grad.defined()) {
      earlier.push_back(to_local(grad));
      more.push_back(local);
    } else {
      grad = param.distributed(local, mesh_);
    }
  });
  if (!earlier.empty()) at::_foreach_add_(earlier, more);
}

void GradReducer::drop() {
  stages_.drop();
  flat_.drop();
}

}  // namespace tessera
