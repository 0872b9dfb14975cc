#include "tessera/fsdp1/fully_sharded_data_parallel.h"

#include <fmt/ranges.h>

#include <atomic>
#include <optional>
#include <utility>

#include "tessera/base/enum_name.h"
#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/comm/collectives/agreement.h"
#include "tessera/fsdp1/fsdp1_state.h"
#include "tessera/fsdp1/original_params.h"

namespace tessera {
std::vector<std::pair<std::string, Fsdp1State*>> fsdp1_states(nn::Module& module) {
  std::vector<std::pair<std::string, Fsdp1State*>> out;
  for (const auto& [path, child] : module.named_modules()) {
    if (auto* state = dynamic_cast<Fsdp1State*>(child->sharding().get())) out.emplace_back(path, state);
  }
  return out;
}

namespace {

const char* name_of(ShardingStrategy strategy) {
  return enum_name(strategy, {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"}, "");
}

void check_wrap_options(const Fsdp1Options& options) {
  const bool hybrid = options.sharding_strategy == ShardingStrategy::kHybridShard ||
                      options.sharding_strategy == ShardingStrategy::kHybridShardZero2;
  TESSERA_CHECK(
      hybrid == (options.replicate_group != nullptr), ErrorKind::kConfig,
      "[fsdp1.wrap] {}: found {} replicate_group. The hybrid strategies need the group of the ranks with the same "
      "shards; the other strategies do not take one.",
      name_of(options.sharding_strategy), options.replicate_group ? "a" : "no");
  const auto& precision = options.mixed_precision;
  for (const auto& [name, dtype] : {std::pair("param_dtype", precision.param_dtype),
                                    {"reduce_dtype", precision.reduce_dtype},
                                    {"buffer_dtype", precision.buffer_dtype}}) {
    TESSERA_CHECK(!dtype || c10::isFloatingType(*dtype), ErrorKind::kConfig,
                  "[fsdp1.wrap] {}: found {}, wanted a floating dtype", name, c10::toString(*dtype));
  }
}

void check_offload(const CPUOffload& offload, const FlatParameterLayout& layout, const comm::Group& group) {
  if (!offload.offload_params) return;
  const auto& first = layout.members()[0];
  TESSERA_CHECK(
      first.device.is_cpu(), ErrorKind::kConfig,
      "[fsdp1.wrap] {}: CPUOffload of parameters on {} is not supported. Leave cpu_offload out, or wrap the model on "
      "the CPU.",
      first.fqn, first.device.str());
  static std::atomic<bool> warned{false};
  if (group.rank() == 0 && !warned.exchange(true)) {
    log_warning("[fsdp1.wrap] cpu_offload: the parameters are on the CPU, where their shards stay; nothing changes");
  }
}

struct FlatUnit {
  std::vector<OriginalParam> original_params;
  std::optional<FlatParameterLayout> layout;  // nullopt: nested units have all parameters
};

// Makes the layout of one unit without changing the module, except that param_init_fn materialises its meta tensors.
// Parameters that belong to nested units are not part of the layout.
FlatUnit make_flat_unit(nn::Module& module, const Fsdp1Options& options) {
  TESSERA_CHECK(
      !module.sharding(), ErrorKind::kShape,
      "[fsdp1.wrap] wrap_fsdp1, fully_shard or replicate was called on this module already. Call one of them, "
      "once.");
  const auto states = fsdp1_states(module);
  TESSERA_CHECK(data_parallel_states(module).size() == states.size(), ErrorKind::kShape,
                "[fsdp1.wrap] fully_shard or replicate was called on a module below this one. Use one of the three.");
  if (options.param_init_fn) materialise(module, options.param_init_fn);
  std::vector<FlatParamGroup*> nested;
  for (const auto& [path, state] : states) {
    if (state->group()) nested.push_back(state->group().get());
  }
  auto found = collect_original_params(module, nested);
  FlatUnit unit;
  if (found.params.empty()) return unit;
  std::vector<FlatMember> members;
  for (const auto& original : found.params) members.push_back(original.member);
  unit.layout = FlatParameterLayout::make(
      std::move(members), std::move(found.shared),
      {.use_orig_params = options.use_orig_params,
       .compute_dtype = options.mixed_precision.param_dtype.value_or(c10::ScalarType::Undefined)},
      options.group->size());
  check_offload(options.cpu_offload, *unit.layout, *options.group);
  unit.original_params = std::move(found.params);
  return unit;
}

// The options and parameters that must be equal on all ranks.
comm::NamedValues facts_of(const FlatUnit& unit, const Fsdp1Options& options) {
  const auto& precision = options.mixed_precision;
  const auto dtype = [](const std::optional<c10::ScalarType>& of) { return of ? c10::toString(*of) : "none"; };
  comm::NamedValues facts = {
      {"sharding_strategy", name_of(options.sharding_strategy)},
      {"use_orig_params", fmt::format("{}", options.use_orig_params)},
      {"mixed_precision", fmt::format("param_dtype={}, reduce_dtype={}, buffer_dtype={}, keep_low_precision_grads={}, "
                                      "cast_forward_inputs={}, cast_root_forward_inputs={}",
                                      dtype(precision.param_dtype), dtype(precision.reduce_dtype),
                                      dtype(precision.buffer_dtype), precision.keep_low_precision_grads,
                                      precision.cast_forward_inputs, precision.cast_root_forward_inputs)},
      {"replicas", fmt::format("{}", options.replicate_group ? options.replicate_group->size() : 1)}};
  if (!unit.layout) return facts;
  for (const auto& member : unit.layout->members()) {
    facts.emplace_back(member.fqn, fmt::format("{} of shape [{}], strides [{}]{}", c10::toString(member.dtype),
                                               fmt::join(member.shape, ","), fmt::join(member.strides, ","),
                                               member.requires_grad ? "" : ", frozen"));
  }
  for (const auto& shared : unit.layout->shared()) facts.emplace_back(shared.fqn, "is " + shared.primary_fqn);
  return facts;
}

// Builds the unit. An error on one rank, or options or parameters that differ between ranks, are thrown on all ranks.
// With replicas the outer attempt_together runs over the replicate group: an error in one sharding group then reaches
// the ranks of the other groups. Communication, memory and internal errors keep their kind; other errors become kShape.
// COLLECTIVE over the groups.
FlatUnit make_unit_on_all_ranks(nn::Module& module, const Fsdp1Options& options) {
  constexpr const char* kRemedy = "Call wrap_fsdp1 for the same modules, with the same options, on all ranks.";
  FlatUnit unit;
  comm::NamedValues facts;
  const auto agree = [&] {
    comm::attempt_together(*options.group, [&] {
      check_wrap_options(options);
      unit = make_flat_unit(module, options);
      facts = facts_of(unit, options);
    });
    comm::check_same(*options.group, facts, kRemedy);
  };
  try {
    if (options.replicate_group) {
      comm::attempt_together(*options.replicate_group, agree);
      comm::check_same(*options.replicate_group, facts, kRemedy);
    } else {
      agree();
    }
  } catch (const Error& error) {
    using enum ErrorKind;
    if (error.kind() == kComm || error.kind() == kMemory || error.kind() == kInternal) throw;
    raise(ErrorKind::kShape, "{}", error.what());
  }
  return unit;
}

// The FlatParameterHandle of a unit. Its parameter names begin with the path from the root module to the unit's module.
class UnitHandle : public FlatParameterHandle {
 public:
  UnitHandle(std::shared_ptr<FlatParamGroup> group, ShardingStrategy strategy, std::string prefix)
      : group_(std::move(group)), strategy_(strategy), prefix_(std::move(prefix)) {}
  const FlatParameterLayout& layout() const override { return group_->layout(); }
  const std::shared_ptr<comm::Group>& group() const override { return group_->group(); }
  ShardingStrategy sharding_strategy() const override { return strategy_; }
  std::string prefix() const override { return prefix_; }
  at::Tensor shard() const override { return group_->shard(); }
  std::vector<ShardParamInfo> shard_param_infos() const override { return group_->param_infos(); }
  std::vector<std::string> parameter_names() const override {
    if (!layout().use_orig_params()) return {prefix_ + kFlatParam};
    std::vector<std::string> names;
    for (const auto& member : layout().members()) names.push_back(prefix_ + member.fqn);
    return names;
  }
  std::vector<at::Tensor> parameters() const override { return group_->all_leaves(); }

 private:
  std::shared_ptr<FlatParamGroup> group_;
  ShardingStrategy strategy_;
  std::string prefix_;
};

}  // namespace

void wrap_fsdp1(nn::Module& module, const Fsdp1Options& options) {
  TESSERA_CHECK(options.group != nullptr, ErrorKind::kShape,
                "[fsdp1.wrap] options.group is not set. Pass the group of the world, or a group of a DeviceMesh.");
  auto unit = make_unit_on_all_ranks(module, options);
  // In a group of one rank the strategy is kNoShard, because there is nothing to shard.
  const auto strategy = options.group->size() == 1 ? ShardingStrategy::kNoShard : options.sharding_strategy;
  std::shared_ptr<FlatParamGroup> group;
  if (unit.layout) {
    const auto& precision = options.mixed_precision;
    const auto own = c10::ScalarType::Undefined;
    group = std::make_shared<FlatParamGroup>(
        module, options.group,
        FlatParamGroupOptions{.sharded = strategy != ShardingStrategy::kNoShard,
                              .replicas = options.replicate_group,
                              .compute_dtype = precision.param_dtype.value_or(own),
                              .reduce_dtype = precision.reduce_dtype.value_or(precision.param_dtype.value_or(own)),
                              .keep_low_precision_grads = precision.keep_low_precision_grads},
        *std::move(unit.layout), std::move(unit.original_params));
  }
  auto state = std::make_shared<Fsdp1State>(module, strategy, options.mixed_precision, std::move(group));
  module.set_sharding(state);
  state->install_hooks();
}

// The unit that cast the buffer to MixedPrecision::buffer_dtype has stored the buffer's earlier dtype in
// buffer_dtypes(). At most one unit casts a buffer (Fsdp1State::init_root).
c10::ScalarType saved_buffer_dtype(nn::Module& root, const at::Tensor& buffer) {
  for (const auto& [path, state] : fsdp1_states(root)) {
    const auto found = state->buffer_dtypes().find(&buffer);
    if (found != state->buffer_dtypes().end()) return found->second;
  }
  return buffer.scalar_type();
}

std::vector<std::shared_ptr<FlatParameterHandle>> flat_parameter_handles(nn::Module& root) {
  std::vector<std::shared_ptr<FlatParameterHandle>> out;
  for (const auto& [path, state] : fsdp1_states(root)) {
    if (!state->group()) continue;
    out.push_back(std::make_shared<UnitHandle>(state->group(), state->strategy(), path.empty() ? path : path + "."));
  }
  return out;
}

}  // namespace tessera
