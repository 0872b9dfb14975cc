// Sharding rules: how an operation computes on the local tensors of its operands. docs/design/dtensor.md explains how
// to add a rule.
//
//   // my::scale(Tensor x, Tensor gain) -> Tensor: rows are independent, gain is replicated.
//   register_rule("my::scale", [](const OpCall& call, Proposal& proposal) {
//     proposal.strategies.push_back({.outputs = {Shard(0)}, .inputs = {Shard(0), Replicate()}});
//     proposal.output(call.inputs[0].sizes);
//   });
//
// A rule runs when a thread first sees a combination of shapes, placements and arguments; the resulting plan is cached.
// A rule must not communicate and must write the same proposal on all ranks of the mesh. Rules may run on several
// threads at the same time. register_rule is thread-safe; call it before the operation is first used on a DTensor.
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

struct OpInfo;
struct LocalCall;
// A tensor among the arguments of a call. A tensor list gives one input for each of its elements. Undefined tensors and
// out= arguments are not inputs.
struct TensorInput {
  int arg;                   // position of the argument in the schema
  int element;               // position in the list; -1 for an argument that is not a list
  const at::Tensor* tensor;  // the DTensor, or a plain tensor that counts as replicated
  Placements placements;
  c10::IntArrayRef sizes;  // global
  bool is_written;         // the operation writes to it
  int64_t dim() const { return static_cast<int64_t>(sizes.size()); }
};

// One call of an operation: what a sharding rule receives.
class OpCall {
 public:
  OpCall(const OpInfo& op, c10::ArrayRef<c10::IValue> args, MeshPtr mesh, std::vector<TensorInput> inputs,
         std::vector<TensorInput> outs = {})
      : op(op), args(args), mesh(std::move(mesh)), inputs(std::move(inputs)), outs(std::move(outs)) {}

  const OpInfo& op;
  c10::ArrayRef<c10::IValue> args;
  MeshPtr mesh;
  std::vector<TensorInput> inputs;
  std::vector<TensorInput> outs;  // the out= arguments, in the order of the results

  const std::string& name() const;            // "aten::add.Tensor"
  int input_at(int arg) const;                // index into inputs of the tensor at a schema position; -1 when undefined
  int arg_named(const char* argument) const;  // schema position of the argument; -1 when there is none
  bool has(int arg) const { return arg >= 0 && !args[arg].isNone(); }
  int64_t int_at(int arg) const { return args[arg].toInt(); }
  bool bool_at(int arg) const { return args[arg].toBool(); }
  std::vector<int64_t> ints_at(int arg) const;  // an int list, or one int as a list; empty for None
  // Returns the call with the shapes and placements of its inputs as a text for error messages: "aten::add.Tensor(self:
  // [4, 8] (S(0)), other: [8] (R))".
  std::string describe() const;
};

// A legal combination of placements on ONE mesh dim: if the inputs have the placements `inputs`, running the operation
// on the local tensors gives outputs with the placements `outputs`.
struct Strategy {
  c10::SmallVector<Placement, 4> outputs;  // one for each returned tensor or element of a returned list
  c10::SmallVector<Placement, 4> inputs;   // one for each entry of OpCall::inputs
};

// Placements of all inputs and outputs, with one placement for each mesh dim.
struct PlacementChoice {
  std::vector<Placements> inputs;
  std::vector<Placements> outputs;
};

// Global shape of one result.
struct OutputShape {
  std::vector<int64_t> sizes;
  // Global strides. Empty: the strides that the operation would give if its operands were plain tensors with their
  // global sizes and strides. If all operands are contiguous, so is the output.
  std::vector<int64_t> strides = {};
  std::optional<at::ScalarType> dtype =
      std::nullopt;  // needed if there is no meta kernel and the dtype differs from the first operand's
};

// Pairs (schema position, value): arguments that replace the caller's arguments when the operation runs on local
// tensors.
using Rewrites = std::vector<std::pair<int, c10::IValue>>;

// A function that runs on every rank of the mesh instead of the operation, with local tensors as arguments.
// dispatch/plan.h declares LocalCall.
using LocalFunction = std::function<void(const LocalCall&)>;

struct Proposal {
  // Legal strategies for each mesh dim. The strategies with the lowest cost of redistributing the inputs are chosen; at
  // equal cost the earlier one in the list. "All replicated" is always legal and need not be listed. Strategies with
  // shards are considered only if some input is sharded.
  std::vector<Strategy> strategies;
  // Used instead of `strategies` by a rule whose strategies differ between mesh dims: by_mesh_dim[m] lists those of
  // mesh dim m.
  std::vector<std::vector<Strategy>> by_mesh_dim;
  // Used instead of `strategies` by a rule that itself chooses the placements on all mesh dims.
  std::optional<PlacementChoice> choice = std::nullopt;
  // true: strategies with shards are considered also if no input is sharded. A Partial input is then reduce-scattered.
  bool allows_new_shards = false;
  // true: every Shard in `strategies` may also be a StridedShard, because the rule is correct also if a rank holds
  // several separate pieces of a sharded dim.
  bool supports_strided = true;
  // false: the operation fails on a local tensor without elements, so placements that leave a rank without elements are
  // not chosen.
  bool supports_empty_shards = true;
  // Returns whether the result of the call is correct with the placements of the PlacementChoice. A choice for which
  // is_legal returns false is not used. Must return true if all inputs are replicated. Null: every choice is legal.
  std::function<bool(const OpCall&, const PlacementChoice&)> is_legal;
  // true: the call raises an error if an input would have to be redistributed. View operations set this, because a view
  // must share the input's memory.
  bool forbids_redistribution = false;
  std::string forbids_reason;  // why forbids_redistribution is set; part of the error message
  // Global shapes of the returned tensors. Empty: the dispatch finds the shapes by running the operation on meta
  // tensors.
  std::vector<OutputShape> outputs;
  // Set by rules for operations without a meta kernel and with one result. true: the result has the strides that a
  // pointwise operation on the same operands would give.
  bool has_pointwise_strides = false;
  // Returns the arguments that must be replaced when the operation runs on local tensors with the chosen placements,
  // such as sizes. Null: none.
  std::function<Rewrites(const OpCall&, const PlacementChoice&, const std::vector<OutputShape>&)> rewrite;
  // false: the plan is used for this call only, because the rule's proposal depends on more than the arguments.
  bool cacheable = true;
  // Returns the function that runs on the local tensors instead of the operation, or nullptr to run the operation
  // itself.
  std::function<LocalFunction(const OpCall&, const PlacementChoice&)> local;

  // true: each call of the operation uses one stream of random numbers (random/random_fill.h). Ranks outside the mesh
  // increment their count of random operations, too, so that the count stays equal on all ranks.
  bool takes_random_stream = false;

  void output(c10::IntArrayRef sizes) { outputs.push_back({sizes.vec(), {}}); }
};

using Rule = std::function<void(const OpCall&, Proposal&)>;

// Registers a rule. `name` is "ns::op.overload", or "ns::op" for all overloads of an operation including its in-place,
// out= and _foreach_ forms. A rule for an overload has priority over a rule for "ns::op", and registered rules have
// priority over built-in rules. Error kInternal for a name that has a rule already. Error kShape if no operation has
// the name, and for operations that never use a rule: composite operations (linear, einsum) and operations whose output
// shape depends on values (nonzero, item).
void register_rule(const std::string& name, Rule rule);

}  // namespace tessera
