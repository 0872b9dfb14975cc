// The norm of all gradients of a model, as if they were on one rank, and clipping by that norm. Semantics of NeMo RL's
// get_grad_norm and clip_grad_by_total_norm_ and of NeMo AutoModel's clip_grad_norm, except that each element of the
// global gradient counts exactly once in every layout.
//
//   double norm = optim::clip_grad_norm(model->parameters(), 1.0);      // COLLECTIVE over the parameters' meshes
//
// Gradients may be plain or DTensors, with any mixture of meshes, placements and dtypes. Sharded gradients
// (StridedShard too) are summed over their mesh dims, replicated gradients count on one rank, and Partial gradients are
// reduced first.
//
// Each rank reads its gradients once and sums in float64; each mesh dim costs one all-gather of one number. Ranks add
// up in rank order, so the norm is the same on all ranks and in every run; another layout changes only its rounding.
// Where powers of finite gradients overflow or underflow float64, they are computed again relative to the largest
// gradient.
//
// The collectives run over the mesh of every parameter, even if the parameter has no gradient on this rank: ranks that
// have the gradient would otherwise wait forever. A Partial gradient must exist on all ranks of its mesh.
#pragma once

#include <ATen/core/TensorBase.h>
#include <c10/core/ScalarType.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/mesh/device_mesh.h"

namespace at {
class Tensor;
}
namespace tessera::nn {
class Module;
}

namespace tessera::optim {

// norm_type: any positive number, or infinity. Returns 0 when no parameter has a gradient; NaN and infinity propagate.
// Plain gradients are assumed equal on all ranks and count once. COLLECTIVE over the mesh of every parameter, in the
// order of the parameters. Error kConfig for another norm_type.
double get_grad_norm(const std::vector<at::Tensor>& parameters, double norm_type = 2.0);

// Returns the norm where plain gradients are this rank's shards: their sums are reduced over dp_cp_group, then over
// tp_group. The sums of DTensors are reduced over their own meshes. dtype is the least precise dtype that the sums may
// have, float32 or float64; the sums are float64 in both cases. COLLECTIVE over both groups, then over the meshes.
// Errors, the same on all ranks: kConfig for another norm_type (as above) or another dtype; kShape for a group that is
// neither one dim nor several flattened dims of the DTensors' meshes.
double get_grad_norm(const std::vector<at::Tensor>& parameters, comm::Group& dp_cp_group, comm::Group& tp_group,
                     double norm_type = 2.0, at::ScalarType dtype = at::kFloat);

// Returns the norm of order 2 as a float64 scalar tensor. If one accelerator holds all trainable parameters, in dtypes
// of at most 32 bits (whose squares fit in float64), the scalar is on this accelerator and the host does not wait for
// it; otherwise it is on the CPU. COLLECTIVE as get_grad_norm(parameters).
at::Tensor grad_norm_tensor(const std::vector<at::Tensor>& parameters);

// Computes grad_norm_tensor() where not all gradients exist at the same time: add() adds gradients to the sum, and the
// caller may free them afterwards. Squares are summed in float64 without the second computation that get_grad_norm()
// does after an overflow, so 64-bit gradients beyond 1e154 give infinity.
//
//   GradNormAccumulator norm(model->parameters());
//   norm.add(parameters_of_a_layer);           // local, for each layer
//   at::Tensor total = norm.norm();            // COLLECTIVE; also starts the next sum
class GradNormAccumulator {
 public:
  explicit GradNormAccumulator(std::vector<at::Tensor> parameters);  // all parameters of the model
  ~GradNormAccumulator();
  GradNormAccumulator(const GradNormAccumulator&) = delete;
  GradNormAccumulator& operator=(const GradNormAccumulator&) = delete;
  // Adds the squares of these parameters' gradients to the sum. Error kShape for a gradient whose placements differ
  // from its parameter's.
  void add(const std::vector<at::Tensor>& parameters);
  // Returns the norm of the gradients added since the last norm() and of the gradients that the parameters have now.
  // COLLECTIVE as get_grad_norm(parameters).
  at::Tensor norm();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Multiplies gradients by max_grad_norm / (total_norm + 1e-6) if that is below 1, each in its own dtype (bfloat16 and
// float16 too; the factor is float32 or wider). A NaN total_norm leaves the gradients unchanged; an infinite one makes
// finite gradients 0 and infinite ones NaN. dtype must be float32 or float64 and does not change the result. No
// communication: total_norm must be the same on all ranks.
void clip_grad_by_total_norm_(const std::vector<at::Tensor>& parameters, double max_grad_norm, double total_norm,
                              at::ScalarType dtype = at::kFloat);
// Clips by the result of grad_norm_tensor() without a wait of the host. A NaN norm makes all gradients NaN.
void clip_grad_by_total_norm_(const std::vector<at::Tensor>& parameters, double max_grad_norm,
                              const at::Tensor& total_norm);

struct ClipGradNormOptions {
  double norm_type = 2.0;
  bool error_if_nonfinite = false;  // Error kInternal, before any gradient is scaled
  MeshPtr pp_mesh = {};             // a mesh of one dim, the pipeline stages, whose norms are combined; null: one stage
  // ep_mesh has one dim, the expert-parallel ranks. ep_parameters are experts that only this rank of ep_mesh holds; the
  // sums of their gradients are reduced over their own meshes, then over ep_mesh. Null: there are no such experts.
  // Either all ranks of ep_mesh have ep_parameters, or none has.
  MeshPtr ep_mesh = {};
  std::vector<at::Tensor> ep_parameters = {};
};
// Computes get_grad_norm, then multiplies every gradient by min(1, max_norm / (norm + 1e-6)), as torch's
// clip_grads_with_norm_: a NaN norm makes all gradients NaN; an infinite norm makes finite gradients 0 and infinite
// ones NaN. Returns the norm before clipping. COLLECTIVE as get_grad_norm(parameters), then over ep_mesh and pp_mesh.
double clip_grad_norm(const std::vector<at::Tensor>& parameters, double max_norm,
                      const ClipGradNormOptions& options = {});

struct ModelClipOptions {
  double norm_type = 2.0;
  bool pp_enabled = false;
  MeshPtr device_mesh = {};  // with pp_enabled: its dim pp_axis_name holds the stages; null: one stage
  std::string pp_axis_name = "";
  MeshPtr moe_mesh = {};  // its dim ep_axis_name holds the ranks with their own experts; null: no such experts
  std::string ep_axis_name = "";
};
// Calls clip_grad_norm for all trainable parameters of all parts, each once. If max_grad_norm is nullopt, returns 0
// without computation or communication. The sums of experts are also reduced over moe_mesh's dim ep_axis_name. Experts
// are parameters marked by nn::GradientMarks::ep_local_experts or named as experts (is_te_expert_parameter), except
// DTensors whose own mesh has the dim ep_axis_name. Error kConfig for pp_enabled without pp_axis_name. COLLECTIVE over
// the meshes of the parameters, then over the dims ep_axis_name and pp_axis_name.
double clip_grad_norm(std::optional<double> max_grad_norm, const std::vector<nn::Module*>& model_parts,
                      const ModelClipOptions& options = {});

}  // namespace tessera::optim
