// Sharding rules: how an operation computes on the parts of its operands. docs/design/dtensor.md says how to add one.
//
//   // my::scale(Tensor x, Tensor gain) -> Tensor: rows are independent, gain is whole on every rank.
//   register_rule("my::scale", [](const OpCall& call, Proposal& proposal) {
//     proposal.strategies.push_back({.outputs = {Shard(0)}, .inputs = {Shard(0), Replicate()}});
//     proposal.output(call.inputs[0].sizes);
//   });
//
// A rule runs when a combination of shapes, placements and arguments is met for the first time on a thread; its answer
// is kept. It must not communicate and must answer alike on all ranks of the mesh. Rules may run on several threads at
// once. register_rule is thread-safe; call it before the operation is first used on a DTensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/dtensor/tensor/placement.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera {

struct OpEntry;
struct LocalCall;
// A tensor among the arguments; elements of lists count one by one, undefined ones not at all, out= arguments neither.
struct TensorInput {
  int arg;                   // position in the schema
  int element;               // position in the list; -1 for a tensor of its own
  const at::Tensor* tensor;  // the DTensor, or a plain tensor that counts as replicated
  Placements placements;
  c10::IntArrayRef sizes;  // global
  bool mutated;            // the operation writes to it
  int64_t dim() const { return static_cast<int64_t>(sizes.size()); }
};

// One call of an operation, as rules see it.
class OpCall {
 public:
  OpCall(const OpEntry& op, c10::ArrayRef<c10::IValue> args, MeshPtr mesh, std::vector<TensorInput> inputs,
         std::vector<TensorInput> outs = {})
      : op(op), args(args), mesh(std::move(mesh)), inputs(std::move(inputs)), outs(std::move(outs)) {}

  const OpEntry& op;
  c10::ArrayRef<c10::IValue> args;
  MeshPtr mesh;
  std::vector<TensorInput> inputs;
  std::vector<TensorInput> outs;  // the out= arguments, in the order of the results

  const std::string& name() const;            // "aten::add.Tensor"
  int input_at(int arg) const;                // index into inputs of the tensor at a schema position; -1 when undefined
  int arg_named(const char* argument) const;  // schema position; -1 when there is none
  bool has(int arg) const { return arg >= 0 && !args[arg].isNone(); }
  int64_t int_at(int arg) const { return args[arg].toInt(); }
  bool bool_at(int arg) const { return args[arg].toBool(); }
  std::vector<int64_t> ints_at(int arg) const;  // an int list, or one int; empty for none
  // "aten::add.Tensor(self: [4, 8] (S(0)), other: [8] (R))", for messages.
  std::string describe() const;
};

// What holds on ONE mesh dim: if the inputs lie so, the operation on the parts gives outputs that lie so.
struct Strategy {
  c10::SmallVector<Placement, 4> outputs;  // one a returned tensor, elements of lists one by one
  c10::SmallVector<Placement, 4> inputs;   // one an entry of OpCall::inputs
};

// Placements of all inputs and outputs over the whole mesh.
struct Choice {
  std::vector<Placements> inputs;
  std::vector<Placements> outputs;
};

// Of one result, over the whole.
struct OutputShape {
  std::vector<int64_t> sizes;
  // Empty: those of the operation on operands that lie so in memory as the global ones; contiguous where all of them
  // are.
  std::vector<int64_t> strides = {};
  std::optional<at::ScalarType> dtype =
      std::nullopt;  // where the operation has no meta kernel and it is not the first operand's
};

// An argument that is passed to the operation on the parts in place of the caller's.
using Rewrites = std::vector<std::pair<int, c10::IValue>>;

// Runs on every rank of the mesh with the parts as arguments; see detail/plan.h for what it can use.
using LocalFunction = std::function<void(const LocalCall&)>;

struct Proposal {
  // Legal combinations, in order of preference among equals. "All replicated" always counts and need not be listed. The
  // cheapest to reach from the present placements is taken. Strategies with shards count only when some input is
  // sharded.
  std::vector<Strategy> strategies;
  // For a rule whose strategies differ between mesh dims: one list each, instead of `strategies`.
  std::vector<std::vector<Strategy>> by_mesh_dim;
  // For a rule that decides over the whole mesh itself, instead of strategies.
  std::optional<Choice> choice = std::nullopt;
  // Strategies with shards count also when no input is sharded: a partial input is then reduced to parts.
  bool scatters = false;
  // A rule for inputs cut in several pieces too: every Shard in `strategies` may as well be a StridedShard.
  bool strided = true;
  // False: the operation cannot work on a part without elements, so nothing is cut into more parts than have some.
  bool empty_parts = true;
  // Whether the result is right on such parts; what it refuses is not chosen. "All replicated" must pass.
  std::function<bool(const OpCall&, const Choice&)> legal;
  // An error instead of a redistribution of inputs (views must alias).
  bool strict = false;
  std::string strict_reason;  // why, for the message
  // Of the returned tensors. Empty: found by running the operation on meta tensors.
  std::vector<OutputShape> outputs;
  // Where no meta kernel says how the one result lies: as a pointwise operation's of these operands.
  bool lies_as_pointwise = false;
  // Arguments that must change for the parts, given what was chosen.
  std::function<Rewrites(const OpCall&, const Choice&, const std::vector<OutputShape>&)> rewrite;
  // False: the answer holds for this call only, as it depends on more than arguments.
  bool cacheable = true;
  // What runs on the parts instead of the operation itself; may give nothing for the operation as it is.
  std::function<LocalFunction(const OpCall&, const Choice&)> local;

  // The operation takes one stream of random numbers (detail/random.h) on every rank, also outside the mesh.
  bool random = false;

  void output(c10::IntArrayRef sizes) { outputs.push_back({sizes.vec(), {}}); }
};

using Rule = std::function<void(const OpCall&, Proposal&)>;

// `name` is "ns::op.overload", or "ns::op" for all overloads of an operation, its in-place, out= and _foreach_ forms
// included. A rule for an overload goes before one for its name, what is registered before all that is built in. Error
// kInternal for a name that is taken; kShape for one that no operation has, and for operations that never ask for a
// rule: those made of others (linear, einsum) and those whose results depend on values (nonzero, item).
void register_rule(const std::string& name, Rule rule);

}  // namespace tessera
