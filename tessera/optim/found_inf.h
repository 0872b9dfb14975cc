// Decides whether an optimizer step must be skipped, without a wait of the host for the accelerator.
//
//   const auto found = optim::found_inf(*group, {loss, norm}, device);     // COLLECTIVE over the group
//   optimizer->step(found);
//
// Pass both loss and norm: a label whose logit is minus infinity has an infinite loss and finite gradients.
#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "tessera/comm/group/group.h"

namespace at {
class Tensor;
}

namespace tessera::optim {

// Returns a float32 scalar on `device`, the same on all ranks: 1 if one of `numbers` is not finite on some rank, else
// 0. numbers: floating-point scalars, the same number of scalars on each rank. The host does not wait for numbers on
// the device. COLLECTIVE over the group, which must support the device's tensors (comm::Group::supports_device).
// PyTorch's GradScaler computes its found_inf from the gradients instead.
at::Tensor found_inf(comm::Group& group, const std::vector<at::Tensor>& numbers, c10::Device device);

}  // namespace tessera::optim
