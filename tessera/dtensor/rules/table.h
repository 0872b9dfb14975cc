// The tables of sharding rules, one function an operation family. find_rule fills them in at first use.
#pragma once

#include <string>
#include <unordered_map>

#include "tessera/dtensor/dispatch/plan.h"
#include "tessera/dtensor/dispatch/rule.h"

namespace tessera {

class RuleTable {
 public:
  // "aten::add" covers every overload, add_, add.out and _foreach_add; "aten::max.dim" one overload.
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

// register_rule for a name that may be taken. It goes before all rules that are built in, of overloads too.
void replace_rule(const std::string& name, Rule rule);

// Applies a rule for one tensor to each position of lists of tensors; single tensors among the arguments stay whole.
Rule zip_rule(Rule rule);

// Whether it leaves some calls to the operation's rule.
bool asks_for_rule(Handler handler);
// Of view_write.cc.
void handle_new_empty_strided(const OpEntry& op, c10::DispatchKeySet keys, Stack* stack);
// Of loss_parallel.cc: left to the rules while no LossParallel is in force.
void handle_log_softmax(const OpEntry& op, c10::DispatchKeySet keys, Stack* stack);
void handle_log_softmax_backward(const OpEntry& op, c10::DispatchKeySet keys, Stack* stack);
void handle_nll_loss(const OpEntry& op, c10::DispatchKeySet keys, Stack* stack);
void handle_nll_loss_backward(const OpEntry& op, c10::DispatchKeySet keys, Stack* stack);

// Error kShape: an argument that is written would have to move.
[[noreturn]] void refuse_in_place(const OpCall& call, const TensorInput& input, const Placements& wanted);

// Shape of the operands broadcast together.
Sizes broadcast_sizes(const OpCall& call);
// The reductions that occur among the inputs' placements, each once. Not the sums of booleans, which say whether any is
// true: what passed them on would count. Nor sums and products of small integers, which wrap around: what passed them
// on in a wider type would not.
c10::SmallVector<Placement, 2> partials_among(const OpCall& call);
// Whether some input is cut along its dim `dim` on any mesh dim.
bool is_sharded_on(const TensorInput& input, int64_t dim);
// Small integers wrap around, so what is added to them may change their order, and a wider type other sums.
inline bool wraps_around(at::ScalarType type) {
  return at::isIntegralType(type, /*includeBool=*/false) && c10::elementSize(type) < 4;
}
// Sums pass through what is linear.
inline bool is_additive(const Placement& p) { return p.is_partial(ReduceOp::kSum) || p.is_partial(ReduceOp::kAvg); }
inline bool is_extreme(const Placement& p) { return p.is_partial(ReduceOp::kMax) || p.is_partial(ReduceOp::kMin); }
// Every input and every output lies as p.
inline Strategy alike(const OpCall& call, const Placement& p) {
  return {{p}, c10::SmallVector<Placement, 4>(call.inputs.size(), p)};
}
// What stays when all ranks write the same value.
inline bool is_idempotent(const Placement& p) { return p.is_partial(ReduceOp::kAvg) || is_extreme(p); }
inline bool all_pass(const Placement&) { return true; }
// The output and one of `count` inputs lie as p, the others are whole.
Strategy passing(const Placement& p, size_t input, size_t count);
// The same for each reduction among the inputs that passes.
void add_passing(const OpCall& call, Proposal& proposal, size_t input, bool (*passes)(const Placement&));
// The result is linear in one input while the others are whole: additive partials of it pass.
inline void add_linear(const OpCall& call, Proposal& proposal, size_t input) {
  add_passing(call, proposal, input, is_additive);
}
// Inputs that the strategy does not name are whole; what it names beyond them, for arguments left out, is dropped.
Strategy rest_whole(const OpCall& call, Strategy strategy);
// A dim of the shape that operands broadcast to is cut; operands without it, or that repeat along it, are whole.
Strategy over_dim(const OpCall& call, c10::IntArrayRef broadcast, int64_t dim);
// The dim in an operand of a dim of the shape that operands broadcast to; -1 where it is missing or repeated.
int64_t own_dim(const TensorInput& input, c10::IntArrayRef broadcast, int64_t dim);
// Whether a tensor of sizes `from` that lies so can be viewed with sizes `to` where it lies.
bool can_view(const DeviceMesh& mesh, c10::IntArrayRef from, const Placements& placements, c10::IntArrayRef to);
// Error kShape for a place outside [0, n) in an index of which a rank reads only its own places; from_end: outside
// [-n, n). On the CPU only, since looking would wait for another device.
void check_places(const std::string& op, const at::Tensor& index, int64_t n, bool from_end = false);
// Places along a dim of which a rank holds some: where they lie in its part, 0 for those that other ranks hold.
struct OwnPlaces {
  at::Tensor index;
  at::Tensor elsewhere;  // which are held by others
};
OwnPlaces own_places(const at::Tensor& index, int64_t offset, int64_t size);
// Where this rank's part of the first input begins along `dim`; none unless a Shard cuts it, or outside the mesh.
std::optional<int64_t> own_offset(const OpCall& call, const Choice& choice, int64_t dim);
// A dim in range; Error kShape otherwise.
int64_t checked_dim(const OpCall& call, int64_t dim, int64_t ndim);
// A dim that may be negative, in range.
inline int64_t wrap_dim(int64_t dim, int64_t ndim) { return dim < 0 ? dim + std::max<int64_t>(ndim, 1) : dim; }
// Local sizes of an output under what was chosen for it, as an argument.
c10::IValue local_sizes_value(const OpCall& call, c10::IntArrayRef sizes, const Placements& placements);
// A rewrite that gives the argument `arg` the local sizes of the first output.
decltype(Proposal::rewrite) with_local_sizes(int arg);
// An element of a list in which one number may stand for all.
inline int64_t at_or_only(const std::vector<int64_t>& list, size_t i) {
  return list.size() == 1 ? list[0] : list.at(i);
}

}  // namespace tessera
