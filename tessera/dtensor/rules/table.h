// The table of sharding rules, the add_ functions that fill it (one for each family of operations), and helpers for
// writing rules. The first call of find_rule() fills the table.
#pragma once

#include <string>
#include <unordered_map>

#include "tessera/dtensor/dispatch/plan.h"
#include "tessera/dtensor/dispatch/rule.h"

namespace tessera {

class RuleTable {
 public:
  // Adds a rule. The name "aten::add" stands for every overload of add, add_ and _foreach_add, including out= forms;
  // "aten::max.dim" stands for one overload.
  void add(const std::string& name, Rule rule);
  void add(std::initializer_list<const char*> names, const Rule& rule);
  void replace(const std::string& name, Rule rule) { rules_.insert_or_assign(name, std::move(rule)); }
  const Rule* find(const std::string& name) const;

 private:
  std::unordered_map<std::string, Rule> rules_;
};

void add_pointwise_rules(RuleTable& table);
void add_like_rules(RuleTable& table);
void add_matmul_rules(RuleTable& table);
void add_reduction_rules(RuleTable& table);
void add_along_dim_rules(RuleTable& table);
void add_view_rules(RuleTable& table);
void add_dims_rules(RuleTable& table);
void add_cat_rules(RuleTable& table);
void add_embedding_rules(RuleTable& table);
void add_loss_rules(RuleTable& table);
void add_norm_layer_rules(RuleTable& table);
void add_attention_rules(RuleTable& table);
void add_optimizer_rules(RuleTable& table);
void add_random_rules(RuleTable& table);
void add_elementwise_loss_rules(RuleTable& table);
void add_arg_extreme_rules(RuleTable& table);
void add_index_rules(RuleTable& table);
void add_index_write_rules(RuleTable& table);
void add_pad_rules(RuleTable& table);
void add_spatial_rules(RuleTable& table);
void add_convolution_rules(RuleTable& table);
void add_batch_norm_rules(RuleTable& table);
void add_linalg_rules(RuleTable& table);
void add_fft_rules(RuleTable& table);
void add_grouped_matmul_rules(RuleTable& table);
void add_fused_attention_rules(RuleTable& table);
void add_reinterpreting_view_rules(RuleTable& table);
void add_factory_rules(RuleTable& table);

// As register_rule, but replaces a rule that `name` has already. The new rule has priority over all built-in rules,
// also over rules for single overloads.
void replace_rule(const std::string& name, Rule rule);

// Makes a rule for lists of tensors from a rule for single tensors. The rule is applied to the tensors at each position
// of the lists. A tensor argument that is not a list gets one placement for all positions; if it has one number for
// each position, it is replicated.
Rule zip_rule(Rule rule);

// Returns whether `handler` calls dispatch_by_rule() for some calls. Only in this case is a rule that is registered for
// the handler's operation ever used.
bool dispatches_by_rule(Handler handler);
// Defined in view_write.cc.
void handle_new_empty_strided(const OpInfo& op, c10::DispatchKeySet keys, Stack* stack);
// These four handlers are defined in loss_parallel.cc. While no LossParallel object exists, they call
// dispatch_by_rule().
void handle_log_softmax(const OpInfo& op, c10::DispatchKeySet keys, Stack* stack);
void handle_log_softmax_backward(const OpInfo& op, c10::DispatchKeySet keys, Stack* stack);
void handle_nll_loss(const OpInfo& op, c10::DispatchKeySet keys, Stack* stack);
void handle_nll_loss_backward(const OpInfo& op, c10::DispatchKeySet keys, Stack* stack);

// Raises Error kShape because a written argument would have to be redistributed to `target`.
[[noreturn]] void refuse_in_place(const OpCall& call, const TensorInput& input, const Placements& target);

// Returns the shape to which all inputs of the call broadcast.
Sizes broadcast_sizes(const OpCall& call);
// Returns the distinct Partial placements of the inputs that a rule may give to its outputs. Partial(sum) of booleans
// is left out: it is reduced as "any", but as an output of another dtype it would be reduced by adding. Sums and
// products of small integers are left out, too: they wrap around in their own dtype, but would not wrap around in an
// output of a wider dtype.
c10::SmallVector<Placement, 2> partials_among(const OpCall& call);
// Whether the input is sharded along `dim` on any mesh dim.
bool is_sharded_on(const TensorInput& input, int64_t dim);
// Whether the type is an integer type of less than 32 bits. Its sums wrap around, so x <= y does not imply x + z <= y +
// z, and they differ from sums in a wider type.
inline bool is_small_integer(at::ScalarType type) {
  return at::isIntegralType(type, /*includeBool=*/false) && c10::elementSize(type) < 4;
}
// Whether p is Partial(sum) or Partial(avg). These reductions commute with linear operations.
inline bool is_additive(const Placement& p) { return p.is_partial(ReduceOp::kSum) || p.is_partial(ReduceOp::kAvg); }
inline bool is_extreme(const Placement& p) { return p.is_partial(ReduceOp::kMax) || p.is_partial(ReduceOp::kMin); }
// Returns the strategy in which every input and every output has placement p.
inline Strategy same_placement(const OpCall& call, const Placement& p) {
  return {{p}, c10::SmallVector<Placement, 4>(call.inputs.size(), p)};
}
// Whether p is Partial(avg, max or min). If all ranks have the same value, these reductions give this value.
inline bool is_idempotent(const Placement& p) { return p.is_partial(ReduceOp::kAvg) || is_extreme(p); }
inline bool passes_all(const Placement&) { return true; }
// Returns the strategy of an operation with `count` inputs and one output in which the output and input number `input`
// have placement p, and the other inputs are replicated.
Strategy pass_through(const Placement& p, size_t input, size_t count);
// Adds to `proposal` the strategy pass_through(p, input, ...) for each p in partials_among(call) for which passes(p) is
// true.
void add_pass_through(const OpCall& call, Proposal& proposal, size_t input, bool (*passes)(const Placement&));
// For a result that is linear in input `input`: if this input is Partial(sum) or Partial(avg) and the others are
// replicated, the result has the same placement.
inline void add_linear(const OpCall& call, Proposal& proposal, size_t input) {
  add_pass_through(call, proposal, input, is_additive);
}
// Completes strategy.inputs to one placement for each input of the call: missing ones become Replicate. Surplus
// placements, for optional arguments that the call leaves out, are dropped.
Strategy replicate_rest(const OpCall& call, Strategy strategy);
// Returns the strategy that shards dim `dim` of the broadcast shape. Operands that lack the dim or broadcast in it are
// replicated.
Strategy shard_broadcast_dim(const OpCall& call, c10::IntArrayRef broadcast, int64_t dim);
// Returns the dim of an operand that corresponds to dim `dim` of the broadcast shape; -1 if the operand lacks the dim
// or broadcasts in it.
int64_t operand_dim(const TensorInput& input, c10::IntArrayRef broadcast, int64_t dim);
// Whether a tensor of sizes `from` with these placements can be viewed with sizes `to` without communication.
bool can_view(const DeviceMesh& mesh, c10::IntArrayRef from, const Placements& placements, c10::IntArrayRef to);
// Raises Error kShape if an index is outside [0, n), or outside [-n, n) with from_end. Rules call it where ATen's own
// check does not see all indices, because a rank uses only the indices into its own shard. Indices on other devices
// than the CPU are not checked, because reading them would synchronize with the device.
void check_indices(const std::string& op, const at::Tensor& index, int64_t n, bool from_end = false);
// Global indices along a sharded dim, converted to local indices of this rank's shard. `index` is 0 where the index is
// in another rank's shard.
struct LocalIndices {
  at::Tensor index;
  at::Tensor is_remote;  // true for indices of other ranks' shards
};
LocalIndices to_local_indices(const at::Tensor& index, int64_t offset, int64_t size);
// Returns the global index at which this rank's shard of the first input starts along `dim`. nullopt if `dim` has no
// Shard placement, or on a rank outside the mesh.
std::optional<int64_t> local_offset(const OpCall& call, const PlacementChoice& choice, int64_t dim);
// Returns `dim` as a dim in [0, ndim); Error kShape if it is not in [-ndim, ndim).
int64_t checked_dim(const OpCall& call, int64_t dim, int64_t ndim);
// Returns dim + ndim for a negative `dim`, else `dim`. Does not check the range.
inline int64_t wrap_dim(int64_t dim, int64_t ndim) { return dim < 0 ? dim + std::max<int64_t>(ndim, 1) : dim; }
// Returns the local sizes of a tensor of global sizes `sizes` as an int list argument, for Rewrites.
c10::IValue local_sizes_value(const OpCall& call, c10::IntArrayRef sizes, const Placements& placements);
// Returns a function for Proposal::rewrite that replaces argument `arg` by the local sizes of the first output.
decltype(Proposal::rewrite) with_local_sizes(int arg);
// Returns list[i], or list[0] if the list has one element.
inline int64_t at_or_single(const std::vector<int64_t>& list, size_t i) {
  return list.size() == 1 ? list[0] : list.at(i);
}

}  // namespace tessera
