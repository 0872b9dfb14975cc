#include "tessera/dtensor/rules/table.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <mutex>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera {

void RuleTable::add(const std::string& name, Rule rule) {
  const bool fresh = rules_.emplace(name, std::move(rule)).second;
  TESSERA_CHECK(
      fresh, ErrorKind::kInternal,
      "[dtensor.register_rule] {}: a rule with this name exists already. Use register_sharding to replace it.", name);
}

void RuleTable::add(std::initializer_list<const char*> names, const Rule& rule) {
  for (const char* name : names) add(name, rule);
}

const Rule* RuleTable::find(const std::string& name) const {
  const auto found = rules_.find(name);
  return found == rules_.end() ? nullptr : &found->second;
}

namespace {

struct Rules {
  std::mutex mutex;
  RuleTable built_in;
  RuleTable registered;  // these have priority over all built-in rules

  Rules() {
    add_pointwise_rules(built_in);
    add_like_rules(built_in);
    add_matmul_rules(built_in);
    add_reduction_rules(built_in);
    add_along_dim_rules(built_in);
    add_view_rules(built_in);
    add_dims_rules(built_in);
    add_cat_rules(built_in);
    add_embedding_rules(built_in);
    add_loss_rules(built_in);
    add_norm_layer_rules(built_in);
    add_attention_rules(built_in);
    add_optimizer_rules(built_in);
    add_random_rules(built_in);
    add_elementwise_loss_rules(built_in);
    add_arg_extreme_rules(built_in);
    add_index_rules(built_in);
    add_index_write_rules(built_in);
    add_pad_rules(built_in);
    add_spatial_rules(built_in);
    add_convolution_rules(built_in);
    add_batch_norm_rules(built_in);
    add_linalg_rules(built_in);
    add_fft_rules(built_in);
    add_grouped_matmul_rules(built_in);
    add_fused_attention_rules(built_in);
    add_reinterpreting_view_rules(built_in);
    add_factory_rules(built_in);
  }

  const Rule* find(const std::string& full_name) {
    const Rule* rule = find_in(registered, full_name);
    return rule != nullptr ? rule : find_in(built_in, full_name);
  }

  // Looks up the full name with overload, then the name without overload, then the out-of-place name of an in-place
  // operation. A _foreach_ operation gets zip_rule() of the rule for single tensors, which is added to the table for
  // later look-ups.
  static const Rule* find_in(RuleTable& table, const std::string& full_name) {
    if (const Rule* rule = table.find(full_name)) return rule;
    std::string name = full_name.substr(0, full_name.find('.'));
    if (const Rule* rule = table.find(name)) return rule;
    if (name.ends_with('_') && !name.ends_with("__")) {
      name.pop_back();
      if (const Rule* rule = table.find(name)) return rule;
    }
    constexpr std::string_view kForeach = "::_foreach_";
    if (const auto at = name.find(kForeach); at != std::string::npos) {
      if (const Rule* single = table.find(name.substr(0, at) + "::" + name.substr(at + kForeach.size()))) {
        table.add(full_name, zip_rule(*single));
        return table.find(full_name);
      }
    }
    return nullptr;
  }
};

Rules& rules() {
  static Rules* const made = new Rules();  // never destroyed: operations keep pointers to its rules
  return *made;
}

}  // namespace

const Rule* find_rule(const OpInfo& op) {
  Rules& all = rules();
  std::lock_guard lock(all.mutex);
  return all.find(op.name);
}

namespace {

// Applies a rule for single tensors to each position of the tensor lists. Returns nullopt if two positions need
// different placements of a tensor argument that is not a list. With `whole_singles` the rule is given these tensors as
// replicated and must keep them so.
std::optional<PlacementChoice> zip_positions(const Rule& rule, const OpCall& call, bool whole_singles,
                                             std::vector<OutputShape>& shapes) {
  size_t length = 0;
  for (const auto& input : call.inputs) length = std::max(length, static_cast<size_t>(input.element + 1));
  const Placements replicated(call.mesh->ndim(), Replicate());
  PlacementChoice whole;
  whole.inputs.resize(call.inputs.size());
  for (size_t position = 0; position < length; ++position) {
    std::vector<TensorInput> inputs;
    std::vector<size_t> indices;
    FixedOutputs fixed;
    for (size_t i = 0; i < call.inputs.size(); ++i) {
      const auto& input = call.inputs[i];
      if (input.element < 0 && input.dim() > 0) {  // a tensor with one number for each position
        whole.inputs[i] = replicated;
        continue;
      }
      if (input.element >= 0 && input.element != static_cast<int>(position)) continue;
      if (input.is_written && fixed.empty()) fixed.emplace_back(0, input.placements);
      inputs.push_back(input);
      indices.push_back(i);
      if (input.element < 0 && whole_singles) {
        inputs.back().placements = replicated;
        inputs.back().is_written = true;  // so that choose() keeps its placement
      }
    }
    const OpCall one(call.op, call.args, call.mesh, std::move(inputs));
    Proposal of_one;
    rule(one, of_one);
    const PlacementChoice choice = choose(one, of_one, 1, fixed);
    for (size_t i = 0; i < indices.size(); ++i) {
      auto& placements = whole.inputs[indices[i]];
      if (!placements.empty() && placements != choice.inputs[i]) return std::nullopt;
      placements = choice.inputs[i];
    }
    whole.outputs.push_back(choice.outputs[0]);
    if (!of_one.outputs.empty()) shapes.push_back(of_one.outputs[0]);
  }
  return whole;
}

}  // namespace

// Makes a rule for an operation on tensor lists from `rule`, the rule of the operation on single tensors. First, the
// placements at each position of the lists are chosen independently of the other positions (zip_positions() with
// `whole_singles` false). If two positions need different placements of a tensor argument that is not a list,
// zip_positions() is called again with `whole_singles` true, and all tensor arguments that are not lists are
// replicated.
Rule zip_rule(Rule rule) {
  return [rule = std::move(rule)](const OpCall& call, Proposal& proposal) {
    proposal.choice = zip_positions(rule, call, /*whole_singles=*/false, proposal.outputs);
    if (!proposal.choice) {
      proposal.outputs.clear();
      proposal.choice = zip_positions(rule, call, /*whole_singles=*/true, proposal.outputs);
    }
    TESSERA_CHECK(proposal.choice.has_value(), ErrorKind::kInternal,
                  "[dtensor.rule] {}: two positions of the lists need different placements of one tensor that is not "
                  "in a list. Correct the rule.",
                  call.describe());
  };
}

void refuse_in_place(const OpCall& call, const TensorInput& input, const Placements& target) {
  raise(
      ErrorKind::kShape,
      "Sharding dimension mismatch: [dtensor.dispatch] {}: in-place operations that require placement changes are not "
      "supported. '{}' is written and has placement {}, wanted {}. Use the out-of-place version, or redistribute "
      "first.",
      call.describe(), call.op.args[input.arg].name, to_string(input.placements), to_string(target));
}

Sizes broadcast_sizes(const OpCall& call) {
  Sizes sizes;
  for (const auto& input : call.inputs) {
    if (input.dim() > static_cast<int64_t>(sizes.size())) sizes.insert(sizes.begin(), input.dim() - sizes.size(), 1);
    const size_t shift = sizes.size() - input.sizes.size();
    for (size_t i = 0; i < input.sizes.size(); ++i) {
      int64_t& size = sizes[i + shift];
      TESSERA_CHECK(size == input.sizes[i] || size == 1 || input.sizes[i] == 1, ErrorKind::kShape,
                    "[dtensor.dispatch] {}: the shapes do not broadcast: found {} and {} on dim {} from the left.",
                    call.describe(), size, input.sizes[i], i + shift);
      size = size == 1 ? input.sizes[i] : size;
    }
  }
  return sizes;
}

namespace {
// Whether reducing a Partial tensor and then converting it to a wider type gives another number than converting first.
// True for sums of booleans (which are "any") and for sums and products of small integers, which wrap around.
bool is_changed_by_widening(at::ScalarType type, const Placement& placement) {
  return (type == at::kBool && is_additive(placement)) ||
         (is_small_integer(type) && (is_additive(placement) || placement.is_partial(ReduceOp::kProduct)));
}
}  // namespace

// Returns the Partial placements that the inputs have. A Partial placement is left out if is_changed_by_widening() is
// true for it and the dtype of any input that has it.
c10::SmallVector<Placement, 2> partials_among(const OpCall& call) {
  c10::SmallVector<Placement, 2> found, lost;
  for (const auto& input : call.inputs) {
    for (const auto& placement : input.placements) {
      auto& list = is_changed_by_widening(input.tensor->scalar_type(), placement) ? lost : found;
      if (placement.is_partial() && std::ranges::find(list, placement) == list.end()) list.push_back(placement);
    }
  }
  found.erase(std::remove_if(found.begin(), found.end(),
                             [&](const Placement& p) { return std::ranges::find(lost, p) != lost.end(); }),
              found.end());
  return found;
}

Strategy pass_through(const Placement& p, size_t input, size_t count) {
  Strategy strategy{{p}, c10::SmallVector<Placement, 4>(count, Replicate())};
  strategy.inputs[input] = p;
  return strategy;
}

void add_pass_through(const OpCall& call, Proposal& proposal, size_t input, bool (*passes)(const Placement&)) {
  for (const Placement& p : partials_among(call)) {
    if (passes(p)) proposal.strategies.push_back(pass_through(p, input, call.inputs.size()));
  }
}

Strategy replicate_rest(const OpCall& call, Strategy strategy) {
  strategy.inputs.resize(call.inputs.size(), Replicate());
  return strategy;
}

Strategy shard_broadcast_dim(const OpCall& call, c10::IntArrayRef broadcast, int64_t dim) {
  Strategy strategy{{Shard(dim)}, {}};
  for (const auto& input : call.inputs) {
    const int64_t own = operand_dim(input, broadcast, dim);
    strategy.inputs.push_back(own < 0 ? Replicate() : Shard(own));
  }
  return strategy;
}

int64_t operand_dim(const TensorInput& input, c10::IntArrayRef broadcast, int64_t dim) {
  const int64_t own = dim - (static_cast<int64_t>(broadcast.size()) - input.dim());
  return own < 0 || (input.sizes[own] == 1 && broadcast[dim] != 1) ? -1 : own;
}

void check_indices(const std::string& op, const at::Tensor& index, int64_t n, bool from_end) {
  if (!index.is_cpu() || index.numel() == 0) return;
  const auto [least, most] = at::aminmax(index);
  const int64_t lowest = least.item<int64_t>();
  const int64_t highest = most.item<int64_t>();
  const int64_t from = from_end ? -n : 0;
  TESSERA_CHECK(lowest >= from && highest < n, ErrorKind::kShape,
                "[dtensor.dispatch] {}: index out of range: found {}, wanted one of [{}, {}).", op,
                lowest < from ? lowest : highest, from, n);
}

LocalIndices to_local_indices(const at::Tensor& index, int64_t offset, int64_t size) {
  const at::Tensor shifted = index - offset;
  const at::Tensor is_remote = shifted.lt(0).logical_or_(shifted.ge(size));
  return {shifted.masked_fill(is_remote, 0), is_remote};
}

std::optional<int64_t> local_offset(const OpCall& call, const PlacementChoice& choice, int64_t dim) {
  const auto is_shard_of_dim = [dim](const Placement& placement) { return placement.is_shard(dim); };
  if (!call.mesh->coordinate() || std::ranges::none_of(choice.inputs[0], is_shard_of_dim)) return std::nullopt;
  return local_box(call.inputs[0].sizes.vec(), *call.mesh, choice.inputs[0]).offset[dim];
}

int64_t checked_dim(const OpCall& call, int64_t dim, int64_t ndim) {
  TESSERA_CHECK(dim >= -ndim && dim < ndim, ErrorKind::kShape,
                "[dtensor.dispatch] {}: found dim {}, wanted one of {} dims.", call.describe(), dim, ndim);
  return wrap_dim(dim, ndim);
}

bool is_sharded_on(const TensorInput& input, int64_t dim) {
  return std::ranges::any_of(input.placements, [&](const Placement& p) { return p.is_any_shard() && p.dim == dim; });
}

c10::IValue local_sizes_value(const OpCall& call, c10::IntArrayRef sizes, const Placements& placements) {
  const Sizes local = local_sizes(sizes, *call.mesh, placements);
  return c10::List<int64_t>(c10::IntArrayRef(local));
}

decltype(Proposal::rewrite) with_local_sizes(int arg) {
  return [arg](const OpCall& of, const PlacementChoice& choice, const std::vector<OutputShape>& shapes) {
    return Rewrites{{arg, local_sizes_value(of, shapes[0].sizes, choice.outputs[0])}};
  };
}

namespace {

// Raises Error kShape if the rule would never be used: no operation has the name, a handler runs the operation without
// using a rule, or the operation is composite.
void check_rule_is_used(const std::string& name, const std::vector<c10::OperatorHandle>& operations) {
  TESSERA_CHECK(!operations.empty(), ErrorKind::kShape,
                "[dtensor.register_rule] {}: found no operation of that name, wanted \"ns::op\" or \"ns::op.overload\" "
                "of a defined operation. Define it before its rule.",
                name);
  for (const auto& op : operations) {
    const Handler handler = find_handler(toString(op.operator_name()));
    TESSERA_CHECK(handler == nullptr || dispatches_by_rule(handler), ErrorKind::kShape,
                  "[dtensor.register_rule] {}: no rule is used for {}, because its result depends on values or is not "
                  "sharded. Call it on to_local() or full_tensor(), or inside local_map.",
                  name, toString(op.operator_name()));
  }
  const auto is_out_form = [](const c10::OperatorHandle& op) {
    const auto& arguments = op.schema().arguments();
    return std::ranges::any_of(arguments, [](const c10::Argument& each) { return each.is_out(); });
  };
  const bool comes_apart = std::ranges::any_of(operations, is_composite) &&
                           std::ranges::all_of(operations, [&](const c10::OperatorHandle& op) {
                             return is_composite(op) || is_out_form(op);
                           });
  TESSERA_CHECK(!comes_apart, ErrorKind::kShape,
                "[dtensor.register_rule] {}: the operation is made of others and is decomposed into them before a rule "
                "is looked up. Register rules for those operations, or run it on local tensors with local_map. An "
                "operation of your own may be registered for CompositeExplicitAutograd.",
                name);
}

// The rule is stored before kernels are registered for the operations, because another thread may call a kernel as soon
// as it is registered.
void add_registered(const std::string& name, Rule rule, bool may_replace) {
  const auto operations = operations_named(name);
  check_rule_is_used(name, operations);
  {
    Rules& all = rules();
    std::lock_guard lock(all.mutex);
    TESSERA_CHECK(
        may_replace || (all.built_in.find(name) == nullptr && all.registered.find(name) == nullptr),
        ErrorKind::kInternal,
        "[dtensor.register_rule] {}: a rule with this name exists already. Use register_sharding to replace it.", name);
    all.registered.replace(name, std::move(rule));
  }
  ensure_kernels_of(operations);
}

}  // namespace

void replace_rule(const std::string& name, Rule rule) { add_registered(name, std::move(rule), /*may_replace=*/true); }

void register_rule(const std::string& name, Rule rule) { add_registered(name, std::move(rule), /*may_replace=*/false); }

}  // namespace tessera
