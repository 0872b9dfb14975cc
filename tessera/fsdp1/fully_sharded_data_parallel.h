// FSDP1: the parameters of a module are stored one after another in one flat parameter, and every rank holds a range of
// its elements. Use FSDP1 for checkpoints of PyTorch's FullyShardedDataParallel and for models that were written for
// it. New code should use fully_shard.
//
//   for (auto& layer : model->layers) wrap_fsdp1(*layer, {.group = world.group()});
//   wrap_fsdp1(*model, {.group = world.group()});        // the root: all other parameters
//   auto optimizer = optim::make_adamw(*model, {});      // flat parameters, or ranges of the original parameters
//   auto loss = (*model)(batch);                         // COLLECTIVE over the group
//   loss.backward();                                     // COLLECTIVE over the group
//
// Semantics of torch.distributed.fsdp.FullyShardedDataParallel (docs/design/fsdp1.md). The module owns its FSDP1 state.
// A module is used by one rank only.
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

// The hybrid strategies shard over `group` and replicate over `replicate_group`. Inside a group they work as kFullShard
// and kShardGradOp; gradients are averaged over both groups.
enum class ShardingStrategy { kFullShard, kShardGradOp, kNoShard, kHybridShard, kHybridShardZero2 };

// Semantics of torch.distributed.fsdp.MixedPrecision. Shards and optimizer states stay in the parameters' own dtype.
struct MixedPrecision {
  std::optional<c10::ScalarType> param_dtype = {};   // dtype of the gathered parameters and of forward and backward
  std::optional<c10::ScalarType> reduce_dtype = {};  // dtype of the gradient reduction; default: param_dtype, if set
  // Buffers are cast to this dtype in the root's first forward and stay in it. State dicts have them in the dtype
  // before the cast.
  std::optional<c10::ScalarType> buffer_dtype = {};
  // grad() stays in param_dtype (without sharding: in reduce_dtype), for custom optimizers that take gradients in low
  // precision.
  bool keep_low_precision_grads = false;
  bool cast_forward_inputs = false;      // cast floating-point inputs of this unit's forward to param_dtype
  bool cast_root_forward_inputs = true;  // the same for the root's forward
};

struct CPUOffload {
  bool offload_params = false;  // keep shards on the CPU; no effect when the parameters are on the CPU already
};

struct Fsdp1Options {
  std::shared_ptr<comm::Group> group = {};
  ShardingStrategy sharding_strategy = ShardingStrategy::kFullShard;
  // true: parameters() has each original parameter as the 1-d range of its elements in this rank's shard. Writes to it
  // are writes to the shard. A parameter without elements in the shard is empty and never has a gradient. Without
  // sharding it has its original shape. false: each unit has one flat parameter named "_flat_param".
  bool use_orig_params = false;
  MixedPrecision mixed_precision = {};
  CPUOffload cpu_offload = {};
  // For the hybrid strategies: the group of the ranks that have the same shard in other sharding groups. Every rank
  // passes as `group` and `replicate_group` the two groups that contain this rank.
  std::shared_ptr<comm::Group> replicate_group = {};
  // Called for each module of this unit (nested units excluded) with own parameters or buffers on the meta device,
  // outermost first. The function must replace these parameters and buffers by real tensors (Module::set_parameter),
  // with equal values on all replicas.
  std::function<void(nn::Module&)> param_init_fn = {};
};

// Flattens and shards the parameters of `module` that no nested wrap_fsdp1 call has. Every rank passes equal
// options. Apply bottom-up, before an optimizer is made. Modules that share a parameter must be wrapped by one
// call. COLLECTIVE over the group, and over replicate_group. Errors kShape, on all ranks:
// - the errors of FlatParameterLayout::make;
// - DTensors, and parameters on the meta device that param_init_fn did not materialise or did not keep shared;
// - a module that is wrapped or sharded already, and a parameter that is shared with a nested unit;
// - ranks that differ in options or parameters;
// - a hybrid strategy without replicate_group, or replicate_group without a hybrid strategy;
// - dtypes that are not floating point, and offloading from an accelerator.
//
// The backward pass averages gradients over the group. NoSync, set_requires_gradient_sync and
// set_gradient_divide_factor (gradient_sync.h) and fsdp_stats work as with fully_shard. If no rank had a
// gradient for a parameter: with use_orig_params the parameter's grad() does not change, as on one rank;
// without it the parameter's part of the flat parameter's gradient is zeros. Between forward passes the
// modules' at::Tensor fields are, with use_orig_params, the 1-d ranges of the parameters in this rank's shard.
// Without use_orig_params these fields are views of freed memory, and using them throws.
void wrap_fsdp1(nn::Module& module, const Fsdp1Options& options);

// One wrapped unit below a root, with the information that state-dict functions need.
class FlatParameterHandle {
 public:
  virtual ~FlatParameterHandle() = default;
  virtual const FlatParameterLayout& layout() const = 0;
  virtual const std::shared_ptr<comm::Group>& group() const = 0;
  virtual ShardingStrategy sharding_strategy() const = 0;  // the strategy in effect: kNoShard in a group of one rank
  // Path from the root to the wrapped module: "", or for example "layers.0." with the final dot.
  virtual std::string prefix() const = 0;
  // This rank's shard, [layout().sharded_numel()], or the whole flat parameter without sharding. A write to it changes
  // the parameters of the model and increments their version counter.
  virtual at::Tensor shard() const = 0;
  // The range of each member (original parameter) that this rank has: layout().shard_param_infos(), or
  // whole_param_infos() without sharding.
  virtual std::vector<ShardParamInfo> shard_param_infos() const = 0;
  // The names of this unit's parameters in named_parameters() of the root: one flat parameter, or, with
  // use_orig_params, each original parameter.
  virtual std::vector<std::string> parameter_names() const = 0;
  virtual std::vector<at::Tensor> parameters() const = 0;  // in the order of parameter_names()
};
// Returns the units of a module in the order of their modules (pre-order), each once. Prefixes are relative to `root`.
std::vector<std::shared_ptr<FlatParameterHandle>> flat_parameter_handles(nn::Module& root);

struct SummonOptions {
  bool recurse = true;    // also the units below
  bool writeback = true;  // false: changes that the body makes are dropped
  // Only the first rank of each group gets whole parameters; the other ranks keep their shards.
  bool rank0_only = false;
  bool offload_to_cpu = false;
  bool with_grads = false;  // also grad(), for parameters with a gradient on any rank
};
// FullyShardedDataParallel.summon_full_params: runs `body` while the modules below `module` have their whole original
// parameters, in their own dtype and under their own names. When the body throws, its changes up to then are written
// back as well. A forward of the modules throws while the body runs. The whole parameters are other tensors than those
// that an optimizer has. COLLECTIVE over the groups. Errors: kConfig, as upstream, for writeback with rank0_only,
// offload_to_cpu without sharding, with_grads with offload_to_cpu, with_grads without use_orig_params; kShape inside a
// forward, and for a parameter that the body replaced by one of another shape.
void summon_full_params(nn::Module& module, const SummonOptions& options, const std::function<void()>& body);

// Returns the dtype of a buffer in state dicts: the buffer's dtype before any cast to MixedPrecision::buffer_dtype.
// `buffer` is the module's at::Tensor field. No communication.
c10::ScalarType saved_buffer_dtype(nn::Module& root, const at::Tensor& buffer);

// Multiplies all gradients below `root` by max_norm / (norm + 1e-6) when this factor is below 1, and returns the norm
// before the scaling. Semantics of FullyShardedDataParallel.clip_grad_norm_, but the norm is computed in float64 and
// does not depend on the layout except for rounding. Gradients of units without sharding, and of parameters outside
// units, are assumed to be equal on every rank. A NaN norm makes all gradients NaN. COLLECTIVE over the groups of the
// sharded units. Errors: kConfig for a norm_type that is not positive, kShape when no module is wrapped.
double clip_grad_norm_(nn::Module& root, double max_norm, double norm_type = 2.0);

}  // namespace tessera
