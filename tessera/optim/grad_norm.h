// The norm of all gradients of a model as if they lay on one rank, and clipping by it. Semantics of NeMo RL's
// get_grad_norm and clip_grad_by_total_norm_ and of NeMo AutoModel's clip_grad_norm, except that each element of the
// global gradient counts once whatever the layout.
//
//   double norm = optim::clip_grad_norm(model->parameters(), 1.0);      // COLLECTIVE over the parameters' meshes
//
// Gradients may be plain or DTensors on any mixture of meshes, placements and dtypes: what is sharded (StridedShard
// too) is summed over its mesh dims, what is replicated is counted on one rank, pending sums (Partial) are reduced
// first. Each rank reads its gradients in one pass and keeps sums in float64, with one gather of a number a mesh dim;
// ranks add up in their order, so the norm is the same on all ranks and in every run, and other layouts change its
// rounding only. Where powers of finite gradients leave float64, they are taken again over the largest. Every mesh of a
// parameter takes part, also of one without a gradient, so that ranks of which some lack a gradient still meet; a
// pending sum must be there on all ranks of its mesh.
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

// norm_type: any positive number, or infinity. 0 when no parameter has a gradient; NaN and infinity are carried.
// Plain gradients are taken to be the same on every rank. COLLECTIVE over every mesh that a parameter lies on, in the
// order of the parameters. Error kConfig for another norm_type.
double get_grad_norm(const std::vector<at::Tensor>& parameters, double norm_type = 2.0);

// The same beside groups: plain gradients are this rank's shards, summed over dp_cp_group, then tp_group; DTensors are
// reduced over their own mesh as above. dtype is what sums need at least, float32 or float64; they are kept in float64
// for either. COLLECTIVE over both groups, then over the meshes. Errors, alike on all ranks: kConfig for norm_type and
// dtype, kShape for a group that is no dim, nor several dims flattened, of the meshes that DTensors lie on.
double get_grad_norm(const std::vector<at::Tensor>& parameters, comm::Group& dp_cp_group, comm::Group& tp_group,
                     double norm_type = 2.0, at::ScalarType dtype = at::kFloat);

// The same of order 2, for whoever lets the host run ahead: a float64 scalar on the accelerator where all gradients
// lie, when they have 32 bits or fewer (whose squares float64 holds), for which nobody has waited; else on the CPU.
// COLLECTIVE as get_grad_norm.
at::Tensor grad_norm_tensor(const std::vector<at::Tensor>& parameters);

// The norm of grad_norm_tensor where gradients are not all there at a time: they are added as they come, and may be
// freed then. Sums of squares are kept in float64 and not taken again, so gradients of 64 bits beyond 1e154 give
// infinity.
//
//   GradNormInParts norm(model->parameters());
//   norm.add(parameters_of_a_layer);           // local, for each layer
//   at::Tensor total = norm.norm();            // COLLECTIVE; begins anew
class GradNormInParts {
 public:
  explicit GradNormInParts(std::vector<at::Tensor> parameters);  // all of them
  ~GradNormInParts();
  GradNormInParts(const GradNormInParts&) = delete;
  GradNormInParts& operator=(const GradNormInParts&) = delete;
  // Of the gradients that these have. Error kShape for one that does not lie as its parameter does.
  void add(const std::vector<at::Tensor>& parameters);
  // Of what was added since the last call, and of the gradients that parameters have now. COLLECTIVE as
  // get_grad_norm.
  at::Tensor norm();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Multiplies gradients by max_grad_norm / (total_norm + 1e-6) where that is below 1, each in its own dtype (bfloat16
// and float16 too; the factor is float32 at least). A NaN total leaves them alone; an infinite one makes finite
// gradients 0 and infinite ones NaN. dtype as above. No communication: total_norm is the same on all ranks.
void clip_grad_by_total_norm_(const std::vector<at::Tensor>& parameters, double max_grad_norm, double total_norm,
                              at::ScalarType dtype = at::kFloat);
// By a norm of grad_norm_tensor, where it lies. A NaN total makes all gradients NaN.
void clip_grad_by_total_norm_(const std::vector<at::Tensor>& parameters, double max_grad_norm,
                              const at::Tensor& total_norm);

struct ClipGradNormOptions {
  double norm_type = 2.0;
  bool error_if_nonfinite = false;  // kInternal, before anything is scaled
  MeshPtr pp_mesh = {};             // one dim of pipeline stages, whose norms are combined; null: one stage
  // One dim of ranks that each have experts of their own: gradients of ep_parameters are added up over it, after the
  // meshes they lie on. Null: nobody has. Whether there are ep_parameters is alike on all its ranks.
  MeshPtr ep_mesh = {};
  std::vector<at::Tensor> ep_parameters = {};
};
// get_grad_norm, then every gradient times min(1, max_norm / (norm + 1e-6)), as torch's clip_grads_with_norm_: a NaN
// norm makes all gradients NaN, an infinite one finite gradients 0 and infinite ones NaN. Returns the norm before
// clipping. COLLECTIVE as get_grad_norm, then over ep_mesh and pp_mesh.
double clip_grad_norm(const std::vector<at::Tensor>& parameters, double max_norm,
                      const ClipGradNormOptions& options = {});

struct ModelClipOptions {
  double norm_type = 2.0;
  bool pp_enabled = false;
  MeshPtr device_mesh = {};  // with pp_enabled, its dim pp_axis_name holds the stages; null: one stage
  std::string pp_axis_name = "";
  MeshPtr moe_mesh = {};  // its dim ep_axis_name holds the ranks with experts of their own; null: nobody has
  std::string ep_axis_name = "";
};
// Of all parameters that require gradients of all parts, in order, each once. nullopt: 0, nothing is computed or sent.
// Added up over moe_mesh's dim ep_axis_name are experts by nn::GradientMarks::ep_local_experts and by name
// (is_te_expert_parameter), but not DTensors whose own mesh has that dim. Error kConfig for pp_enabled without
// pp_axis_name. COLLECTIVE as above.
double clip_grad_norm(std::optional<double> max_grad_norm, const std::vector<nn::Module*>& model_parts,
                      const ModelClipOptions& options = {});

}  // namespace tessera::optim
