// The kernel behind every operation on DTensors: find the plan of the call, or make one, and carry it out.
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_set>

#include "tessera/base/error.h"
#include "tessera/dtensor/dispatch/dispatch.h"
#include "tessera/dtensor/dispatch/plan.h"
#include "tessera/dtensor/dispatch/plan_cache.h"
#include "tessera/dtensor/random/random_fill.h"
#include "tessera/dtensor/redistribute/redistribution_scope.h"

namespace tessera::detail {

namespace {

// Replaces DTensors on the stack by their local parts, redistributed where the plan says so.
class Localizer {
 public:
  Localizer(const OpEntry& op, const Plan& plan, const DeviceMesh& mesh)
      : op_(op), mesh_(mesh), next_(plan.redistributions.begin()), end_(plan.redistributions.end()) {}

  void replace(c10::IValue& slot, int arg) {
    if (slot.isTensor()) {
      const at::Tensor& tensor = slot.toTensor();
      if (tensor.defined()) {
        slot = local_of(tensor, arg, -1);
      }
    } else if (slot.isList()) {
      slot = local_list(slot, arg);
    }
  }

  // Of the local tensors, below autograd and autocast, which have had their turn.
  c10::DispatchKeySet keys() const { return keys_ & c10::after_ADInplaceOrView_keyset; }

 private:
  at::Tensor local_of(const at::Tensor& tensor, int arg, int element) {
    at::Tensor local = is_dtensor_impl(*tensor.unsafeGetTensorImpl()) ? impl_of(tensor)->local() : tensor;
    if (next_ != end_ && next_->arg == arg && next_->element == element) {
      const Plan::Redistribution& move = *next_++;
      const RedistributionScope scope(
          {op_.name.c_str(), op_.args[arg].name.c_str(), element, tensor, move.to->values, move.steps, false});
      local = run_steps(local, mesh_, move.steps, /*may_alias=*/true).contiguous();
    }
    keys_ = keys_ | local.key_set();
    return local;
  }

  c10::IValue local_list(const c10::IValue& slot, int arg) {
    if (slot.isTensorList()) {
      c10::List<at::Tensor> locals;
      const auto elements = slot.toListRef();
      locals.reserve(elements.size());
      for (size_t i = 0; i < elements.size(); ++i) {
        const at::Tensor& tensor = elements[i].toTensor();
        locals.push_back(tensor.defined() ? local_of(tensor, arg, static_cast<int>(i)) : tensor);
      }
      return locals;
    }
    c10::List<std::optional<at::Tensor>> locals;
    const auto elements = slot.toListRef();
    for (size_t i = 0; i < elements.size(); ++i) {
      if (elements[i].isNone() || !elements[i].toTensor().defined()) {
        locals.push_back(std::nullopt);
      } else {
        locals.push_back(local_of(elements[i].toTensor(), arg, static_cast<int>(i)));
      }
    }
    return locals;
  }

  const OpEntry& op_;
  const DeviceMesh& mesh_;
  std::vector<Plan::Redistribution>::const_iterator next_;
  std::vector<Plan::Redistribution>::const_iterator end_;
  c10::DispatchKeySet keys_;
};

// The mesh of the first DTensor.
MeshPtr mesh_of(c10::ArrayRef<c10::IValue> args, const OpEntry& op) {
  for (const int arg : op.tensor_args) {
    if (args[arg].isTensor()) {
      if (args[arg].toTensor().defined() && is_dtensor_impl(*args[arg].toTensor().unsafeGetTensorImpl())) {
        return impl_of(args[arg].toTensor())->mesh();
      }
    } else if (args[arg].isList()) {
      for (const auto& element : args[arg].toListRef()) {
        if (element.isTensor() && element.toTensor().defined() &&
            is_dtensor_impl(*element.toTensor().unsafeGetTensorImpl())) {
          return impl_of(element.toTensor())->mesh();
        }
      }
    }
  }
  return nullptr;
}

at::Tensor wrap(at::Tensor local, const MeshPtr& mesh, const TensorSpec& spec) {
  if (!spec.view) {
    if (spec.strides.empty()) {
      if (!local.is_contiguous()) [[unlikely]] {
        local = local.contiguous();
      }
    } else if (!lies_as(local.sizes(), local.strides(), spec.local_strides)) {
      local = at::empty_strided(local.sizes(), spec.local_strides, local.options()).copy_(local);
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
        for (size_t j = 0; j < locals.size(); ++j) {
          wrapped.push_back(wrap(locals[j], mesh, output.tensors[j]));
        }
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

// A rank outside the mesh computes nothing: its results are empty.
void push_empty_results(const OpEntry& op, const Plan& plan, const DeviceMesh& mesh, Stack& stack,
                        c10::ArrayRef<c10::IValue> kept) {
  torch::jit::drop(stack, op.args.size());
  size_t next_kept = 0;
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
      stack.emplace_back(output.kind == OutputPlan::Kind::kArgument ? kept[next_kept++] : c10::IValue(0));
    }
  }
}

bool is_copied_view(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && is_dtensor_impl(*value.toTensor().unsafeGetTensorImpl()) &&
         impl_of(value.toTensor())->is_copied_view();
}

// A write that would be lost must not pass for one.
void refuse_copied_views(const OpEntry& op, c10::ArrayRef<c10::IValue> args) {
  for (const int arg : op.tensor_args) {
    if (op.args[arg].mutated && is_copied_view(args[arg])) [[unlikely]] {
      raise(ErrorKind::kShape,
            "Sharding dimension mismatch: [dtensor.dispatch] {}: '{}' is a view along a sharded dim, which holds a "
            "gathered "
            "copy, so that what is written to it would be lost. Clone it, or redistribute the tensor before taking the "
            "view.",
            op.name, op.args[arg].name);
    }
  }
}

// Operations on the parts below do not touch the version counters that to_local's readers see.
void bump_versions(const OpEntry& op, c10::ArrayRef<c10::IValue> args) {
  const auto bump = [](const at::Tensor& tensor) {
    if (tensor.defined() && !tensor.is_inference()) {
      tensor.unsafeGetTensorImpl()->bump_version();
    }
  };
  for (const int arg : op.tensor_args) {
    if (!op.args[arg].mutated) {
      continue;
    }
    if (args[arg].isTensor()) {
      bump(args[arg].toTensor());
    } else if (args[arg].isTensorList()) {
      for (const auto& element : args[arg].toListRef()) {
        bump(element.toTensor());
      }
    }
  }
}

// Calls visit(tensor, output, element) for each DTensor among new results at the end of the stack.
template <class Visit>
void for_each_result(const Plan& plan, const Stack& stack, Visit visit) {
  const size_t base = stack.size() - plan.outputs.size();
  for (size_t i = 0; i < plan.outputs.size(); ++i) {
    if (plan.outputs[i].kind == OutputPlan::Kind::kTensor && stack[base + i].toTensor().defined()) {
      visit(stack[base + i].toTensor(), i, size_t{0});
    } else if (plan.outputs[i].kind == OutputPlan::Kind::kList) {
      const auto elements = stack[base + i].toTensorVector();
      for (size_t j = 0; j < elements.size(); ++j) {
        visit(elements[j], i, j);
      }
    }
  }
}

void run_plan(const OpEntry& op, const std::shared_ptr<const Plan>& plan, Stack& stack);

// What a view that had to gather was made of, so that it can be made again.
class CopiedView final : public LocalSource {
 public:
  struct Made {
    const OpEntry& op;
    std::shared_ptr<const Plan> plan;
    Stack args;  // with the tensor it is taken of
  };
  CopiedView(std::shared_ptr<const Made> made, at::Tensor local, size_t output, size_t element)
      : made_(std::move(made)),
        version_(version_of(*impl_of(made_->args[made_->op.view_of].toTensor()))),
        seen_(current()),
        local_(std::move(local)),
        output_(output),
        element_(element) {}

  const at::Tensor& part() override {
    if (seen_ != current()) {
      const at::AutoDispatchBelowADInplaceOrView below;
      Stack stack = made_->args;
      run_plan(made_->op, made_->plan, stack);
      for_each_result(*made_->plan, stack, [&](const at::Tensor& tensor, size_t output, size_t element) {
        local_ = output == output_ && element == element_ ? impl_of(tensor)->local() : local_;
      });
      seen_ = current();
    }
    return local_;
  }
  bool is_copied_view() const override { return true; }

 private:
  // Of what a view of it is taken of in the end.
  static c10::VariableVersion version_of(const DTensorImpl& viewed) {
    return viewed.is_copied_view() ? static_cast<const CopiedView&>(*viewed.source()).version_
                                   : viewed.version_counter();
  }
  uint32_t current() const { return version_.enabled() ? version_.current_version() : 0; }

  std::shared_ptr<const Made> made_;
  c10::VariableVersion version_;  // counts what operations wrote, alike on all ranks
  uint32_t seen_;
  at::Tensor local_;
  size_t output_;
  size_t element_;
};

// The results are views of a gathered copy, or of such a view.
void mark_copied_views(const std::shared_ptr<const CopiedView::Made>& made, const Stack& stack) {
  for_each_result(*made->plan, stack, [&](const at::Tensor& tensor, size_t output, size_t element) {
    DTensorImpl& impl = *impl_of(tensor);
    impl.set_source(std::make_shared<CopiedView>(made, impl.local(), output, element));
  });
}

void run_plan(const OpEntry& op, const std::shared_ptr<const Plan>& shared_plan, Stack& stack) {
  const Plan& plan = *shared_plan;
  const size_t base = stack.size() - op.args.size();
  c10::SmallVector<c10::IValue, 2> kept;
  for (const OutputPlan& output : plan.outputs) {
    if (output.kind == OutputPlan::Kind::kArgument) {
      kept.push_back(stack[base + output.argument]);
    }
  }
  const c10::ArrayRef<c10::IValue> args(stack.data() + base, op.args.size());
  const MeshPtr mesh = mesh_of(args, op);
  if (op.mutates) {
    refuse_copied_views(op, args);
  }
  std::shared_ptr<CopiedView::Made> copied;
  if (op.view_of >= 0 && (plan.copies_view || is_copied_view(args[op.view_of]))) [[unlikely]] {
    copied = std::make_shared<CopiedView::Made>(CopiedView::Made{op, shared_plan, args.vec()});
    c10::IValue& viewed = copied->args[op.view_of];
    const DTensorImpl& impl = *impl_of(viewed.toTensor());
    viewed = at::Tensor(impl.shallow_copy_and_detach(impl.version_counter(), true));  // holds no history
  }
  Localizer localizer(op, plan, *mesh);
  for (const int arg : op.tensor_args) {
    localizer.replace(stack[base + arg], arg);
  }
  if (!mesh->coordinate()) [[unlikely]] {
    if (plan.random) {
      skip_random_operation(*mesh);
    }
    push_empty_results(op, plan, *mesh, stack, kept);
  } else {
    for (const auto& [arg, value] : plan.rewrites) {
      stack[base + arg] = value;
    }
    if (op.mutates) {
      bump_versions(op, args);
    }
    if (plan.local) {
      plan.local(LocalCall{op, stack, *mesh, localizer.keys()});
    } else {
      call_local(op, localizer.keys(), stack);
    }
  }
  wrap_outputs(plan, mesh, stack, kept);
  if (copied) [[unlikely]] {
    mark_copied_views(copied, stack);
  }
}

// Finds the rule at the first miss. False when the operation decomposes instead.
bool has_rule(const OpEntry& op) {
  if (op.rule.load(std::memory_order_acquire) != nullptr) {
    return true;
  }
  if (const Rule* rule = find_rule(op)) {
    op.rule.store(rule, std::memory_order_release);
    return true;
  }
  if (!op.in_place_view && op.handle.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd)) {
    op.handler.store(decompose, std::memory_order_release);
    return false;
  }
  return true;  // make_plan says what is missing
}

void dispatch(const OpEntry& op, c10::DispatchKeySet keys, Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (const Handler handler = op.handler.load(std::memory_order_acquire)) {
    handler(op, keys, &stack);
    return;
  }
  dispatch_by_rule(op, keys, stack);
}

}  // namespace

void dispatch_by_rule(const OpEntry& op, c10::DispatchKeySet keys, Stack& stack) {
  const c10::ArrayRef<c10::IValue> args(stack.data() + stack.size() - op.args.size(), op.args.size());
  static thread_local CallKey key;
  const bool cacheable = key.assign(op, args);
  if (!cacheable) {
    if (has_rule(op)) {
      run_plan(op, make_plan(op, args), stack);
    } else {
      decompose(op, keys, &stack);
    }
    return;
  }
  PlanCache& cache = PlanCache::of_this_thread();
  const uint64_t hash = key.hash();
  std::shared_ptr<const Plan> plan;
  if (const auto* known = cache.find(hash, key.words())) {
    plan = *known;
  } else if (!has_rule(op)) {
    decompose(op, keys, &stack);
    return;
  } else {
    const CallKey own = key;  // a rule that runs operations on DTensors changes the thread's
    plan = make_plan(op, args);
    if (plan->cacheable) {
      cache.insert(hash, own.words(), plan);
    }
  }
  run_plan(op, plan, stack);
}

namespace {

struct Kernel final : c10::OperatorKernel {
  explicit Kernel(const OpEntry* entry) : entry(entry) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet keys, Stack* stack) {
    dispatch(*entry, keys, *stack);
  }
  const OpEntry* entry;
};

// For operations of other libraries that are no composites and were never registered with us.
struct FallbackKernel final : c10::OperatorKernel {
  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet, Stack* stack) {
    const OpEntry entry(handle);  // has no rule, which make_plan says
    make_plan(entry, c10::ArrayRef<c10::IValue>(stack->data() + stack->size() - entry.args.size(), entry.args.size()));
  }
};

// Made of other operations. Those that have a kernel of their own besides (silu_backward, mish_backward,
// native_channel_shuffle) are not: their rules know them, and their operands move once, not at each use.
bool is_composite(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
         !op.hasKernelForDispatchKey(c10::DispatchKey::CPU);
}

// Everything registered; lives as long as the process, since the dispatcher keeps calling it.
struct Registry {
  std::mutex mutex;
  torch::Library aten{torch::Library::IMPL, "aten", kDTensorKey, __FILE__, __LINE__};
  torch::Library any{torch::Library::IMPL, "_", kDTensorKey, __FILE__, __LINE__};
  torch::Library any_autograd{torch::Library::IMPL, "_", c10::DispatchKey::AutogradPrivateUse3, __FILE__, __LINE__};
  std::vector<std::unique_ptr<torch::Library>> others;
  std::unordered_map<std::string, std::unique_ptr<OpEntry>> entries;

  void add(torch::Library& library, const c10::OperatorHandle& op) {
    auto entry = std::make_unique<OpEntry>(op);
    entry->handler = find_handler(entry->name);
    library.impl(entry->name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(entry.get())));
    entries.emplace(entry->name, std::move(entry));
  }

  Registry() {
    any.fallback(torch::CppFunction::makeFromBoxedFunctor(std::make_unique<FallbackKernel>()));
    // As for the other back-ends: operations without a derivative say so in backward.
    any_autograd.fallback(torch::autograd::basicAutogradNotImplementedFallback());
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getAllOpNames()) {
      if (name.getNamespace() != "aten") {
        continue;
      }
      const auto op = dispatcher.findSchema(name);
      if (op && !is_composite(*op)) {
        add(aten, *op);
      }
    }
    register_composites();
    register_operand_layouts();
    register_view_replay();
    register_folded_products();
  }
};

Registry& registry() {
  static Registry* const made = new Registry();  // never destroyed: see Registry
  return *made;
}

}  // namespace

void decompose(const OpEntry& op, c10::DispatchKeySet, Stack* stack) {
  op.handle.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, *stack);
}

void ensure_registered() { registry(); }

void ensure_kernels_of(const std::string& name) {
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  const auto dot = name.find('.');
  const auto separator = name.find("::");
  const std::string ns = name.substr(0, separator);
  if (ns == "aten") {
    return;
  }
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& known : dispatcher.getAllOpNames()) {
    const bool wanted = dot == std::string::npos
                            ? known.name == name
                            : known.name == name.substr(0, dot) && known.overload_name == name.substr(dot + 1);
    const auto op = wanted ? dispatcher.findSchema(known) : std::nullopt;
    if (op && !all.entries.contains(toString(known)) && !is_composite(*op)) {
      all.others.push_back(std::make_unique<torch::Library>(torch::Library::IMPL, ns, kDTensorKey, __FILE__, __LINE__));
      all.add(*all.others.back(), *op);
    }
  }
}

}  // namespace tessera::detail
