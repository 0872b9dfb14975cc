// The tables of sharding rules, with one function for each operation family. find_rule() fills the tables at its first
// call.
#pragma once

#include <string>
#include <unordered_map>

#include "tessera/dtensor/dispatch/plan.h"
#include "tessera/dtensor/dispatch/rule.h"

namespace tessera {

class RuleTable {
 public:
  // "aten::add" is a rule for every overload, add_, add.out and _foreach_add; "aten::max.dim" is a rule for one
  // overload.
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

// As register_rule, but `name` may have a rule. The new rule has priority over all built-in rules, also over those of
// overloads.
void replace_rule(const std::string& name, Rule rule);

// Makes a rule for lists of tensors from a rule for single tensors. The rule is applied to each position of the lists.
// Tensor arguments that are not lists must be whole.
Rule zip_rule(Rule rule);

// Whether the handler passes some calls on to the operation's rule.
bool dispatches_by_rule(Handler handler);
// Defined in view_write.cc.
void handle_new_empty_strided(const OpInfo& op, c10::DispatchKeySet keys, Stack* stack);
// Defined in loss_parallel.cc. They dispatch by rule unless a LossParallel is in force.
void handle_log_softmax(const OpInfo& op, c10::DispatchKeySet keys, Stack* stack);
void handle_log_softmax_backward(const OpInfo& op, c10::DispatchKeySet keys, Stack* stack);
void handle_nll_loss(const OpInfo& op, c10::DispatchKeySet keys, Stack* stack);
void handle_nll_loss_backward(const OpInfo& op, c10::DispatchKeySet keys, Stack* stack);

// Raises Error kShape because a written argument would have to be redistributed to `target`.
[[noreturn]] void refuse_in_place(const OpCall& call, const TensorInput& input, const Placements& target);

// The shape that the operands broadcast to.
Sizes broadcast_sizes(const OpCall& call);
// The Partial placements of the inputs, each once, that a rule may pass on. Sums of booleans are left out: their
// reduction is "any", and a consumer would count instead. Sums and products of small integers are left out, too: they
// wrap around, and a consumer of a wider type would not.
c10::SmallVector<Placement, 2> partials_among(const OpCall& call);
// Whether the input is sharded along `dim` on any mesh dim.
bool is_sharded_on(const TensorInput& input, int64_t dim);
// Whether the type is a small integer. Its sums wrap around: they do not keep the order of numbers, and they differ
// from sums in a wider type.
inline bool is_small_integer(at::ScalarType type) {
  return at::isIntegralType(type, /*includeBool=*/false) && c10::elementSize(type) < 4;
}
// Sums and averages pass through linear operations.
inline bool is_additive(const Placement& p) { return p.is_partial(ReduceOp::kSum) || p.is_partial(ReduceOp::kAvg); }
inline bool is_extreme(const Placement& p) { return p.is_partial(ReduceOp::kMax) || p.is_partial(ReduceOp::kMin); }
// Every input and every output has placement p.
inline Strategy same_placement(const OpCall& call, const Placement& p) {
  return {{p}, c10::SmallVector<Placement, 4>(call.inputs.size(), p)};
}
// Whether a value that all ranks write equally reduces to itself.
inline bool is_idempotent(const Placement& p) { return p.is_partial(ReduceOp::kAvg) || is_extreme(p); }
inline bool passes_all(const Placement&) { return true; }
// The output and input number `input` of `count` have placement p; the other inputs are whole.
Strategy pass_through(const Placement& p, size_t input, size_t count);
// Adds this strategy for each Partial of the inputs for which `passes` is true.
void add_pass_through(const OpCall& call, Proposal& proposal, size_t input, bool (*passes)(const Placement&));
// For a result that is linear in one input while the others are whole: sums and averages of that input pass.
inline void add_linear(const OpCall& call, Proposal& proposal, size_t input) {
  add_pass_through(call, proposal, input, is_additive);
}
// Completes a strategy: inputs without a placement are whole. Extra placements, for arguments that the call leaves out,
// are dropped.
Strategy replicate_rest(const OpCall& call, Strategy strategy);
// Shards dim `dim` of the broadcast shape. Operands that lack the dim or have size 1 there are whole.
Strategy shard_broadcast_dim(const OpCall& call, c10::IntArrayRef broadcast, int64_t dim);
// The dim of an operand that corresponds to dim `dim` of the broadcast shape; -1 if it is missing or broadcast.
int64_t operand_dim(const TensorInput& input, c10::IntArrayRef broadcast, int64_t dim);
// Whether a tensor of sizes `from` with these placements can be viewed with sizes `to` without communication.
bool can_view(const DeviceMesh& mesh, c10::IntArrayRef from, const Placements& placements, c10::IntArrayRef to);
// Error kShape for an index outside [0, n), or outside [-n, n) with from_end. It is for operations in which a rank
// reads only the indices of its own shard. The check runs on the CPU only, since it would have to wait for another
// device.
void check_indices(const std::string& op, const at::Tensor& index, int64_t n, bool from_end = false);
// Indices along a sharded dim, relative to this rank's shard; 0 for indices of other ranks' shards.
struct LocalIndices {
  at::Tensor index;
  at::Tensor is_remote;  // true for indices of other ranks' shards
};
LocalIndices to_local_indices(const at::Tensor& index, int64_t offset, int64_t size);
// Offset of this rank's part of the first input along `dim`. nullopt unless a Shard divides the dim, and outside the
// mesh.
std::optional<int64_t> local_offset(const OpCall& call, const PlacementChoice& choice, int64_t dim);
// `dim` made non-negative; Error kShape if it is out of range.
int64_t checked_dim(const OpCall& call, int64_t dim, int64_t ndim);
// `dim` made non-negative, without a check.
inline int64_t wrap_dim(int64_t dim, int64_t ndim) { return dim < 0 ? dim + std::max<int64_t>(ndim, 1) : dim; }
// The local sizes of an output with these placements, as an argument value.
c10::IValue local_sizes_value(const OpCall& call, c10::IntArrayRef sizes, const Placements& placements);
// A Proposal::rewrite that replaces argument `arg` by the local sizes of the first output.
decltype(Proposal::rewrite) with_local_sizes(int arg);
// list[i], or the only element of a list of one.
inline int64_t at_or_single(const std::vector<int64_t>& list, size_t i) {
  return list.size() == 1 ? list[0] : list.at(i);
}

}  // namespace tessera
