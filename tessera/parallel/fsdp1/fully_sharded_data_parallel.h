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

#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/group/group.h"
#include "tessera/nn/module.h"
#include "tessera/parallel/fsdp1/flat_parameter_layout.h"

namespace tessera {

enum class ShardingStrategy { kFullShard, kShardGradOp, kNoShard };

struct Fsdp1Options {
  std::shared_ptr<comm::Group> group = {};
  ShardingStrategy sharding_strategy = ShardingStrategy::kFullShard;
  // true: parameters() shows each original parameter, 1-d, as the range of it in this rank's shard (empty, and never
  // with a gradient, where there is none), or with its own shape without sharding; writes to it are writes to the
  // shard. false: one flat parameter named "_flat_param" a unit.
  bool use_orig_params = false;
};

// Flattens and shards the parameters of `module` that no nested call manages already; every rank passes the same
// values. Apply bottom-up, before an optimizer is made. Parameters that modules share must be in one call. COLLECTIVE
// over the group. Errors kShape, alike on all ranks: those of FlatParameterLayout, DTensors, parameters on the meta
// device, a module wrapped or sharded already, parameters tied to a nested unit's, ranks that differ in options or
// parameters.
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

// Multiplies all gradients below `root` by max_norm / (norm + 1e-6) where that is below 1, and returns their norm
// before that, as FullyShardedDataParallel.clip_grad_norm_, but in float64 and independent of the layout but for its
// rounding. Gradients of units without sharding, and of parameters of no unit, are taken to be the same on every rank.
// A NaN norm makes all gradients NaN. COLLECTIVE over the groups of the sharded units. Errors: kConfig for a norm_type
// that is not positive, kShape where nothing is wrapped.
double clip_grad_norm_(nn::Module& root, double max_norm, double norm_type = 2.0);

}  // namespace tessera
