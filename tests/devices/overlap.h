// Shared code of the tests of overlap on the pretend device.
#pragma once

#include <gmock/gmock.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "tests/devices/pretend.h"
#include "tests/parallel/small_model.h"
#include "tests/support/peak_memory.h"

namespace tessera::testing {

// Returns the launches whose name contains `part`, in the order of the host's launches.
inline std::vector<pretend::Launch> named(const std::vector<pretend::Launch>& launches, const std::string& part) {
  std::vector<pretend::Launch> out;
  for (const auto& launch : launches) {
    if (launch.name.find(part) != std::string::npos) out.push_back(launch);
  }
  return out;
}

inline std::vector<pretend::Launch> launches_during(int device, const std::function<void()>& call) {
  pretend::keep_names(true);
  pretend::take_launches(device);
  call();
  return pretend::take_launches(device);
}

// Checks the backward of three layers and a root whose gradients are summed over replicas. Each all-reduce must wait
// for its own reduce-scatter only.
inline void expect_all_reduces_wait_for_their_reduce_scatter_only(const std::vector<pretend::Launch>& backward) {
  const auto reductions = named(backward, "reduce_scatter"), sums = named(backward, "allreduce"),
             steps = named(backward, "gelu_backward");
  ASSERT_THAT(reductions, ::testing::SizeIs(4));
  ASSERT_THAT(sums, ::testing::SizeIs(4));
  EXPECT_TRUE(sums[0].comes_behind(reductions[0]));
  EXPECT_FALSE(sums[0].comes_behind(steps[1]));
  EXPECT_FALSE(sums[0].comes_behind(reductions[1]));
  EXPECT_FALSE(reductions[1].comes_behind(sums[0]));
  EXPECT_FALSE(sums[1].comes_behind(reductions[2]));
}

inline MeshPtr line_on_device(const WorldPtr& world) {
  return init_device_mesh(world, "pretend", {world->size()}, {"dp"});
}

// Moves the module's parameters; tied parameters stay tied.
inline void move_to(nn::Module& module, c10::Device device) {
  std::map<const c10::TensorImpl*, at::Tensor> there;
  std::vector<at::Tensor> alive;
  for (const auto& named : module.named_parameters(true)) {
    alive.push_back(named.slot->parameter);
    at::Tensor& moved = there[alive.back().unsafeGetTensorImpl()];
    if (!moved.defined()) moved = alive.back().detach().to(device).set_requires_grad(true);
    nn::Module::set_parameter(*named.slot, moved);
  }
}

// A model of layers that are each much larger than the rounding of the allocator.
struct WideLayers : nn::Callable<WideLayers> {
  static constexpr int64_t kWidth = 32, kHidden = 512;
  static constexpr int64_t kLayerNumel = 2 * kWidth * (kHidden + 1);
  static constexpr int64_t kNoise = 16384;  // bytes, less than half a layer in any dtype
  std::vector<std::shared_ptr<Layer>> layers;
  at::Tensor shift;
  explicit WideLayers(int count) {
    Values values(9);
    for (int i = 0; i < count; ++i) {
      const auto layer = std::make_shared<Layer>(values, kWidth, kHidden);
      layers.push_back(register_module("layers." + std::to_string(i), layer));
    }
    register_parameter("shift", shift, values({kWidth}));
  }
  at::Tensor forward(const at::Tensor& rows) {
    at::Tensor x = rows + shift;
    for (auto& layer : layers) x = (*layer)(x);
    return x;
  }
};

// Returns the change of the device's counters while `call` runs.
inline pretend::Counters cost_of(int device, const std::function<void()>& call) {
  const auto before = pretend::counters(device);
  call();
  return pretend::counters(device) - before;
}

// Returns the peak of memory on the device while `call` runs, beyond the memory before it. Expects that the memory
// afterwards is no more than before, except for `noise` bytes.
inline int64_t peak_of(int device, const std::function<void()>& call, int64_t noise = 0) {
  const auto before = pretend::counters(device).bytes;
  const int64_t most = peak_bytes_of(pretend_device(device), call);
  EXPECT_LE(pretend::counters(device).bytes, before + noise);
  return most;
}

class PretendOverlap : public OnPretendDevice {
 protected:
  void TearDown() override {
    pretend::keep_names(false);
    OnPretendDevice::TearDown();
  }
};

}  // namespace tessera::testing
