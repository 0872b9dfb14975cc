#include "tessera/optim/nemo/gradient_scaling.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/local_tensor.h"
#include "tessera/nn/gradient_marks.h"
#include "tessera/optim/detail/model_parameters.h"

namespace tessera::optim {
namespace {

// `all` divides every gradient. `experts` divides the gradients of experts in addition. 1 means no division.
struct Divisors {
  double all = 1;
  double experts = 1;
};

// FSDP has already divided the gradients by dp_group_size. Dividing them here by num_label_tokens / dp_group_size makes
// the product of both divisors num_label_tokens. FSDP has divided the gradients of experts only by the size of the dim
// ep_shard; dividing them here by dp_group_size / ep_shard as well gives them the scale of the other gradients. They
// are also divided by expert_tp_replication_factor, the number of tensor-parallel ranks that send the same tokens to
// the experts.
Divisors divisors_of(const ScaleAndClipOptions& options) {
  Divisors out;
  if (options.pp_enabled && options.num_label_tokens && options.dp_group_size.value_or(0) != 0) {
    const double tokens = static_cast<double>(*options.num_label_tokens);
    if (tokens != 0) out.all = tokens / static_cast<double>(*options.dp_group_size);
  }
  if (options.moe_mesh && options.dp_group_size) {
    const auto& mesh = *options.moe_mesh;
    const int64_t ep_shard = mesh.has_dim("ep_shard") ? mesh.size(mesh.dim_of("ep_shard")) : 1;
    out.experts = static_cast<double>(*options.dp_group_size) / static_cast<double>(ep_shard) *
                  static_cast<double>(options.expert_tp_replication_factor.value());
    TESSERA_CHECK(out.experts > 0, ErrorKind::kConfig, "[optim.scale_grads] dp_group_size: found {}, wanted at least 1",
                  *options.dp_group_size);
  }
  return out;
}

bool is_sharded_expert(const at::Tensor& parameter, const std::string& ep_axis_name) {
  return !ep_axis_name.empty() && is_dtensor(parameter) && is_dtensor(parameter.grad()) &&
         device_mesh(parameter)->has_dim(ep_axis_name);
}

}  // namespace

double scale_grads_and_clip_grad_norm(std::optional<double> max_grad_norm, const std::vector<nn::Module*>& model_parts,
                                      const ScaleAndClipOptions& options) {
  TESSERA_CHECK(options.expert_tp_replication_factor.value() >= 1, ErrorKind::kConfig,
                "[optim.scale_grads] expert_tp_replication_factor: found {}, wanted at least 1",
                options.expert_tp_replication_factor.value());
  TESSERA_CHECK(!max_grad_norm || !options.pp_enabled || !options.pp_axis_name.empty(), ErrorKind::kConfig,
                "[optim.scale_grads] pp_axis_name must be provided when pp_enabled is true");
  const Divisors divisors = divisors_of(options);
  const auto parameters = detail::model_parameters(model_parts);
  {
    const c10::NoGradGuard no_grad;
    for (const auto& parameter : parameters) {
      if (!parameter.tensor.grad().defined()) continue;
      double divisor = divisors.all;
      if (parameter.owner_divisor) {
        divisor *= *parameter.owner_divisor;
      } else if (parameter.local_expert || is_sharded_expert(parameter.tensor, options.ep_axis_name)) {
        divisor *= divisors.experts;
      }
      if (divisor == 1) continue;
      const at::Tensor part = local_tensor_of(parameter.tensor.grad());
      if (part.numel() > 0) part.div_(divisor);
    }
  }
  return clip_grad_norm(max_grad_norm, model_parts,
                        {.norm_type = options.norm_type,
                         .pp_enabled = options.pp_enabled,
                         .device_mesh = options.device_mesh,
                         .pp_axis_name = options.pp_axis_name,
                         .moe_mesh = options.moe_mesh,
                         .ep_axis_name = options.ep_axis_name});
}

int64_t get_expert_tp_replication_factor(const std::vector<nn::Module*>& model_parts, const MeshPtr& device_mesh,
                                         const std::string& tp_axis_name) {
  if (!device_mesh || !device_mesh->has_dim(tp_axis_name)) return 1;
  for (auto* part : model_parts) {
    for (const auto& [path, module] : part->named_modules()) {
      const auto* marks = nn::gradient_marks(*module);
      if (marks != nullptr && marks->moe_tp_replica_sync) return device_mesh->size(device_mesh->dim_of(tp_axis_name));
    }
  }
  return 1;
}

}  // namespace tessera::optim
