// FSDP1: a module whose parameters lie one after another in one flat parameter, of which every rank holds a range of
// elements. For state of PyTorch's FullyShardedDataParallel and for models that were written for it; new code takes
// fully_shard.
//
//   for (auto& layer : model->layers) wrap_fsdp1(*layer, {.group = world.group()});
//   wrap_fsdp1(*model, {.group = world.group()});        // the root: what is left
//   auto optimizer = optim::make_adamw(*model, {});      // over flat parameters, or ranges of the original ones
//   auto loss = (*model)(batch);                         // COLLECTIVE over the group
//   loss.backward();                                     // COLLECTIVE over the group
//
// Semantics of torch.distributed.fsdp.FullyShardedDataParallel (docs/design/fsdp1.md). The module keeps its state; it
// belongs to one rank.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/group/group.h"
#include "tessera/fsdp1/flat_parameter_layout.h"
#include "tessera/nn/module.h"

namespace tessera {

// The hybrid ones shard over `group` and replicate over `replicate_group`: as kFullShard and kShardGradOp inside of a
// group, and gradients are averaged over both.
enum class ShardingStrategy { kFullShard, kShardGradOp, kNoShard, kHybridShard, kHybridShardZero2 };

// Semantics of torch.distributed.fsdp.MixedPrecision. Shards and optimizer stay in the parameters' own dtype.
struct MixedPrecision {
  std::optional<c10::ScalarType> param_dtype = {};   // gather parameters, run forward and backward in it
  std::optional<c10::ScalarType> reduce_dtype = {};  // sum gradients in it; none: param_dtype, where there is one
  // Buffers are cast to it when the root first runs, and stay; state dicts have them in their own dtype.
  std::optional<c10::ScalarType> buffer_dtype = {};
  // grad() is left in param_dtype (without sharding: in reduce_dtype), for optimizers of one's own that take that.
  bool keep_low_precision_grads = false;
  bool cast_forward_inputs = false;      // floating inputs of this unit's forward to param_dtype
  bool cast_root_forward_inputs = true;  // those of the root
};

struct CPUOffload {
  bool offload_params = false;  // keep shards on the CPU; where they are there anyhow, nothing changes
};

struct Fsdp1Options {
  std::shared_ptr<comm::Group> group = {};
  ShardingStrategy sharding_strategy = ShardingStrategy::kFullShard;
  // true: parameters() shows each original parameter, 1-d, as the range of it in this rank's shard (empty, and never
  // with a gradient, where there is none), or with its own shape without sharding; writes to it are writes to the
  // shard. false: one flat parameter named "_flat_param" a unit.
  bool use_orig_params = false;
  MixedPrecision mixed_precision = {};
  CPUOffload cpu_offload = {};
  // Of the ranks that have the same shards in other groups, for the hybrid strategies; every rank of both groups passes
  // its own pair.
  std::shared_ptr<comm::Group> replicate_group = {};
  // Called for each module with own parameters or buffers on the meta device, this unit's alone, outermost first; it
  // puts real ones in their place (Module::set_parameter), of the same values on all ranks that replicate one another.
  std::function<void(nn::Module&)> param_init_fn = {};
};

// Flattens and shards the parameters of `module` that no nested call manages already; every rank passes the same
// values. Apply bottom-up, before an optimizer is made. Parameters that modules share must be in one call. COLLECTIVE
// over the group, and over replicate_group. Errors kShape, alike on all ranks: those of FlatParameterLayout, DTensors,
// parameters on the meta device (still, after param_init_fn, or no longer tied), a module wrapped or sharded already,
// parameters tied to a nested unit's, ranks that differ in options or parameters, a hybrid strategy without
// replicate_group or the other way round, dtypes that are not floating, offloading from an accelerator.
//
// Gradients are averaged over the group by the backward that reaches the module; NoSync, set_requires_gradient_sync and
// set_gradient_divide_factor (gradient_sync.h) work as with fully_shard, fsdp_stats too. With use_orig_params a
// parameter that no rank had a gradient for keeps its grad() as it was, as on one rank; a flat parameter gets zeros
// there. Between forwards the modules' members show the pieces, or without use_orig_params views of freed memory that
// throw.
void wrap_fsdp1(nn::Module& module, const Fsdp1Options& options);

// One wrapped unit below a root: what state-dict functions need to know.
class FlatParameterHandle {
 public:
  virtual ~FlatParameterHandle() = default;
  virtual const FlatParameterLayout& layout() const = 0;
  virtual const std::shared_ptr<comm::Group>& group() const = 0;
  virtual ShardingStrategy sharding_strategy() const = 0;  // effective: kNoShard in a group of one rank
  // From the root asked to the wrapped module: "" or "layers.0." with the final dot.
  virtual std::string prefix() const = 0;
  // This rank's shard: [layout().sharded_numel()], or the whole without sharding. Writing into it changes the
  // model, and counts as a write of parameters().
  virtual at::Tensor shard() const = 0;
  // Of this rank, one a member: layout().shard_param_infos(), or whole_param_infos() without sharding.
  virtual std::vector<ShardParamInfo> shard_param_infos() const = 0;
  // What Module::named_parameters shows of this unit, by name from the root: one flat parameter, or each member.
  virtual std::vector<std::string> parameter_names() const = 0;
  virtual std::vector<at::Tensor> parameters() const = 0;  // in that order
};
// The units of a module in the order of their modules (pre-order), each once. Prefixes are relative to `root`.
std::vector<std::shared_ptr<FlatParameterHandle>> flat_parameter_handles(nn::Module& root);

struct SummonOptions {
  bool recurse = true;      // the units below, too
  bool writeback = true;    // false: what the body wrote is dropped
  bool rank0_only = false;  // on the first rank of each group alone; elsewhere the modules show their shards
  bool offload_to_cpu = false;
  bool with_grads = false;  // grad() as well, of parameters that any rank has one for
};
// FullyShardedDataParallel.summon_full_params: runs `body` while the modules below `module` have their original
// parameters, whole, in their own dtype, under their names, as parameters. What an exception of the body finds written
// is written back, too. Forward is refused meanwhile, and optimizers do not know these parameters. COLLECTIVE over the
// groups. Errors kConfig, as upstream: writeback with rank0_only, offload_to_cpu without sharding, with_grads with
// offload_to_cpu or without use_orig_params; kShape: inside a forward, or of a parameter that the body replaced by one
// of another shape.
void summon_full_params(nn::Module& module, const SummonOptions& options, const std::function<void()>& body);

// In which dtype state dicts have a buffer: its own, where MixedPrecision::buffer_dtype has changed it. `buffer` is the
// module's member. No communication.
c10::ScalarType saved_buffer_dtype(nn::Module& root, const at::Tensor& buffer);

// Multiplies all gradients below `root` by max_norm / (norm + 1e-6) where that is below 1, and returns their norm
// before that, as FullyShardedDataParallel.clip_grad_norm_, but in float64 and independent of the layout but for its
// rounding. Gradients of units without sharding, and of parameters of no unit, are taken to be the same on every rank.
// A NaN norm makes all gradients NaN. COLLECTIVE over the groups of the sharded units. Errors: kConfig for a norm_type
// that is not positive, kShape where nothing is wrapped.
double clip_grad_norm_(nn::Module& root, double max_norm, double norm_type = 2.0);

}  // namespace tessera
