// What is known of an operation (OpEntry), and what was decided for one kind of call of it (Plan).
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

struct OpEntry;
// Takes over a call entirely: finds its arguments at the end of the stack and leaves the results.
using Handler = void (*)(const OpEntry& op, c10::DispatchKeySet keys, Stack* stack);

struct ArgInfo {
  std::string name;
  bool tensors = false;  // a tensor or a list of tensors
  bool mutated = false;
  bool out = false;
};

struct OpEntry {
  explicit OpEntry(const c10::OperatorHandle& op);
  int arg_named(const char* argument) const;  // position in the schema; -1 when there is none
  c10::OperatorHandle handle;
  std::string name;  // "aten::add_.Tensor"
  std::vector<ArgInfo> args;
  std::vector<int> tensor_args;
  std::vector<int> return_alias;  // for each return: the argument it is, or -1
  bool mutates = false;           // writes to some argument
  int view_of = -1;               // the argument that a result is a view of, or -1
  int written_if = -1;            // the argument that says whether it does, -1 for always
  bool in_place_view = false;     // changes the shape of an argument
  uint64_t id;                    // in cache keys
  // Looked up at the first call; atomic because ranks may be threads.
  mutable std::atomic<const Rule*> rule{nullptr};
  mutable std::atomic<Handler> handler{nullptr};
};

// A result, alike on all ranks: what decides by strides or dtype decides alike.
struct TensorSpec {
  PlacementsPtr placements;
  Sizes sizes;
  Sizes strides;        // empty: contiguous
  bool view = false;    // lies in the memory of an operand; else the part is brought to lie as the whole does
  Sizes local_strides;  // unless contiguous or a view: of the part
  at::ScalarType dtype = at::ScalarType::Undefined;  // on ranks outside the mesh
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
    Steps steps;
    PlacementsPtr to;
  };
  std::vector<Redistribution> redistributions;  // in the order of arguments and elements
  Rewrites rewrites;
  std::vector<OutputPlan> outputs;
  LocalFunction local;
  bool cacheable = true;
  bool random = false;
  bool copies_view = false;  // results are views by their schema, but of a gathered copy
};

// Calls visit(tensor, arg, element) for each defined tensor among the arguments; element is its place in a list, or -1.
template <class Visit>
void for_each_tensor(const OpEntry& op, c10::ArrayRef<c10::IValue> args, const Visit& visit) {
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

// A tensor argument or a list of tensors, with map(tensor, element) in place of each defined tensor; element as above.
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

// Whether the part of a tensor is a view of a gathered copy.
inline bool is_copied_view(const at::Tensor& tensor) {
  return tensor.defined() && is_dtensor_impl(*tensor.unsafeGetTensorImpl()) && impl_of(tensor)->is_copied_view();
}

// The keys with which a kernel for autograd goes on to what libtorch has for all back-ends.
inline c10::DispatchKeySet keys_of_all_backends(c10::DispatchKeySet keys) {
  return (keys & c10::after_autograd_keyset).add(c10::DispatchKey::AutogradOther);
}

// Calls the operation on local tensors, which have these keys.
inline void call_local(const OpEntry& op, c10::DispatchKeySet keys, Stack& stack) {
  // Most operations have no kernel for these, which redispatching does not skip.
  constexpr c10::DispatchKeySet kLazy(
      {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor});
  if (keys.has_any(kLazy)) [[unlikely]] {
    op.handle.callBoxed(stack);
  } else {
    op.handle.redispatchBoxed(keys, &stack);
  }
}

// The arguments of a call, with which the stack ends.
inline c10::IValue* arguments_of(const OpEntry& op, Stack& stack) {
  return stack.data() + (stack.size() - op.args.size());
}
// Drops the arguments and pushes the results.
inline void finish_call(const OpEntry& op, Stack& stack, std::initializer_list<c10::IValue> results) {
  torch::jit::drop(stack, op.args.size());
  stack.insert(stack.end(), results.begin(), results.end());
}

// What a rule's own local function works on: the stack ends with the operation's arguments, tensors already local, and
// must end with its results instead.
struct LocalCall {
  const OpEntry& op;
  Stack& stack;
  const DeviceMesh& mesh;
  c10::DispatchKeySet keys;  // of the local tensors
  void call() const { call_local(op, keys, stack); }
  c10::IValue& arg(size_t i) const { return arguments_of(op, stack)[i]; }
  void finish(std::initializer_list<c10::IValue> results) const { finish_call(op, stack, results); }
};

// Runs the rule of the operation on these arguments. Error kShape when there is no rule or no legal way.
std::shared_ptr<const Plan> make_plan(const OpEntry& op, c10::ArrayRef<c10::IValue> args);
// Puts the results of a call in place of its arguments, at the end of the stack. COLLECTIVE over the mesh where the
// plan redistributes.
void run_plan(const OpEntry& op, const std::shared_ptr<const Plan>& plan, Stack& stack);
// Outputs that must lie in a given way because they are written to an argument.
using FixedOutputs = std::vector<std::pair<size_t, Placements>>;
// Of the legal combinations, the one that moves least. Error kShape when none is left.
Choice choose(const OpCall& call, const Proposal& proposal, size_t output_count, const FixedOutputs& fixed);
// Shapes of the results of the operation on meta tensors of the global shapes. moved: inputs that are redistributed
// first and so contiguous.
std::vector<OutputShape> infer_outputs(const OpCall& call, const std::vector<bool>& moved = {});

// Fills in strides and dtypes that the rule leaves open, from the operation on meta tensors. inferred: the proposal's
// outputs come from there already, of the inputs as they lie.
void complete_outputs(const OpCall& call, const Choice& choice, bool inferred, Proposal& proposal);
// A tensor or a list of them, optional or not.
bool holds_tensors(const c10::Type& type);

// Whether an operation is made of other operations, also for autograd.
bool is_composite(const c10::OperatorHandle& op);
// Takes an operation apart that is written in terms of others: on global shapes, what it calls has its own rules.
void decompose(const OpEntry& op, c10::DispatchKeySet keys, Stack* stack);

// The tables of rules/ and what was added by register_rule.
const Rule* find_rule(const OpEntry& op);
// The registrations below take the libraries of aten's kernels for DTensors: below autograd, and in its place.
// Kernels of composite operations that are replaced for DTensors.
void register_composites(torch::Library& dtensor, torch::Library& autograd);
// Operations made of others that give new tensors: their views may gather: gathering_composites.cc. After all others.
void register_gathering_composites(torch::Library& dtensor, torch::Library& autograd);
// linear and matmul of more than two dims: rules/folded_product.cc.
void register_folded_products(torch::Library& dtensor, torch::Library& autograd);
// Lets autograd take views of DTensors again: view_replay.cc.
void register_view_replay(torch::Library& autograd);
// Operations whose operands are laid out before autograd saves them: operand_layout.cc.
void register_operand_layouts(torch::Library& autograd);
// "ns::op.overload", or all overloads of "ns::op".
std::vector<c10::OperatorHandle> operations_named(const std::string& name);
// Gives operations of a namespace other than aten their kernels, so that rules for them take effect.
void ensure_kernels_of(const std::vector<c10::OperatorHandle>& operations);
// Handlers take over a call that has no sharding of its own: item(), equal(), refusals. Null for other operations.
Handler find_handler(const std::string& name);

}  // namespace tessera
