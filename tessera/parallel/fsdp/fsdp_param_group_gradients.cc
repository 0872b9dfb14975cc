// The gradients of a parameter group. Without synchronisation they accumulate unsharded over micro-batches. With it
// they are reduce-scattered (and all-reduced over replicas) and added to grad() of the sharded parameters.
//
// On an accelerator the reduction (ReductionStages) overlaps computation. It uses a second process group with the ranks
// of the all-gather, so that it does not wait for all-gathers. The compute stream waits for each reduce-scatter before
// the next one starts, so at most two of them have buffers at a time. If no rank has a gradient for a parameter, its
// grad() does not change.
#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_add.h>
#include <c10/core/GradMode.h>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/local_tensor.h"
#include "tessera/parallel/fsdp/fsdp_param_group.h"

namespace tessera {

void FsdpParamGroup::accumulate(const std::vector<size_t>& trainable, std::vector<at::Tensor>&& gradients) {
  const c10::NoGradGuard no_grad;
  while (advance_reduction(/*at_end=*/true)) {  // if the group ran twice in forward: ends its earlier reduction
  }
  std::optional<c10::ScalarType> dtype;
  for (const auto& gradient : gradients) {
    if (!gradient.defined()) continue;
    TESSERA_CHECK(
        !dtype || *dtype == gradient.scalar_type(), ErrorKind::kShape,
        "[fsdp.backward] {}: gradients are {} and {}, wanted one dtype. Set MixedPrecisionPolicy::param_dtype "
        "or shard these modules separately.",
        name(), c10::toString(*dtype), c10::toString(gradient.scalar_type()));
    dtype = gradient.scalar_type();
  }
  if (!dtype) return;
  if (!flat_gradients_.is_open()) open_gradients(trainable, reduce_dtype_.value_or(*dtype));
  TESSERA_CHECK(trainable == gradient_params_, ErrorKind::kShape,
                "[fsdp.backward] {}: requires_grad changed while gradients were accumulating without synchronisation. "
                "Run a synchronised backward first.",
                name());
  redistribute_gradients(gradients);
  for (auto& gradient : gradients) {
    if (gradient.defined()) gradient = local_tensor_of(gradient);
  }
  flat_gradients_.add_all(std::move(gradients));
}

void FsdpParamGroup::open_gradients(const std::vector<size_t>& trainable, c10::ScalarType dtype) {
  gradient_params_ = trainable;
  FlatLayout layout(shards_.ranks());
  const auto itemsize = static_cast<int64_t>(c10::elementSize(dtype));
  for (size_t index : trainable) layout.append(params()[index].rows(), params()[index].row_numel(), itemsize);
  flat_gradients_.open(std::move(layout), dtype, device(), shards_.group().allocator(device().type()));
}

// Redistributes the gradients of tensor-parallel parameters to the parameters' placements. All redistributions start
// before the first is waited for.
void FsdpParamGroup::redistribute_gradients(std::vector<at::Tensor>& gradients) const {
  for (size_t i = 0; i < gradients.size(); ++i) {
    const auto& param = shards_.params()[gradient_params_[i]];
    at::Tensor& gradient = gradients[i];
    if (!gradient.defined()) continue;
    const bool expects_dtensor = param.tensor_parallel && !param.tensor_parallel->plain;
    TESSERA_CHECK(
        is_dtensor(gradient) == expects_dtensor, ErrorKind::kShape,
        "[fsdp.backward] {}: the gradient of {} is {}, wanted {}. Let its module compute on DTensors alone, or "
        "on plain tensors alone.",
        name(), param.name, is_dtensor(gradient) ? "a DTensor" : "a plain tensor",
        expects_dtensor ? "a DTensor" : "a plain tensor");
    if (expects_dtensor) gradient = redistribute(gradient, param.tensor_parallel->placements, {.async_op = true});
  }
}

bool FsdpParamGroup::start_reduction() {
  if (!flat_gradients_.is_open()) return false;
  const c10::NoGradGuard no_grad;
  const auto replicas = mesh()->ndim() == 2 ? mesh()->group(0) : nullptr;
  reduction_.start({.group = reduce_group_, .replicas = replicas, .to_host = shards_.on_host()},
                   flat_gradients_.close(divide), *pool_, name());
  return true;
}

bool FsdpParamGroup::advance_reduction(bool at_end) {
  if (!reduction_.in_flight()) return false;
  if (reduction_.advance(name(), at_end)) return true;
  set_gradients(reduction_.take_result());
  if (gradients_hook_) {
    std::vector<at::Tensor> parameters;
    for (const size_t index : gradient_params_) parameters.push_back(params()[index].parameter);
    gradients_hook_(parameters);
  }
  return false;
}

void FsdpParamGroup::set_gradients(const at::Tensor& sum) {
  const c10::NoGradGuard no_grad;
  const c10::ScalarType dtype = params()[gradient_params_[0]].dtype;
  const int64_t rank = mesh()->local_rank(mesh()->ndim() - 1);
  // If a parameter's grad() is undefined, it is set to a view of the reduced buffer `sum`, without a copy. The reduced
  // gradients of all other parameters are added to their grad() by one foreach operation.
  std::vector<at::Tensor> earlier, more;
  flat_gradients_.unpack(sum, rank, dtype, [&](size_t index, const at::Tensor& values) {
    auto& param = params()[gradient_params_[index]];
    const at::Tensor local = values.view(param.local.sizes());
    at::Tensor& grad = param.parameter.mutable_grad();
    if (grad.defined()) {
      earlier.push_back(to_local(grad));
      more.push_back(local);
    } else {
      grad = param.as_dtensor(local, mesh());
    }
  });
  if (!earlier.empty()) at::_foreach_add_(earlier, more);
}

void FsdpParamGroup::drop_gradients() {
  reduction_.drop();
  flat_gradients_.drop();
}

}  // namespace tessera
