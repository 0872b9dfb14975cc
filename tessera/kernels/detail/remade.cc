#include "tessera/kernels/detail/remade.h"

#include <c10/core/GradMode.h>

namespace tessera::detail {

Remade::Source Remade::source(torch::autograd::AutogradContext& context, std::function<at::Tensor()> make) {
  auto& kept = context.saved_data["remade"];
  if (kept.isNone()) kept = at::IValue::make_capsule(c10::make_intrusive<Result>());
  return {std::move(make), c10::static_intrusive_pointer_cast<Result>(kept.toCapsule())};
}

at::Tensor Remade::get() {
  auto& result = *source_.result;
  const bool is_last = --result.users <= 0;
  if (c10::GradMode::is_enabled()) return source_.make();  // part of a graph of its own
  if (!result.value.defined()) result.value = source_.make();
  return is_last ? std::exchange(result.value, {}) : result.value;
}

c10::intrusive_ptr<Remade> remade(const at::Tensor& result) {
  if (!result.device().is_cpu() || result.output_nr() != 0) return {};
  const auto& node = result.grad_fn();
  if (!node) return {};
  for (const auto source_of : {source_of_gated, source_of_rms_norm}) {
    if (auto source = source_of(node.get()); source.make) return c10::make_intrusive<Remade>(node, std::move(source));
  }
  return {};
}

}  // namespace tessera::detail
