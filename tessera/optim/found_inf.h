// Whether a step is to be left out, for whoever lets the host run ahead of an accelerator.
//
//   const auto found = optim::found_inf(*group, {loss, norm}, device);     // COLLECTIVE over the group
//   optimizer->step(found);
//
// Both numbers matter: a label whose logit is minus infinity has an infinite loss and finite gradients.
#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "tessera/comm/group/group.h"

namespace at {
class Tensor;
}

namespace tessera::optim {

// A float32 scalar on `device`, alike on all ranks: 1 where one of `numbers` (floating-point scalars, as many as each
// rank has) is not finite on some rank, else 0. The host does not wait for those that lie there. COLLECTIVE over the
// group, which carries the device's tensors (comm::carries). As PyTorch's GradScaler, which looks at gradients instead.
at::Tensor found_inf(comm::Group& group, const std::vector<at::Tensor>& numbers, c10::Device device);

}  // namespace tessera::optim
