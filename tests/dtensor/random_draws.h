// The draws of random numbers for which an accelerator must give the CPU's values (dtensor/random/random.h).
// tests/devices runs them on the pretend device, random_cuda_test.cc on a GPU.
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

// Draws whose bits equal the CPU's.
inline NamedDraws uniform_draws() {
  return {{"uniform_", [](at::Tensor& x) { x.uniform_(-1, 2); }},
          {"bernoulli_", [](at::Tensor& x) { x.bernoulli_(0.3); }},
          {"random_", [](at::Tensor& x) { x.random_(-5, 1000003); }},
          {"dropout", [](at::Tensor& x) { x = at::dropout(x + 1, 0.3, true); }},
          {"rand_like", [](at::Tensor& x) { x = at::rand_like(x); }}};
}

// Draws whose values are within a unit in the last place of the CPU's.
inline NamedDraws other_draws() {
  return {{"normal_", [](at::Tensor& x) { x.normal_(1, 3); }},
          {"log_normal_", [](at::Tensor& x) { x.log_normal_(0.5, 2); }},
          {"exponential_", [](at::Tensor& x) { x.exponential_(2); }},
          {"cauchy_", [](at::Tensor& x) { x.cauchy_(1, 2); }},
          {"geometric_", [](at::Tensor& x) { x.geometric_(0.01); }},
          {"randn_like", [](at::Tensor& x) { x = at::randn_like(x); }}};
}

// The largest count of float32 numbers between an element of `a` and the same element of `b`.
inline int64_t most_units_apart(const at::Tensor& a, const at::Tensor& b) {
  const auto place = [](const at::Tensor& values) {  // maps float32 values to integers in the same order
    const auto bits = values.view(at::kInt).to(at::kLong);
    return at::where(bits.lt(0), bits.bitwise_and(0x7fffffff).neg(), bits);
  };
  return (place(a) - place(b)).abs().max().item<int64_t>();
}

// Returns the draw on a mesh over the whole world. COLLECTIVE over the world.
inline at::Tensor drawn(const std::shared_ptr<comm::World>& world, const std::string& device,
                        const Placement& placement, const Draw& draw) {
  const auto mesh = init_device_mesh(world, device, {world->size()}, {"dp"});
  manual_seed(20, mesh);
  auto values = dtensor::zeros({37, 11}, mesh, {placement});
  draw(values);
  draw(values);  // random operations on a tensor are counted, so that the second draw differs
  return full_tensor(values).cpu();
}

}  // namespace tessera::testing
