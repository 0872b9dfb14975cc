#include "tessera/dtensor/redistribute/autograd.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <exception>
#include <mutex>

#include "tessera/dtensor/redistribute/equal_on_ranks.h"
#include "tessera/dtensor/redistribute/redistribution_scope.h"
#include "tessera/dtensor/tensor/dtensor_impl.h"
#include "tessera/dtensor/tensor/saved_value.h"

namespace tessera {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::Variable;
using torch::autograd::variable_list;

Placements partial_to_replicated(Placements placements) {
  for (auto& placement : placements) placement = placement.is_partial() ? Replicate() : placement;
  return placements;
}

namespace {

// Returns the local tensor with its dims in the memory order that the global strides have. Empty strides mean
// contiguous; the local tensor is then returned unchanged.
at::Tensor in_memory_order(at::Tensor local, const Sizes& strides) {
  if (strides.empty()) return local;
  const auto order = strides_in_order(local.sizes(), strides);
  return with_strides(std::move(local), order);
}

// The local tensor of a redistribution with async_op. The first call of part() waits for the collective. An error of
// the collective is kept and thrown by each later call, too.
class PendingRedistribute final : public LazyLocalTensor {
 public:
  // Keeps a reference to the mesh, because the mesh owns the process group of the running collective. `strides` is the
  // argument of in_memory_order().
  PendingRedistribute(MeshPtr mesh, PendingStep started, Sizes strides)
      : mesh_(std::move(mesh)), started_(std::move(started)), strides_(std::move(strides)) {}
  const at::Tensor& part() override {
    std::lock_guard lock(mutex_);
    if (failure_) std::rethrow_exception(failure_);
    if (!local_.defined()) {
      try {
        local_ = in_memory_order(started_.wait_and_finish(), strides_);
      } catch (...) {
        failure_ = std::current_exception();  // the local tensor will never exist
        throw;
      }
    }
    return local_;
  }
  bool is_gathered_view() const override { return false; }

 private:
  std::mutex mutex_;
  MeshPtr mesh_;
  PendingStep started_;
  Sizes strides_;
  at::Tensor local_;
  std::exception_ptr failure_;
};

}  // namespace

at::Tensor redistribute_values(const at::Tensor& tensor, const Placements& to, bool may_alias,
                               const RedistributeValuesOptions& options) {
  const DTensorImpl& impl = *impl_of(tensor);
  at::AutoDispatchBelowADInplaceOrView below;
  const RedistributeSteps steps = plan_redistribute(tensor.sizes(), *impl.mesh(), impl.placements(), to);
  const RedistributionScope scope({options.cause, "self", -1, tensor, to, steps, options.is_explicit});
  Sizes strides;  // strides that clone() would give
  if (!tensor.is_contiguous()) {
    const auto dense = at::infer_dense_strides(tensor.sizes(), tensor.strides());
    strides.assign(dense.begin(), dense.end());
  }
  PendingStep started = start_redistribute(impl.local(), *impl.mesh(), steps, may_alias);
  if (started.pending && options.async_op) {
    at::Tensor example = at::empty(Sizes(tensor.dim(), 0), impl.local().options());
    at::Tensor result =
        make_dtensor(std::move(example), impl.mesh(), make_shared_placements(to), tensor.sizes(), strides);
    impl_of(result)->set_source(
        std::make_shared<PendingRedistribute>(impl.mesh(), std::move(started), std::move(strides)));
    return result;
  }
  return make_dtensor(in_memory_order(started.wait_and_finish(), strides), impl.mesh(), make_shared_placements(to),
                      tensor.sizes(), strides);
}

namespace {

// What the backward of from_local, to_local or redistribute needs besides tensors. `placements` are those of the
// gradient.
struct ConversionState {
  MeshPtr mesh;
  Placements placements;
  Sizes sizes;
};

void save_conversion(AutogradContext* ctx, MeshPtr mesh, const Placements& placements, c10::IntArrayRef sizes) {
  ctx->saved_data["conversion"] =
      make_saved_value(ConversionState{std::move(mesh), placements, Sizes(sizes.begin(), sizes.end())});
  ctx->set_materialize_grads(false);
}

const ConversionState& conversion_state(AutogradContext* ctx) {
  return saved_value<ConversionState>(ctx->saved_data["conversion"]);
}

}  // namespace

at::Tensor redistribute_gradient(const char* verb, const at::Tensor& gradient, const Placements& target,
                                 const RedistributeOptions& options) {
  if (checked_impl(verb, gradient).placements() == target) return gradient;
  if (at::GradMode::is_enabled() && gradient.requires_grad()) {
    return redistribute_with_gradient(gradient, target, options);
  }
  return redistribute_values(gradient, target, true, {options.async_op, /*is_explicit=*/true, verb});
}

namespace {

// Converts a plain gradient to a replicated DTensor if its values are equal on all ranks. Plain gradients come from the
// autograd engine and from derivative formulas. Other gradients are returned unchanged. COLLECTIVE over the mesh for a
// plain gradient.
at::Tensor replicate_if_equal(const char* verb, const at::Tensor& gradient, const MeshPtr& mesh) {
  const bool whole = !is_dtensor(gradient) && !gradient.requires_grad() && is_equal_on_all_ranks(gradient, *mesh, verb);
  return whole ? make_dtensor(gradient, mesh,
                              make_shared_placements(Placements(static_cast<size_t>(mesh->ndim()), Replicate())),
                              gradient.sizes())
               : gradient;
}

// from_local with autograd. Its backward redistributes the gradient to `grad_placements` and returns the local tensor
// of it.
struct FromLocal : Function<FromLocal> {
  static Variable forward(AutogradContext* ctx, const Variable& local, const MeshPtr& mesh,
                          const Placements& placements, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                          const Placements& grad_placements) {
    save_conversion(ctx, mesh, grad_placements, sizes);
    return make_dtensor(local.detach(), mesh, make_shared_placements(placements), sizes, strides);
  }
  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    if (!gradients[0].defined()) return variable_list(6);
    const at::Tensor incoming_gradient =
        replicate_if_equal("from_local.backward", gradients[0], conversion_state(ctx).mesh);
    const at::Tensor gradient =
        redistribute_gradient("from_local.backward", incoming_gradient, conversion_state(ctx).placements);
    const bool recorded = at::GradMode::is_enabled() && gradient.requires_grad();
    variable_list result(6);
    result[0] =
        recorded ? to_local_with_gradient(gradient, conversion_state(ctx).placements) : impl_of(gradient)->local();
    return result;
  }
};

// to_local with autograd. Its backward makes a DTensor with `grad_placements` from the gradient of the local tensor. If
// autograd records the backward (create_graph), it must also record this conversion.
struct ToLocal : Function<ToLocal> {
  static Variable forward(AutogradContext* ctx, const Variable& tensor, const Placements& grad_placements) {
    const DTensorImpl& impl = *impl_of(tensor);
    save_conversion(ctx, impl.mesh(), grad_placements, tensor.sizes());
    return impl.local().detach();
  }
  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    if (!gradients[0].defined()) return variable_list(2);
    const ConversionState& state = conversion_state(ctx);
    if (at::GradMode::is_enabled() && gradients[0].requires_grad()) {
      const Placements back = partial_to_replicated(state.placements);
      return {from_local_with_gradient(gradients[0].contiguous(), state.mesh, state.placements, state.sizes,
                                       dense_strides(state.sizes), back),
              {}};
    }
    return {make_dtensor(gradients[0].detach(), state.mesh, make_shared_placements(state.placements), state.sizes), {}};
  }
};

// redistribute with autograd. Backward redistributes the gradient to the placements of the input, with Replicate in
// place of Partial. If options.backward_dtype is set, the gradient is redistributed in that dtype. `cause` is the name
// of the operation that needs the redistribution; null if the user called redistribute.
struct RedistributeFunction : Function<RedistributeFunction> {
  static Variable forward(AutogradContext* ctx, const Variable& tensor, const Placements& to,
                          const RedistributeOptions& options, const char* cause) {
    const DTensorImpl& impl = *impl_of(tensor);
    const Placements back = partial_to_replicated(impl.placements());
    save_conversion(ctx, impl.mesh(), back, tensor.sizes());
    ctx->saved_data["dtype"] = tensor.scalar_type();
    ctx->saved_data["options"] = make_saved_value(options);
    at::AutoDispatchBelowADInplaceOrView below;
    const bool cast = options.forward_dtype && *options.forward_dtype != tensor.scalar_type();
    const at::Tensor from = cast ? tensor.to(*options.forward_dtype) : tensor;
    const bool is_explicit = cause == nullptr;
    return redistribute_values(from, to, /*may_alias=*/cast,
                               {options.async_op, is_explicit, is_explicit ? "redistribute" : cause});
  }
  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    if (!gradients[0].defined()) return variable_list(4);
    const at::ScalarType dtype = ctx->saved_data["dtype"].toScalarType();
    const auto& options = saved_value<RedistributeOptions>(ctx->saved_data["options"]);
    const at::Tensor incoming_gradient =
        replicate_if_equal("redistribute.backward", gradients[0], conversion_state(ctx).mesh);
    const at::Tensor converted =
        options.backward_dtype ? incoming_gradient.to(*options.backward_dtype) : incoming_gradient;
    const at::Tensor gradient = redistribute_gradient("redistribute.backward", converted,
                                                      conversion_state(ctx).placements, {.async_op = options.async_op});
    return {gradient.scalar_type() == dtype ? gradient : gradient.to(dtype), {}, {}, {}};
  }
};

}  // namespace

at::Tensor from_local_with_gradient(const at::Tensor& local, const MeshPtr& mesh, const Placements& placements,
                                    c10::IntArrayRef sizes, c10::IntArrayRef strides,
                                    const Placements& grad_placements) {
  if (!local.requires_grad()) return make_dtensor(local, mesh, make_shared_placements(placements), sizes, strides);
  return FromLocal::apply(local, mesh, placements, sizes, strides, grad_placements);
}

at::Tensor to_local_with_gradient(const at::Tensor& tensor, const Placements& grad_placements) {
  return ToLocal::apply(tensor, grad_placements);
}

at::Tensor redistribute_with_gradient(const at::Tensor& tensor, const Placements& to,
                                      const RedistributeOptions& options, const char* cause) {
  return RedistributeFunction::apply(tensor, to, options, cause);
}

}  // namespace tessera
