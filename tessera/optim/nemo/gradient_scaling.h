// Scales the gradients of backward for pipelines and experts, and clips them, before the optimizer's step. Semantics of
// NeMo AutoModel's scale_grads_and_clip_grad_norm.
//
//   optim::scale_grads_and_clip_grad_norm(1.0, {&model}, {.moe_mesh = moe, .ep_axis_name = "ep", .dp_group_size = 8});
//
// Without a pipeline the loss is divided by the label tokens of the global batch before backward. A pipeline's schedule
// sums losses, so its gradients are divided afterwards; the divisor takes FSDP's average over ranks into account.
// Gradients of experts come from the tokens of all ranks along the expert-parallel dim, so they have another divisor.
#pragma once

#include <concepts>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/optim/grad_norm.h"

namespace tessera::optim {

// An integer; booleans and floating-point numbers do not compile.
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
  std::optional<int64_t> num_label_tokens = {};  // label tokens of the global batch
  std::optional<int64_t> dp_group_size = {};     // ranks that FSDP averages over, context-parallel ones included
  ReplicationFactor expert_tp_replication_factor = 1;
};
// Divides the gradients of all parameters, frozen ones too, in one pass:
//   all gradients     by num_label_tokens / dp_group_size, with pp_enabled, where both are given and not 0
//   marked gradients  by their nn::GradientMarks::grad_divisors
//   experts           by dp_group_size / size of moe_mesh's dim ep_shard (1 without that dim) *
//                     expert_tp_replication_factor, where moe_mesh and dp_group_size are given and the module has no
//                     divisor of its own. Experts are DTensors whose mesh has the dim ep_axis_name, marked parameters
//                     (ep_local_experts), and names with is_te_expert_parameter.
// Then calls clip_grad_norm with the same options and returns its result. Gradients are scaled even without
// max_grad_norm. COLLECTIVE as clip_grad_norm. Errors kConfig, before anything is scaled: a factor below 1; pp_enabled
// and max_grad_norm without pp_axis_name.
double scale_grads_and_clip_grad_norm(std::optional<double> max_grad_norm, const std::vector<nn::Module*>& model_parts,
                                      const ScaleAndClipOptions& options = {});

// Returns the size of device_mesh's dim tp_axis_name if a module in one of `model_parts` is marked
// nn::GradientMarks::moe_tp_replica_sync, else 1. Returns 1 for a null mesh and for a mesh without the dim
// tp_axis_name. No communication.
int64_t get_expert_tp_replication_factor(const std::vector<nn::Module*>& model_parts, const MeshPtr& device_mesh,
                                         const std::string& tp_axis_name = "tp");

}  // namespace tessera::optim
