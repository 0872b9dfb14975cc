// From the gradients that backward leaves to those that the optimizer takes: scaled for pipelines and experts, then
// clipped. Semantics of NeMo AutoModel's scale_grads_and_clip_grad_norm.
//
//   optim::scale_grads_and_clip_grad_norm(1.0, {&model}, {.moe_mesh = moe, .ep_axis_name = "ep", .dp_group_size = 8});
//
// Without a pipeline the loss is divided by the label tokens of the global batch before backward; a pipeline's schedule
// runs sums, so gradients are divided afterwards, times what FSDP has divided already. Gradients of experts are of the
// tokens of all ranks along the expert dim.
#pragma once

#include <concepts>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/optim/grad_norm.h"

namespace tessera::optim {

// A whole number; booleans and fractions do not compile.
class ReplicationFactor {
 public:
  template <std::integral T>
  requires(!std::same_as<T, bool>) ReplicationFactor(T value)
      : value_(static_cast<int64_t>(value)) {}  // NOLINT: converts like a number
  int64_t value() const { return value_; }

 private:
  int64_t value_;
};

struct ScaleAndClipOptions {
  double norm_type = 2.0;
  bool pp_enabled = false;
  MeshPtr device_mesh = {};
  MeshPtr moe_mesh = {};
  std::string ep_axis_name = "";
  std::string pp_axis_name = "";
  std::optional<int64_t> num_label_tokens = {};  // of the global batch
  std::optional<int64_t> dp_group_size = {};     // ranks that FSDP averages over, context parallel ones among them
  ReplicationFactor expert_tp_replication_factor = 1;
};
// Divides, in one pass over all parameters that have a gradient (frozen ones too):
//   all          by num_label_tokens / dp_group_size, with pp_enabled where both are given and not 0
//   marked ones  by nn::GradientMarks::grad_divisors
//   experts      by dp_group_size / size of moe_mesh's dim ep_shard (1 without it) * expert_tp_replication_factor,
//   where
//                moe_mesh and dp_group_size are given and the module divides by nothing of its own. Experts are
//                DTensors whose mesh has the dim ep_axis_name, marked parameters (ep_local_experts), and those of
//                is_te_expert_parameter.
// Then clip_grad_norm with the same options; returns what that returns. Gradients are scaled without max_grad_norm,
// too. COLLECTIVE as clip_grad_norm. Errors kConfig, before anything is scaled: a factor below 1, pp_enabled and
// max_grad_norm without pp_axis_name.
double scale_grads_and_clip_grad_norm(std::optional<double> max_grad_norm, const std::vector<nn::Module*>& model_parts,
                                      const ScaleAndClipOptions& options = {});

// The size of the dim tp_axis_name where a module of some part is marked moe_tp_replica_sync, else 1. A null mesh, or
// one without that dim: 1. No communication.
int64_t get_expert_tp_replication_factor(const std::vector<nn::Module*>& model_parts, const MeshPtr& device_mesh,
                                         const std::string& tp_axis_name = "tp");

}  // namespace tessera::optim
