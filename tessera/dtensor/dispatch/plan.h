// OpInfo: what the schema says about an operation. Plan: the decisions for all calls with the same cache key, such as
// redistributions of inputs and placements of outputs.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <atomic>
#include <memory>

#include "tessera/dtensor/dispatch/rule.h"
#include "tessera/dtensor/redistribute/redistribute.h"
#include "tessera/dtensor/tensor/dtensor_impl.h"

namespace torch {
class Library;
}

namespace tessera {

using torch::jit::Stack;

struct OpInfo;
// A function that runs all calls of an operation instead of the operation's rule and plan. It replaces the arguments at
// the end of the stack by the results.
using Handler = void (*)(const OpInfo& op, c10::DispatchKeySet keys, Stack* stack);

struct ArgInfo {
  std::string name;
  bool is_tensor_or_list = false;
  bool is_written = false;
  bool is_out_argument = false;
};

struct OpInfo {
  explicit OpInfo(const c10::OperatorHandle& op);
  int arg_named(const char* argument) const;  // position in the schema; -1 when there is none
  c10::OperatorHandle handle;
  std::string name;  // "aten::add_.Tensor"
  std::vector<ArgInfo> args;
  std::vector<int> tensor_args;
  std::vector<int> return_alias;  // for each return: the argument that is returned (in-place, out=), or -1
  bool writes_argument = false;   // some argument is written
  int view_of = -1;               // argument that the results are views of, or -1
  int write_flag_arg = -1;        // bool argument; arguments are written only if it is true. -1: always
  bool is_in_place_view = false;  // changes the shape of an argument (squeeze_)
  uint64_t id;                    // identifies the operation in cache keys
  // `rule` is set at the operation's first call. `handler` is set at registration, or to decompose() at the first call.
  // Both are atomic because ranks may be threads of one process.
  mutable std::atomic<const Rule*> rule{nullptr};
  mutable std::atomic<Handler> handler{nullptr};
};

// Layout of a result. All members but local_strides are equal on all ranks, so code that reads strides or dtype decides
// equally on all ranks.
struct TensorSpec {
  PlacementsPtr placements;
  Sizes sizes;
  Sizes strides;        // global; empty: contiguous
  bool view = false;    // the result shares memory with an operand; else it gets the dim order of the global strides
  Sizes local_strides;  // strides of the local tensor, unless contiguous or a view
  at::ScalarType dtype = at::ScalarType::Undefined;  // for the empty results of ranks outside the mesh
};

struct OutputPlan {
  enum class Kind : uint8_t { kTensor, kList, kArgument, kOther };
  Kind kind = Kind::kOther;
  int argument = -1;  // kArgument: position of the argument
  std::vector<TensorSpec> tensors;
};

struct Plan {
  struct Redistribution {
    int arg;
    int element;
    RedistributeSteps steps;
    PlacementsPtr to;
  };
  std::vector<Redistribution> redistributions;  // in the order of arguments and of elements
  Rewrites rewrites;
  std::vector<OutputPlan> outputs;
  LocalFunction local;
  bool cacheable = true;
  bool takes_random_stream = false;
  bool gathers_view = false;  // the operation is a view, but its input is gathered first
};

// Calls visit(tensor, arg, element) for each defined tensor among the arguments. `arg` is the position in the schema.
// `element` is the position in a tensor list, or -1 for an argument that is not a list.
template <class Visit>
void for_each_tensor(const OpInfo& op, c10::ArrayRef<c10::IValue> args, const Visit& visit) {
  for (const int arg : op.tensor_args) {
    if (args[arg].isTensor()) {
      if (args[arg].toTensor().defined()) visit(args[arg].toTensor(), arg, -1);
    } else if (args[arg].isList()) {
      int element = 0;
      for (const c10::IValue& value : args[arg].toListRef()) {
        if (value.isTensor() && value.toTensor().defined()) visit(value.toTensor(), arg, element);
        ++element;
      }
    }
  }
}

// Returns `value`, a tensor or a tensor list, with each defined tensor replaced by map(tensor, element). `element` is
// the position in the list, or -1 if `value` is a tensor.
template <class Map>
c10::IValue map_tensors(const c10::IValue& value, const Map& map) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(map(value.toTensor(), -1)) : value;
  if (!value.isList()) return value;
  const auto elements = value.toListRef();
  if (value.isTensorList()) {
    c10::List<at::Tensor> mapped;
    mapped.reserve(elements.size());
    for (size_t i = 0; i < elements.size(); ++i) {
      const at::Tensor& tensor = elements[i].toTensor();
      mapped.push_back(tensor.defined() ? at::Tensor(map(tensor, static_cast<int>(i))) : tensor);
    }
    return mapped;
  }
  c10::List<std::optional<at::Tensor>> mapped;
  for (size_t i = 0; i < elements.size(); ++i) {
    std::optional<at::Tensor> element;
    if (elements[i].isTensor() && elements[i].toTensor().defined()) {
      element = map(elements[i].toTensor(), static_cast<int>(i));
    }
    mapped.push_back(std::move(element));
  }
  return mapped;
}

// Whether the local tensor is a view of a gathered copy (GatheredView in run_plan.cc).
inline bool is_gathered_view(const at::Tensor& tensor) {
  return tensor.defined() && is_dtensor_impl(*tensor.unsafeGetTensorImpl()) && impl_of(tensor)->is_gathered_view();
}

// Dispatch keys with which an autograd kernel of this library redispatches to libtorch's own autograd kernel.
inline c10::DispatchKeySet keys_of_all_backends(c10::DispatchKeySet keys) {
  return (keys & c10::after_autograd_keyset).add(c10::DispatchKey::AutogradOther);
}

// Calls the operation on local tensors. `keys` are the dispatch keys of these tensors.
inline void call_local(const OpInfo& op, c10::DispatchKeySet keys, Stack& stack) {
  // Most operations have no kernel for the keys in kLazy. redispatchBoxed() does not skip a key without a kernel.
  // callBoxed() does, so it is used if `keys` has one of these keys.
  constexpr c10::DispatchKeySet kLazy(
      {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor});
  if (keys.has_any(kLazy)) [[unlikely]] {
    op.handle.callBoxed(stack);
  } else {
    op.handle.redispatchBoxed(keys, &stack);
  }
}

// Returns a pointer to the first argument of a call. The arguments are the last values of the stack.
inline c10::IValue* arguments_of(const OpInfo& op, Stack& stack) {
  return stack.data() + (stack.size() - op.args.size());
}
// Replaces the arguments at the end of the stack by `results`.
inline void finish_call(const OpInfo& op, Stack& stack, std::initializer_list<c10::IValue> results) {
  torch::jit::drop(stack, op.args.size());
  stack.insert(stack.end(), results.begin(), results.end());
}

// The argument of a LocalFunction (Proposal::local). The stack ends with the operation's arguments, with local tensors
// instead of DTensors. The LocalFunction must replace the arguments by the operation's results.
struct LocalCall {
  const OpInfo& op;
  Stack& stack;
  const DeviceMesh& mesh;
  c10::DispatchKeySet keys;  // dispatch keys of the local tensors
  void call() const { call_local(op, keys, stack); }
  c10::IValue& arg(size_t i) const { return arguments_of(op, stack)[i]; }
  void finish(std::initializer_list<c10::IValue> results) const { finish_call(op, stack, results); }
};

// Makes the plan for a call with these arguments from the operation's rule. Error kShape when there is no rule, or when
// no placements are legal.
std::shared_ptr<const Plan> make_plan(const OpInfo& op, c10::ArrayRef<c10::IValue> args);
// Runs the operation with the arguments at the end of the stack and replaces them by the results. COLLECTIVE over the
// mesh if the plan redistributes an input.
void run_plan(const OpInfo& op, const std::shared_ptr<const Plan>& plan, Stack& stack);
// Pairs (output index, placements) of outputs that are written to an argument and must have its placements.
using FixedOutputs = std::vector<std::pair<size_t, Placements>>;
// Returns the legal placements of inputs and outputs for which redistributing the inputs costs least. Error kShape when
// no placements are legal.
PlacementChoice choose(const OpCall& call, const Proposal& proposal, size_t output_count, const FixedOutputs& fixed);
// Output shapes, found by running the operation on meta tensors of the global shapes. moved[i] is true if input i is
// redistributed first. If the operation is a view, such an input has the strides gathered_copy_strides().
std::vector<OutputShape> infer_outputs(const OpCall& call, const std::vector<bool>& moved = {});

// Fills in the strides and dtypes that the rule does not give, by running the operation on meta tensors. `inferred` is
// true if proposal.outputs are the result of infer_outputs() for inputs that are not redistributed.
void complete_outputs(const OpCall& call, const PlacementChoice& choice, bool inferred, Proposal& proposal);
// Whether the type is Tensor, Tensor?, or a list of these.
bool holds_tensors(const c10::Type& type);

// Whether an operation has a CompositeImplicitAutograd kernel and no CPU kernel: it is composed of other operations,
// and autograd differentiates these.
bool is_composite(const c10::OperatorHandle& op);
// Runs the CompositeExplicitAutograd kernel of an operation on the DTensors. Each operation that this kernel calls is
// dispatched by its own rule.
void decompose(const OpInfo& op, c10::DispatchKeySet keys, Stack* stack);

// Finds the rule in the tables of rules/ or among the rules of register_rule(); null when there is none.
const Rule* find_rule(const OpInfo& op);
// The register_ functions below register kernels for DTensors: in `dtensor` at the key PrivateUse3, below autograd, and
// in `autograd` at the key AutogradPrivateUse3, instead of libtorch's autograd kernels. register_composites registers
// the composite operations that composites.cc rewrites.
void register_composites(torch::Library& dtensor, torch::Library& autograd);
// Registers composite operations that return new tensors (gathering_composites.cc). If a view inside such an operation
// cannot share memory with the local tensor because a dim is sharded unevenly, the dim is gathered. Operations that
// already have a kernel for DTensors are skipped, so call this function after the other register_ functions.
void register_gathering_composites(torch::Library& dtensor, torch::Library& autograd);
// Registers linear and matmul, which fold the leading dims of operands with more than two dims
// (rules/products/folded_product.cc).
void register_folded_products(torch::Library& dtensor, torch::Library& autograd);
// Registers the view operations with autograd's view replay enabled (view_replay.cc).
void register_view_replay(torch::Library& autograd);
// Registers operations whose operands are redistributed before autograd saves them (operand_layout.cc).
void register_operand_layouts(torch::Library& autograd);
// Returns the operation "ns::op.overload", or all overloads of "ns::op".
std::vector<c10::OperatorHandle> operations_named(const std::string& name);
// Registers kernels for operations of a namespace other than aten, so that rules for them take effect.
void ensure_kernels_of(const std::vector<c10::OperatorHandle>& operations);
// Returns the handler of an operation, or null. Calls of an operation with a handler go to the handler and not to the
// rule: item(), equal(), refused operations, log_softmax and nll_loss (which LossParallel changes).
Handler find_handler(const std::string& name);

}  // namespace tessera
