// Sharding rules: how an operation computes on the local tensors of its operands. docs/design/dtensor.md explains how
// to add a rule.
//
//   // my::scale(Tensor x, Tensor gain) -> Tensor: rows are independent, gain is whole on every rank.
//   register_rule("my::scale", [](const OpCall& call, Proposal& proposal) {
//     proposal.strategies.push_back({.outputs = {Shard(0)}, .inputs = {Shard(0), Replicate()}});
//     proposal.output(call.inputs[0].sizes);
//   });
//
// A rule runs when a thread first sees a combination of shapes, placements and arguments; the resulting plan is cached.
// A rule must not communicate and must give the same answer on all ranks of the mesh. Rules may run on several threads
// at the same time. register_rule is thread-safe; call it before the operation is first used on a DTensor.
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
// A tensor among the arguments of a call. Each element of a tensor list is an input of its own. Undefined tensors and
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

// One call of an operation, as rules see it.
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
  // The call with shapes and placements for messages: "aten::add.Tensor(self: [4, 8] (S(0)), other: [8] (R))".
  std::string describe() const;
};

// A legal combination on ONE mesh dim: if the inputs have these placements, the operation on the local tensors gives
// outputs with these placements.
struct Strategy {
  c10::SmallVector<Placement, 4> outputs;  // one for each returned tensor; each element of a list counts
  c10::SmallVector<Placement, 4> inputs;   // one for each entry of OpCall::inputs
};

// Placements of all inputs and outputs over the whole mesh.
struct PlacementChoice {
  std::vector<Placements> inputs;
  std::vector<Placements> outputs;
};

// Global shape of one result.
struct OutputShape {
  std::vector<int64_t> sizes;
  // Global strides. Empty: the strides that the operation gives on operands with these global strides; contiguous if
  // all operands are contiguous.
  std::vector<int64_t> strides = {};
  std::optional<at::ScalarType> dtype =
      std::nullopt;  // needed if there is no meta kernel and the dtype differs from the first operand's
};

// Arguments (schema position, value) that replace the caller's arguments when the operation runs on local tensors.
using Rewrites = std::vector<std::pair<int, c10::IValue>>;

// Runs on every rank of the mesh with local tensors as arguments; dispatch/plan.h declares LocalCall.
using LocalFunction = std::function<void(const LocalCall&)>;

struct Proposal {
  // Legal combinations, in order of preference at equal cost. "All replicated" is always legal and need not be listed.
  // The combination with the lowest cost of redistribution is chosen. Strategies with shards are considered only if
  // some input is sharded.
  std::vector<Strategy> strategies;
  // Used instead of `strategies` by a rule whose strategies differ between mesh dims: one list for each mesh dim.
  std::vector<std::vector<Strategy>> by_mesh_dim;
  // Used instead of `strategies` by a rule that chooses the placements over the whole mesh itself.
  std::optional<PlacementChoice> choice = std::nullopt;
  // true: strategies with shards are considered also if no input is sharded. A Partial input is then reduce-scattered.
  bool allows_new_shards = false;
  // true: every Shard in `strategies` may also be a StridedShard, so the rule is correct for inputs with several pieces
  // a rank.
  bool supports_strided = true;
  // false: the operation fails on a local tensor without elements, so no input is sharded so finely that a rank gets
  // none.
  bool supports_empty_shards = true;
  // Whether the result is correct with these placements. Choices for which it returns false are not used. It must
  // accept "all replicated".
  std::function<bool(const OpCall&, const PlacementChoice&)> is_legal;
  // true: raise an error instead of redistributing inputs. Views need it because they must alias.
  bool forbids_redistribution = false;
  std::string forbids_reason;  // reason for it, part of the message
  // Shapes of the returned tensors. Empty: they are found by running the operation on meta tensors.
  std::vector<OutputShape> outputs;
  // For an operation without a meta kernel and with one result: the result has the strides of a pointwise operation on
  // the same operands.
  bool has_pointwise_strides = false;
  // Returns the arguments that must change for the local tensors, for the chosen placements.
  std::function<Rewrites(const OpCall&, const PlacementChoice&, const std::vector<OutputShape>&)> rewrite;
  // false: the plan is used for this call only, because the answer depends on more than the arguments.
  bool cacheable = true;
  // Returns the function that runs on the local tensors instead of the operation, or nullptr to run the operation
  // itself.
  std::function<LocalFunction(const OpCall&, const PlacementChoice&)> local;

  // The operation takes one stream of random numbers (random/random_fill.h) on every rank, also on ranks outside the
  // mesh.
  bool takes_random_stream = false;

  void output(c10::IntArrayRef sizes) { outputs.push_back({sizes.vec(), {}}); }
};

using Rule = std::function<void(const OpCall&, Proposal&)>;

// Registers a rule. `name` is "ns::op.overload", or "ns::op" for all overloads of an operation including its in-place,
// out= and _foreach_ forms. A rule for an overload has priority over a rule for "ns::op", and registered rules have
// priority over built-in rules. Error kInternal for a name that has a rule. Error kShape for a name without an
// operation, and for operations that never ask for a rule: operations composed of others (linear, einsum) and
// operations whose output shape depends on values (nonzero, item).
void register_rule(const std::string& name, Rule rule);

}  // namespace tessera
