// The draws of random numbers that an accelerator must give as the CPU does (dtensor/random/random.h): tests/devices
// runs them on the pretend device, random_cuda_test.cc on a GPU.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/dtensor/factories.h"
#include "tessera/dtensor/random/random.h"

namespace tessera::testing {

using Draw = std::function<void(at::Tensor&)>;
using NamedDraws = std::vector<std::pair<std::string, Draw>>;

// The CPU's bits.
inline NamedDraws uniform_draws() {
  return {{"uniform_", [](at::Tensor& x) { x.uniform_(-1, 2); }},
          {"bernoulli_", [](at::Tensor& x) { x.bernoulli_(0.3); }},
          {"random_", [](at::Tensor& x) { x.random_(-5, 1000003); }},
          {"dropout", [](at::Tensor& x) { x = at::dropout(x + 1, 0.3, true); }},
          {"rand_like", [](at::Tensor& x) { x = at::rand_like(x); }}};
}

// Within a unit in the last place of it.
inline NamedDraws other_draws() {
  return {{"normal_", [](at::Tensor& x) { x.normal_(1, 3); }},
          {"log_normal_", [](at::Tensor& x) { x.log_normal_(0.5, 2); }},
          {"exponential_", [](at::Tensor& x) { x.exponential_(2); }},
          {"cauchy_", [](at::Tensor& x) { x.cauchy_(1, 2); }},
          {"geometric_", [](at::Tensor& x) { x.geometric_(0.01); }},
          {"randn_like", [](at::Tensor& x) { x = at::randn_like(x); }}};
}

// The most float32 numbers that lie between two of one place.
inline int64_t most_units_apart(const at::Tensor& a, const at::Tensor& b) {
  const auto place = [](const at::Tensor& values) {  // of numbers in their order, from below
    const auto bits = values.view(at::kInt).to(at::kLong);
    return at::where(bits.lt(0), bits.bitwise_and(0x7fffffff).neg(), bits);
  };
  return (place(a) - place(b)).abs().max().item<int64_t>();
}

// On a mesh over the whole world. COLLECTIVE over it.
inline at::Tensor drawn(const std::shared_ptr<comm::World>& world, const std::string& device,
                        const Placement& placement, const Draw& draw) {
  const auto mesh = init_device_mesh(world, device, {world->size()}, {"dp"});
  manual_seed(20, mesh);
  auto values = dtensor::zeros({37, 11}, mesh, {placement});
  draw(values);
  draw(values);  // operations are counted
  return full_tensor(values).cpu();
}

}  // namespace tessera::testing
