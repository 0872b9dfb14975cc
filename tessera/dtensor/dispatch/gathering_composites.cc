// Composite operations that return new tensors: einsum, tensordot, bilinear, ... Their composite kernels make views
// that no other code sees. If such a view cannot share memory with the local tensor because a dim is sharded unevenly,
// the dim is gathered and the view is taken of the gathered copy. The view raises no error in this case, because on
// plain tensors these operations work for every shape. Plain tensors that the composite kernels make count as
// replicated.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>

#include "tessera/dtensor/dispatch/dispatch.h"

namespace tessera {

namespace {

thread_local bool views_gather = false;
thread_local const std::string* makes_plain_tensors = nullptr;

// The base tensors of the arguments. Results may be views of these bases although the schemas do not declare this
// (einsum of one operand, meshgrid).
using Bases = c10::SmallVector<at::Tensor, 4>;
Bases bases_of(c10::ArrayRef<c10::IValue> args) {
  Bases bases;
  const auto add = [&](const c10::IValue& value) {
    if (value.isTensor() && value.toTensor().defined()) {
      const at::Tensor& tensor = value.toTensor();
      bases.push_back(tensor.is_view() ? at::Tensor(tensor._base()) : tensor);
    }
  };
  for (const auto& arg : args) {
    if (arg.isList()) {
      for (const auto& element : arg.toListRef()) add(element);
    } else {
      add(arg);
    }
  }
  return bases;
}

// Clones a result that is a view of a gathered copy, because the dispatch refuses writes to such a view. The result is
// not cloned if its base is one of `bases`, the base tensors of the arguments. On plain tensors such a result shares
// memory with an argument, which a clone would not do; so it stays a view, and a write to it raises an error.
void clone_temporary_view(c10::IValue& result, const Bases& bases) {
  if (!result.isTensor() || !is_gathered_view(result.toTensor()) || !result.toTensor().is_view()) return;
  const at::TensorBase& base = result.toTensor()._base();
  if (std::ranges::none_of(bases, [&](const at::Tensor& of) { return of.is_same(base); })) {
    result = clone_gathered_view(result.toTensor());
  }
}

bool is_plain_tensor(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && value.toTensor().numel() != 1 &&
         !is_dtensor_impl(*value.toTensor().unsafeGetTensorImpl());
}

struct GatheringKernel final : c10::OperatorKernel {
  explicit GatheringKernel(std::string name) : name_(std::move(name)) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    const size_t base = stack->size() - op.schema().arguments().size();
    const AllowGatheringViews views;
    const auto args = c10::ArrayRef<c10::IValue>(*stack).slice(base);
    const auto bases = bases_of(args);
    std::optional<AllowInternalPlainTensors> plain;
    if (!has_plain_tensor(args)) plain.emplace(name_);
    op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
    for (size_t i = base; i < stack->size(); ++i) clone_temporary_view((*stack)[i], bases);
  }
  const std::string name_;
};

bool gives_new_tensors(const c10::FunctionSchema& schema) {
  const auto aliases = [](const c10::Argument& argument) { return argument.alias_info() != nullptr; };
  const auto& returns = schema.returns();
  return !returns.empty() && holds_tensors(*returns[0].type()) && std::ranges::none_of(returns, aliases) &&
         std::ranges::none_of(schema.arguments(), aliases) &&
         std::ranges::any_of(schema.arguments(),
                             [](const c10::Argument& argument) { return holds_tensors(*argument.type()); });
}

}  // namespace

bool has_plain_tensor(c10::ArrayRef<c10::IValue> args) {
  return std::ranges::any_of(args, [](const c10::IValue& arg) {
    return arg.isList() ? has_plain_tensor(arg.toListRef()) : is_plain_tensor(arg);
  });
}

AllowInternalPlainTensors::AllowInternalPlainTensors(const std::string& operation) : before_(makes_plain_tensors) {
  if (before_ == nullptr) makes_plain_tensors = &operation;
}
AllowInternalPlainTensors::~AllowInternalPlainTensors() { makes_plain_tensors = before_; }
const std::string* AllowInternalPlainTensors::operation() { return makes_plain_tensors; }

AllowGatheringViews::AllowGatheringViews() : before_(views_gather) { views_gather = true; }
AllowGatheringViews::~AllowGatheringViews() { views_gather = before_; }
bool AllowGatheringViews::in_force() { return views_gather; }

at::Tensor clone_gathered_view(const at::Tensor& result) { return is_gathered_view(result) ? result.clone() : result; }

// Registers GatheringKernel for each composite aten operation that returns new tensors and has no kernel for DTensors
// yet. Call it after all other registrations.
void register_gathering_composites(torch::Library& dtensor, torch::Library& autograd) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    // Overloads with dimname arguments cannot be called boxed.
    const bool named = name.overload_name.find("dimname") != std::string::npos ||
                       name.overload_name.find("names") != std::string::npos;
    if (!op || name.getNamespace() != "aten" || named || !is_composite(*op) || !gives_new_tensors(op->schema()) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::AutogradPrivateUse3) ||
        op->hasKernelForDispatchKey(kDTensorKey)) {
      continue;
    }
    for (auto* library : {&dtensor, &autograd}) {
      library->impl(toString(name).c_str(),
                    torch::CppFunction::makeFromBoxedFunctor(std::make_unique<GatheringKernel>(toString(name))));
    }
  }
}

}  // namespace tessera
