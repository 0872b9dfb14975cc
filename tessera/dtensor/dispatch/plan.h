// Facts about an operation (OpInfo), and the decisions for one kind of call of it (Plan).
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
// Runs a call without a plan. It takes the arguments from the end of the stack and leaves the results there.
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
  // `rule` and `handler` are set at the operation's first call. They are atomic because ranks may be threads.
  mutable std::atomic<const Rule*> rule{nullptr};
  mutable std::atomic<Handler> handler{nullptr};
};

// Layout of a result. It is the same on all ranks, so a decision from strides or dtype is the same on all ranks, too.
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
  int argument = -1;  // kArgument
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
  bool gathers_view = false;  // the results are views by their schema, here of a gathered copy
};

// Calls visit(tensor, arg, element) for each defined tensor among the arguments. `element` is the position in a list,
// or -1.
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

// Returns a tensor or tensor list in which each defined tensor is replaced by map(tensor, element); `element` as above.
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

// Whether the local tensor is a view of a gathered copy (GatheredView).
inline bool is_gathered_view(const at::Tensor& tensor) {
  return tensor.defined() && is_dtensor_impl(*tensor.unsafeGetTensorImpl()) && impl_of(tensor)->is_gathered_view();
}

// Dispatch keys with which an autograd kernel continues to libtorch's autograd kernel for all back-ends.
inline c10::DispatchKeySet keys_of_all_backends(c10::DispatchKeySet keys) {
  return (keys & c10::after_autograd_keyset).add(c10::DispatchKey::AutogradOther);
}

// Calls the operation on local tensors. `keys` are the dispatch keys of these tensors.
inline void call_local(const OpInfo& op, c10::DispatchKeySet keys, Stack& stack) {
  // Most operations have no kernel for the lazy keys. Redispatching does not skip a key without a kernel, a normal call
  // does.
  constexpr c10::DispatchKeySet kLazy(
      {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor});
  if (keys.has_any(kLazy)) [[unlikely]] {
    op.handle.callBoxed(stack);
  } else {
    op.handle.redispatchBoxed(keys, &stack);
  }
}

// The arguments of a call, which are at the end of the stack.
inline c10::IValue* arguments_of(const OpInfo& op, Stack& stack) {
  return stack.data() + (stack.size() - op.args.size());
}
// Replaces the arguments at the end of the stack by the results.
inline void finish_call(const OpInfo& op, Stack& stack, std::initializer_list<c10::IValue> results) {
  torch::jit::drop(stack, op.args.size());
  stack.insert(stack.end(), results.begin(), results.end());
}

// The call that a rule's local function works on. The stack ends with the operation's arguments, in which tensors are
// local. The function must replace the arguments by the operation's results.
struct LocalCall {
  const OpInfo& op;
  Stack& stack;
  const DeviceMesh& mesh;
  c10::DispatchKeySet keys;  // dispatch keys of the local tensors
  void call() const { call_local(op, keys, stack); }
  c10::IValue& arg(size_t i) const { return arguments_of(op, stack)[i]; }
  void finish(std::initializer_list<c10::IValue> results) const { finish_call(op, stack, results); }
};

// Runs the rule of the operation on these arguments. Error kShape when there is no rule or no legal combination.
std::shared_ptr<const Plan> make_plan(const OpInfo& op, c10::ArrayRef<c10::IValue> args);
// Replaces the arguments at the end of the stack by the results of the call. COLLECTIVE over the mesh if the plan
// redistributes.
void run_plan(const OpInfo& op, const std::shared_ptr<const Plan>& plan, Stack& stack);
// Outputs (index, placements) whose placements are fixed because they are written to an argument.
using FixedOutputs = std::vector<std::pair<size_t, Placements>>;
// Returns the legal combination that is cheapest to reach. Error kShape when there is none.
PlacementChoice choose(const OpCall& call, const Proposal& proposal, size_t output_count, const FixedOutputs& fixed);
// Output shapes, found by running the operation on meta tensors of the global shapes. `moved` marks inputs that are
// redistributed first; a moved input of a view is dense (gathered_copy_strides).
std::vector<OutputShape> infer_outputs(const OpCall& call, const std::vector<bool>& moved = {});

// Fills in the strides and dtypes that the rule does not give, from the operation on meta tensors. `inferred`: the
// proposal's outputs already come from infer_outputs() with no input moved.
void complete_outputs(const OpCall& call, const PlacementChoice& choice, bool inferred, Proposal& proposal);
// Whether the type is a tensor or a list of tensors, optional or not.
bool holds_tensors(const c10::Type& type);

// Whether an operation is composed of other operations and has autograd through them (CompositeImplicitAutograd).
bool is_composite(const c10::OperatorHandle& op);
// Runs the composite kernel of an operation on the DTensors; the operations that the kernel calls have rules of their
// own.
void decompose(const OpInfo& op, c10::DispatchKeySet keys, Stack* stack);

// Finds the rule in the tables of rules/ or among the rules of register_rule(); null when there is none.
const Rule* find_rule(const OpInfo& op);
// The functions below register kernels for DTensors. `dtensor` is the library below autograd, `autograd` the one that
// replaces autograd kernels. This one registers composite operations that are rewritten for DTensors.
void register_composites(torch::Library& dtensor, torch::Library& autograd);
// Composite operations that return new tensors; views inside may gather (gathering_composites.cc). Call it after all
// others.
void register_gathering_composites(torch::Library& dtensor, torch::Library& autograd);
// linear and matmul of tensors with more than two dims (rules/products/folded_product.cc).
void register_folded_products(torch::Library& dtensor, torch::Library& autograd);
// Lets autograd compute views of DTensors again (view_replay.cc).
void register_view_replay(torch::Library& autograd);
// Operations whose operands are redistributed before autograd saves them (operand_layout.cc).
void register_operand_layouts(torch::Library& autograd);
// The operations with the name "ns::op.overload", or all overloads of "ns::op".
std::vector<c10::OperatorHandle> operations_named(const std::string& name);
// Registers kernels for operations of a namespace other than aten, so that rules for them take effect.
void ensure_kernels_of(const std::vector<c10::OperatorHandle>& operations);
// The handler that takes over a call before the operation's rule is used: item(), equal(), refused operations, losses
// in a LossParallel scope. Null for other operations.
Handler find_handler(const std::string& name);

}  // namespace tessera
