// The norm of all gradients of a model as if they lay on one rank, and clipping by it.
//
//   double norm = optim::clip_grad_norm(model->parameters(), 1.0);      // COLLECTIVE over the parameters' meshes
//
// Each element of the global gradient counts once: sharded ones are summed over their mesh dims, replicated ones are
// counted on one rank, pending sums (Partial) are reduced first; parameters on different meshes are combined. Sums are
// kept in double precision and taken in a fixed order, so that the norm is the same in every run and does not depend on
// the layout beyond rounding. Plain parameters are taken to be the same on every rank.
#pragma once

#include <ATen/core/TensorBase.h>

#include <vector>

namespace at {
class Tensor;
}

namespace tessera::optim {

// norm_type: 1, 2, any positive number, or infinity. Parameters without gradients are left out; 0 when none has one.
// COLLECTIVE over every mesh that a gradient lies on. Error kConfig for another norm_type.
double get_grad_norm(const std::vector<at::Tensor>& parameters, double norm_type = 2.0);

// Scales gradients of every dtype by max_norm / (total_norm + 1e-6) where that is below 1, as
// torch.nn.utils.clip_grad_norm_ does. No communication: total_norm is the same on all ranks.
void clip_grad_by_total_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double total_norm);

// Both; returns the norm before clipping. COLLECTIVE as get_grad_norm. A norm that is not finite clips nothing.
double clip_grad_norm(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type = 2.0);

}  // namespace tessera::optim
