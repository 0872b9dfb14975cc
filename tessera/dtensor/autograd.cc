#include "tessera/dtensor/detail/autograd.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tessera/base/error.h"
#include "tessera/dtensor/detail/dtensor_impl.h"

namespace tessera::detail {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::Variable;
using torch::autograd::variable_list;

void partial_to_replicated(Placements& placements) {
  for (auto& placement : placements) {
    placement = placement.is_partial() ? Replicate() : placement;
  }
}

at::Tensor redistribute_values(const at::Tensor& tensor, const Placements& to, bool may_alias) {
  const DTensorImpl& impl = *impl_of(tensor);
  at::AutoDispatchBelowADInplaceOrView below;
  const Steps steps = plan_redistribute(tensor.sizes(), *impl.mesh(), impl.placements(), to);
  at::Tensor local = run_steps(impl.local(), *impl.mesh(), steps, may_alias);
  const bool changed = !local.is_same(impl.local());
  const Sizes strides = changed && local.is_contiguous() ? dense_strides(tensor.sizes())
                                                         : Sizes(tensor.strides().begin(), tensor.strides().end());
  return make_dtensor(std::move(local), impl.mesh(), share(to), tensor.sizes(), strides);
}

namespace {

// What a conversion's backward needs beside tensors, in a form that AutogradContext can keep.
struct Saved final : torch::CustomClassHolder {
  MeshPtr mesh;
  Placements placements;
  Sizes sizes;
};

void save(AutogradContext* ctx, MeshPtr mesh, const Placements& placements, c10::IntArrayRef sizes) {
  auto saved = c10::make_intrusive<Saved>();
  saved->mesh = std::move(mesh);
  saved->placements = placements;
  saved->sizes.assign(sizes.begin(), sizes.end());
  ctx->saved_data["saved"] = c10::IValue::make_capsule(c10::intrusive_ptr<torch::CustomClassHolder>(std::move(saved)));
  ctx->set_materialize_grads(false);
}

const Saved& saved(AutogradContext* ctx) {
  return static_cast<const Saved&>(*ctx->saved_data["saved"].toCapsule());
}

// A gradient in the wanted placements; from a shard no partial is made.
at::Tensor gradient_in(const char* verb, const at::Tensor& gradient, Placements wanted) {
  const DTensorImpl& impl = checked_impl(verb, gradient);
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (wanted[i].is_partial() && impl.placements()[i] != wanted[i]) {
      wanted[i] = Replicate();
    }
  }
  return impl.placements() == wanted ? gradient : redistribute_values(gradient, wanted, true);
}

struct FromLocal : Function<FromLocal> {
  static Variable forward(AutogradContext* ctx, const Variable& local, const MeshPtr& mesh, const Placements& placements,
                          c10::IntArrayRef sizes, c10::IntArrayRef strides) {
    Placements back = placements;
    partial_to_replicated(back);
    save(ctx, mesh, back, sizes);
    return make_dtensor(local.detach(), mesh, share(placements), sizes, strides);
  }
  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    if (!gradients[0].defined()) {
      return variable_list(5);
    }
    const at::Tensor gradient = gradient_in("from_local.backward", gradients[0], saved(ctx).placements);
    return {impl_of(gradient)->local(), {}, {}, {}, {}};
  }
};

struct ToLocal : Function<ToLocal> {
  static Variable forward(AutogradContext* ctx, const Variable& tensor, const Placements& grad_placements) {
    const DTensorImpl& impl = *impl_of(tensor);
    save(ctx, impl.mesh(), grad_placements, tensor.sizes());
    return impl.local().detach();
  }
  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    if (!gradients[0].defined()) {
      return variable_list(2);
    }
    const Saved& of = saved(ctx);
    return {make_dtensor(gradients[0].detach(), of.mesh, share(of.placements), of.sizes), {}};
  }
};

struct Redistribute : Function<Redistribute> {
  static Variable forward(AutogradContext* ctx, const Variable& tensor, const Placements& to) {
    const DTensorImpl& impl = *impl_of(tensor);
    Placements back = impl.placements();
    partial_to_replicated(back);
    save(ctx, impl.mesh(), back, tensor.sizes());
    return redistribute_values(tensor, to, /*may_alias=*/false);
  }
  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    if (!gradients[0].defined()) {
      return variable_list(2);
    }
    return {gradient_in("redistribute.backward", gradients[0], saved(ctx).placements), {}};
  }
};

}  // namespace

at::Tensor from_local_with_gradient(const at::Tensor& local, const MeshPtr& mesh, const Placements& placements,
                                    c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  if (!local.requires_grad()) {
    return make_dtensor(local, mesh, share(placements), sizes, strides);
  }
  return FromLocal::apply(local, mesh, placements, sizes, strides);
}

at::Tensor to_local_with_gradient(const at::Tensor& tensor, const Placements& grad_placements) {
  return ToLocal::apply(tensor, grad_placements);
}

at::Tensor redistribute_with_gradient(const at::Tensor& tensor, const Placements& to) {
  return Redistribute::apply(tensor, to);
}

}  // namespace tessera::detail
