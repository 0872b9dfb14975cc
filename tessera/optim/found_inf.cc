#include "tessera/optim/found_inf.h"

#include <ATen/ATen.h>

#include "tessera/comm/collectives/collectives.h"

namespace tessera::optim {

at::Tensor found_inf(comm::Group& group, const std::vector<at::Tensor>& numbers, c10::Device device) {
  auto found = at::zeros({}, at::TensorOptions(device).dtype(at::kFloat));
  // number - number is 0 for a finite number and NaN otherwise, and NaN != 0 holds.
  for (const auto& number : numbers) found = found + (number - number).to(found.options());
  found = found.ne(0).to(at::kFloat);
  comm::all_reduce(group, found, comm::ReduceOp::kMax, "steps that are not finite").wait();
  return found;
}

}  // namespace tessera::optim
