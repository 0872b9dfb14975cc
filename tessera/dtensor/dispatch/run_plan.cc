// Runs a plan on the local tensors.
#include <ATen/core/LegacyTypeDispatch.h>

#include "tessera/base/error.h"
#include "tessera/dtensor/dispatch/plan.h"
#include "tessera/dtensor/random/random_fill.h"
#include "tessera/dtensor/redistribute/redistribution_scope.h"
#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera {

namespace {

// Replaces DTensors on the stack by their local tensors, redistributed where the plan has a redistribution.
class Localizer {
 public:
  // `kept` is the position of an argument whose DTensor owns `mesh`. replace() replaces this DTensor on the stack, too.
  // The Localizer keeps a reference to the DTensor, so that the reference `mesh` stays valid.
  Localizer(const OpInfo& op, const Plan& plan, const DeviceMesh& mesh, int kept)
      : op_(op), mesh_(mesh), next_(plan.redistributions.begin()), end_(plan.redistributions.end()), kept_arg_(kept) {}

  void replace(c10::IValue& slot, int arg) {
    c10::IValue local =
        map_tensors(slot, [&](const at::Tensor& tensor, int element) { return local_of(tensor, arg, element); });
    std::swap(slot, local);
    if (arg == kept_arg_) kept_ = std::move(local);
  }

  // Dispatch keys of the local tensors without the autograd and autocast keys, because the kernels at these keys have
  // run already for the DTensors.
  c10::DispatchKeySet keys() const { return keys_ & c10::after_ADInplaceOrView_keyset; }

 private:
  at::Tensor local_of(const at::Tensor& tensor, int arg, int element) {
    at::Tensor local = is_dtensor_impl(*tensor.unsafeGetTensorImpl()) ? impl_of(tensor)->local() : tensor;
    if (next_ != end_ && next_->arg == arg && next_->element == element) {
      const Plan::Redistribution& move = *next_++;
      const RedistributionScope scope(
          {op_.name.c_str(), op_.args[arg].name.c_str(), element, tensor, move.to->values, move.steps, false});
      local = run_redistribute(local, mesh_, move.steps, /*may_alias=*/true).contiguous();
    }
    keys_ = keys_ | local.key_set();
    return local;
  }

  const OpInfo& op_;
  const DeviceMesh& mesh_;
  std::vector<Plan::Redistribution>::const_iterator next_;
  std::vector<Plan::Redistribution>::const_iterator end_;
  c10::DispatchKeySet keys_;
  const int kept_arg_;
  c10::IValue kept_;
};

bool holds_dtensor(const c10::IValue& value) { return value.isTensor() && is_dtensor(value.toTensor()); }

struct FirstDTensor {
  int arg;
  const MeshPtr& mesh;  // valid as long as the argument exists
};

FirstDTensor first_dtensor(c10::ArrayRef<c10::IValue> args, const OpInfo& op) {
  for (const int arg : op.tensor_args) {
    if (holds_dtensor(args[arg])) return {arg, impl_of(args[arg].toTensor())->mesh()};
    if (!args[arg].isList()) continue;
    for (const auto& element : args[arg].toListRef()) {
      if (holds_dtensor(element)) return {arg, impl_of(element.toTensor())->mesh()};
    }
  }
  raise(ErrorKind::kInternal, "[dtensor.dispatch] {}: found no DTensor among the arguments, wanted at least one",
        op.name);
}

at::Tensor wrap(at::Tensor local, const MeshPtr& mesh, const TensorSpec& spec) {
  if (!spec.view) {
    if (spec.strides.empty()) {
      if (!local.is_contiguous()) [[unlikely]] {
        local = local.contiguous();
      }
    } else {
      local = with_strides(std::move(local), spec.local_strides);
    }
  }
  return at::detail::make_tensor<DTensorImpl>(std::move(local), mesh, spec.placements, spec.sizes, spec.strides);
}

void wrap_outputs(const Plan& plan, const MeshPtr& mesh, Stack& stack, c10::ArrayRef<c10::IValue> kept) {
  const size_t base = stack.size() - plan.outputs.size();
  size_t next_kept = 0;
  for (size_t i = 0; i < plan.outputs.size(); ++i) {
    const OutputPlan& output = plan.outputs[i];
    c10::IValue& slot = stack[base + i];
    switch (output.kind) {
      case OutputPlan::Kind::kTensor: {
        at::Tensor local = std::move(slot).toTensor();
        slot = local.defined() ? wrap(std::move(local), mesh, output.tensors[0]) : at::Tensor();
        break;
      }
      case OutputPlan::Kind::kList: {
        c10::List<at::Tensor> wrapped;
        const auto locals = slot.toTensorVector();
        wrapped.reserve(locals.size());
        for (size_t j = 0; j < locals.size(); ++j) wrapped.push_back(wrap(locals[j], mesh, output.tensors[j]));
        slot = std::move(wrapped);
        break;
      }
      case OutputPlan::Kind::kArgument:
        slot = kept[next_kept++];
        break;
      case OutputPlan::Kind::kOther:
        break;
    }
  }
}

// Removes the operation's arguments from `stack` and pushes the results for a rank outside the mesh. Such a rank
// computes nothing, so its results are empty tensors. For outputs that are arguments (in-place, out=) the function
// pushes a placeholder that wrap_outputs() replaces.
void push_empty_results(const OpInfo& op, const Plan& plan, const DeviceMesh& mesh, Stack& stack) {
  torch::jit::drop(stack, op.args.size());
  for (const OutputPlan& output : plan.outputs) {
    c10::List<at::Tensor> parts;
    for (const auto& spec : output.tensors) {
      parts.push_back(at::zeros(Sizes(spec.sizes.size(), 0), at::TensorOptions(mesh.device()).dtype(spec.dtype)));
    }
    if (output.kind == OutputPlan::Kind::kTensor) {
      stack.emplace_back(parts.get(0));
    } else if (output.kind == OutputPlan::Kind::kList) {
      stack.emplace_back(std::move(parts));
    } else {
      stack.emplace_back(c10::IValue(0));
    }
  }
}

// Raises an error if the operation writes a view of a gathered copy, because the write would not reach the viewed
// tensor.
void refuse_gathered_views(const OpInfo& op, c10::ArrayRef<c10::IValue> args) {
  for_each_tensor(op, args, [&](const at::Tensor& tensor, int arg, int) {
    if (op.args[arg].is_written && is_gathered_view(tensor)) [[unlikely]] {
      raise(ErrorKind::kShape,
            "Sharding dimension mismatch: [dtensor.dispatch] {}: '{}' is a view along a sharded dim and holds a "
            "gathered copy, so a write to it would be lost. Clone it, or redistribute the tensor before "
            "taking the view.",
            op.name, op.args[arg].name);
    }
  });
}

// Increments the version counter of each tensor that the operation writes; with lists_only, only of those in tensor
// lists.
void bump_versions(const OpInfo& op, c10::ArrayRef<c10::IValue> args, bool lists_only) {
  for_each_tensor(op, args, [&](const at::Tensor& tensor, int arg, int element) {
    const bool counts = op.args[arg].is_written && (element >= 0 || !lists_only);
    if (counts && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  });
}

// Calls visit(tensor, output, element) for each DTensor among the new results at the end of the stack.
template <class Visit>
void for_each_result(const Plan& plan, const Stack& stack, Visit visit) {
  const size_t base = stack.size() - plan.outputs.size();
  for (size_t i = 0; i < plan.outputs.size(); ++i) {
    if (plan.outputs[i].kind == OutputPlan::Kind::kTensor && stack[base + i].toTensor().defined()) {
      visit(stack[base + i].toTensor(), i, size_t{0});
    } else if (plan.outputs[i].kind == OutputPlan::Kind::kList) {
      const auto elements = stack[base + i].toTensorVector();
      for (size_t j = 0; j < elements.size(); ++j) visit(elements[j], i, j);
    }
  }
}

// The local tensor of a view that could not share the viewed tensor's memory and is a view of a gathered copy. The
// object keeps the view operation's call. Each use of the local tensor calls part(), which reads the version counter of
// the viewed tensor. If the counter has changed since the last use, an operation has written the viewed tensor, and
// part() runs the view operation again. Version counters are equal on all ranks, so all ranks run the view operation
// and its collectives at the same use.
class GatheredView final : public LazyLocalTensor {
 public:
  struct ViewCall {
    const OpInfo& op;
    std::shared_ptr<const Plan> plan;
    Stack args;  // all arguments, also the viewed tensor
  };
  GatheredView(std::shared_ptr<const ViewCall> view_call, at::Tensor local, size_t output, size_t element)
      : view_call_(std::move(view_call)),
        version_(version_of(*impl_of(view_call_->args[view_call_->op.view_of].toTensor()))),
        seen_version_(viewed_version()),
        local_(std::move(local)),
        output_(output),
        element_(element) {}

  const at::Tensor& part() override {
    if (seen_version_ != viewed_version()) {
      const at::AutoDispatchBelowADInplaceOrView below;
      Stack stack = view_call_->args;
      run_plan(view_call_->op, view_call_->plan, stack);
      for_each_result(*view_call_->plan, stack, [&](const at::Tensor& tensor, size_t output, size_t element) {
        local_ = output == output_ && element == element_ ? impl_of(tensor)->local() : local_;
      });
      seen_version_ = viewed_version();
    }
    return local_;
  }
  bool is_gathered_view() const override { return true; }

 private:
  // Returns the version counter of the viewed tensor. If the viewed tensor is itself a view of a gathered copy, returns
  // the version_ of its GatheredView: the counter of the tensor that was gathered.
  static c10::VariableVersion version_of(const DTensorImpl& viewed) {
    return viewed.is_gathered_view() ? static_cast<const GatheredView&>(*viewed.source()).version_
                                     : viewed.version_counter();
  }
  uint32_t viewed_version() const { return version_.enabled() ? version_.current_version() : 0; }

  std::shared_ptr<const ViewCall> view_call_;
  c10::VariableVersion version_;  // incremented by operations on DTensors, equally on all ranks
  uint32_t seen_version_;
  at::Tensor local_;
  size_t output_;
  size_t element_;
};

// Gives the gathered copy `value` the memory order of the dims of `viewed`, so that every view operation that is
// possible on `viewed` is possible on the copy.
void restore_memory_order(const DTensorImpl& viewed, c10::IValue& value) {
  const at::Tensor& copy = value.toTensor();
  const at::AutoDispatchBelowADInplaceOrView below;
  value = with_strides(copy, gathered_copy_strides(copy.sizes(), viewed.strides()));
}

// Gives each result a GatheredView as its source, because the result is a view of a gathered copy.
void mark_gathered_views(const std::shared_ptr<const GatheredView::ViewCall>& view_call, const Stack& stack) {
  for_each_result(*view_call->plan, stack, [&](const at::Tensor& tensor, size_t output, size_t element) {
    DTensorImpl& impl = *impl_of(tensor);
    impl.set_source(std::make_shared<GatheredView>(view_call, impl.local(), output, element));
  });
}

}  // namespace

// A rank outside the mesh does not run the operation, but it counts random operations, increments version counters and
// returns results with the global sizes, as ranks inside the mesh do. Arguments that are also results are first copied
// to `kept`, because the Localizer replaces them on the stack.
void run_plan(const OpInfo& op, const std::shared_ptr<const Plan>& shared_plan, Stack& stack) {
  const Plan& plan = *shared_plan;
  const size_t base = stack.size() - op.args.size();
  c10::SmallVector<c10::IValue, 2> kept;
  for (const OutputPlan& output : plan.outputs) {
    if (output.kind == OutputPlan::Kind::kArgument) kept.push_back(stack[base + output.argument]);
  }
  const c10::ArrayRef<c10::IValue> args(stack.data() + base, op.args.size());
  const auto [mesh_arg, mesh] = first_dtensor(args, op);
  if (op.writes_argument) {
    refuse_gathered_views(op, args);
    bump_versions(op, args, /*lists_only=*/true);  // autograd increments those of single tensors
  }
  std::shared_ptr<GatheredView::ViewCall> view_call;
  const auto is_view_of_copy = [&] {
    return args[op.view_of].isTensor() && is_gathered_view(args[op.view_of].toTensor());
  };
  if (op.view_of >= 0 && (plan.gathers_view || is_view_of_copy())) [[unlikely]] {
    view_call = std::make_shared<GatheredView::ViewCall>(GatheredView::ViewCall{op, shared_plan, args.vec()});
    c10::IValue& viewed = view_call->args[op.view_of];
    const DTensorImpl& impl = *impl_of(viewed.toTensor());
    viewed = at::Tensor(impl.shallow_copy_and_detach(impl.version_counter(), true));  // without autograd history
  }
  Localizer localizer(op, plan, *mesh, mesh_arg);
  for (const int arg : op.tensor_args) localizer.replace(stack[base + arg], arg);
  if (view_call && plan.gathers_view && mesh->coordinate()) [[unlikely]] {
    restore_memory_order(*impl_of(view_call->args[op.view_of].toTensor()), stack[base + op.view_of]);
  }
  if (!mesh->coordinate()) [[unlikely]] {
    if (plan.takes_random_stream) skip_random_operation(*mesh);
    push_empty_results(op, plan, *mesh, stack);
  } else {
    for (const auto& [arg, value] : plan.rewrites) stack[base + arg] = value;
    // The operation runs below the key ADInplaceOrView, whose kernels would increment the version counters of the local
    // tensors. The counters are incremented here, because the user may hold the local tensors from to_local().
    if (op.writes_argument) bump_versions(op, args, /*lists_only=*/false);
    if (plan.local) {
      plan.local(LocalCall{op, stack, *mesh, localizer.keys()});
    } else {
      call_local(op, localizer.keys(), stack);
    }
  }
  wrap_outputs(plan, mesh, stack, kept);
  if (view_call) [[unlikely]] {
    mark_gathered_views(view_call, stack);
  }
}

}  // namespace tessera
