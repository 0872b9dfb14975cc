#include "tessera/kernels/autograd/recomputed_activation.h"

#include <c10/core/GradMode.h>

#include "tessera/dtensor/tensor/local_tensor.h"

namespace tessera::kernels {

RecomputedActivation::RecomputeSource RecomputedActivation::source(torch::autograd::AutogradContext& context,
                                                                   std::function<at::Tensor()> make) {
  auto& kept = context.saved_data["recomputed"];
  if (kept.isNone()) kept = at::IValue::make_capsule(c10::make_intrusive<SharedResult>());
  return {std::move(make), c10::static_intrusive_pointer_cast<SharedResult>(kept.toCapsule())};
}

at::Tensor RecomputedActivation::recompute() {
  auto& result = *source_.result;
  const bool is_last = --result.users <= 0;
  if (c10::GradMode::is_enabled()) return source_.make();  // make() becomes part of the double backward's graph
  if (!result.value.defined()) result.value = source_.make();
  return is_last ? std::exchange(result.value, {}) : result.value;
}

namespace {

// Returns whether `parameter` still has its values while the product with `weight` runs its backward. A storage that
// has no allocator or cannot be resized is the unsharded memory of a fully_shard group, which is freed and refilled. If
// `parameter` is in such a storage, `weight` must be in the same storage: the backward of the product reads `weight`,
// so the storage is filled at that time.
bool is_there_with(const at::Tensor& parameter, const at::Tensor& weight) {
  const auto& own = local_tensor_of(parameter).storage();
  const auto* const others = local_tensor_of(weight).storage().unsafeGetStorageImpl();
  return own.unsafeGetStorageImpl() == others || (own.allocator() != nullptr && own.resizable());
}

}  // namespace

c10::intrusive_ptr<RecomputedActivation> recomputed_activation(const at::Tensor& result, const at::Tensor& weight) {
  if (!result.device().is_cpu() || result.output_nr() != 0) return {};
  const auto& node = result.grad_fn();
  if (!node) return {};
  for (const auto source_of : {recompute_source_of_gated, recompute_source_of_rms_norm}) {
    auto source = source_of(node.get());
    if (!source.make) continue;
    if (source.parameter.defined() && !is_there_with(source.parameter, weight)) return {};
    source.parameter.reset();
    return c10::make_intrusive<RecomputedActivation>(node, std::move(source));
  }
  return {};
}

}  // namespace tessera::kernels
