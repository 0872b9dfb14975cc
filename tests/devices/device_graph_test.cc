// Tests graphs on the pretend device: the tensors that they keep, and the wrong uses that the device finds.
#include "tessera/mesh/device_graph.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/base/error.h"
#include "tests/devices/pretend.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;

class DeviceGraphs : public OnPretendDevice {
 protected:
  at::Tensor counted(int64_t elements) {
    return at::arange(elements, at::TensorOptions(at::kFloat).device(pretend_device()));
  }
  // Captures `work` in a graph, which the test keeps alive.
  DeviceGraph& captured(const std::function<void()>& work) {
    graphs_.push_back(memory_->make_graph());
    capture(*graphs_.back(), stream_, work);
    return *graphs_.back();
  }

  std::shared_ptr<GraphPool> memory_ = make_graph_pool(pretend_device());
  DeviceStream stream_{pretend_device()};
  std::vector<std::unique_ptr<DeviceGraph>> graphs_;
};

TEST_F(DeviceGraphs, ReplaysReadTheCurrentInputs) {
  const at::Tensor x = counted(6), counter = at::zeros({1}, x.options());
  at::Tensor y;
  const auto before = pretend::counters(0);
  auto& graph = captured([&] {
    y = (x * 2).view({2, 3}).matmul(at::ones({3, 1}, x.options())).relu();
    counter.add_(1);
  });
  EXPECT_EQ((pretend::counters(0) - before).launches, 0);
  EXPECT_TRUE(y.cpu().isnan().all().item<bool>()) << "a capture computes nothing";
  EXPECT_EQ(counter.item<float>(), 0);
  for (const float factor : {1.F, -1.F, 3.F}) {
    x.copy_(counted(6) * factor);
    const auto at_replay = pretend::counters(0);
    graph.replay();
    EXPECT_EQ((pretend::counters(0) - at_replay).launches, 1);
    const at::Tensor wanted = (at::arange(6, at::kFloat) * factor * 2).view({2, 3}).sum(1, true).relu();
    EXPECT_TRUE(at::equal(y.cpu(), wanted)) << factor;
  }
  EXPECT_EQ(counter.item<float>(), 3);
}

TEST_F(DeviceGraphs, ForwardAndBackwardAreTwoGraphs) {
  const at::Tensor x = counted(4).set_requires_grad(true), gradient = at::ones({4}, x.options());
  at::Tensor y, found;
  auto& forward = captured([&] { y = x.sigmoid() * x; });
  auto& backward = captured([&] { found = torch::autograd::grad({y}, {x}, {gradient}, /*retain_graph=*/true)[0]; });
  for (const float value : {0.5F, -2.F}) {
    x.detach().fill_(value);
    gradient.fill_(value * 2);
    forward.replay();
    backward.replay();
    const at::Tensor host = at::full({4}, value).set_requires_grad(true);
    const at::Tensor wanted = torch::autograd::grad({host.sigmoid() * host}, {host}, {at::full({4}, value * 2)})[0];
    EXPECT_TRUE(at::equal(found.cpu(), wanted)) << value;
  }
}

// Graphs share the memory of their intermediate results. The results of two graphs have separate memory.
TEST_F(DeviceGraphs, ShareMemoryOfIntermediateResults) {
  const at::Tensor x = counted(1 << 16);
  at::Tensor first, second;
  auto& one = captured([&] { first = (x + 1).mul(2).sub(3); });
  const auto before = pretend::counters(0);
  auto& two = captured([&] { second = (x - 1).mul(2).add(3); });
  EXPECT_LE((pretend::counters(0) - before).segments, 1);
  one.replay(), two.replay();
  EXPECT_TRUE(at::equal(first.cpu(), (at::arange(1 << 16, at::kFloat) + 1).mul(2).sub(3)));
  EXPECT_TRUE(at::equal(second.cpu(), (at::arange(1 << 16, at::kFloat) - 1).mul(2).add(3)));
}

TEST_F(DeviceGraphs, InvalidOperationsDuringCaptureAreRefused) {
  const at::Tensor x = counted(4);
  const auto refused = [&](const char* what, const std::function<void()>& work) {
    EXPECT_THAT([&] { captured(work); }, ThrowsMessage<c10::Error>(HasSubstr(what)));
  };
  refused("item", [&] { x.sum().item(); });
  refused("nonzero makes the host wait", [&] { at::nonzero(x); });
  refused("copy to host while a graph is captured", [&] { x.cpu(); });
  refused("copy to device while a graph is captured", [&] { x.copy_(at::ones({4})); });
  refused("aten::normal_ while a graph is captured", [&] { at::empty_like(x).normal_(); });
  refused("synchronizeDevice makes the host wait",
          [] { c10::impl::VirtualGuardImpl(c10::kPrivateUse1).synchronizeDevice(0); });
  const DeviceStream other(pretend_device());
  refused("a stream that captures a graph and one that does not", [&] { other.wait_current_stream(); });
  refused("a stream that captures a graph and one that does not", [&] { other.block_current_stream(); });
  EXPECT_THAT([&] { capture(*memory_->make_graph(), DeviceStream(), [] {}); },
              ThrowsMessage<c10::Error>(HasSubstr("default stream")));
  // The failed captures do not disturb the next one.
  at::Tensor y;
  captured([&] { y = x + 1; }).replay();
  EXPECT_EQ(y.sum().item<float>(), 10);
}

TEST_F(DeviceGraphs, FreedOrUnorderedMemoryIsDetectedAtReplay) {
  at::Tensor x = counted(512), y;
  auto& graph = captured([&] { y = x * 2; });
  const DeviceStream writes(pretend_device());
  writes.wait_current_stream();
  {
    const auto entered = writes.make_current();
    x.fill_(1);
  }
  EXPECT_THAT([&] { graph.replay(); }, ThrowsMessage<c10::Error>(HasSubstr("race"))) << "nothing orders the write";
  writes.block_current_stream();
  graph.replay();
  EXPECT_EQ(y.sum().item<float>(), 1024);
  x.reset();
  EXPECT_THAT([&] { graph.replay(); }, ThrowsMessage<c10::Error>(HasSubstr("was freed already")));
}

TEST_F(DeviceGraphs, DevicesWithoutGraphsAreRefused) {
  EXPECT_FALSE(has_device_graphs(c10::DeviceType::CPU));
  EXPECT_THAT([] { make_graph_pool(c10::Device(c10::kCPU)); },
              ThrowsMessage<Error>(HasSubstr("cpu: no graphs of such devices")));
}

}  // namespace
}  // namespace tessera::testing
