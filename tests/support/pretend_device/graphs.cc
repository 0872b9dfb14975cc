// Graphs of the pretend device, for tessera/mesh/device_graph.h. order.h describes the checks that they make.
#include <c10/util/Exception.h>

#include "tessera/mesh/device_graph.h"
#include "tests/support/pretend_device/order.h"
#include "tests/support/pretend_device/registration.h"

namespace tessera::pretend {
namespace {

class PretendGraph final : public DeviceGraph {
 public:
  PretendGraph(c10::Device device, uint64_t pool) : device_(device), pool_(pool) { join_pool(device_.index(), pool_); }
  ~PretendGraph() override { leave_pool(device_.index(), pool_); }
  PretendGraph(const PretendGraph&) = delete;
  PretendGraph& operator=(const PretendGraph&) = delete;

  void begin_capture() override {
    TORCH_CHECK(!captured_, "[pretend] a graph is captured a second time");
    pretend::begin_capture(current_stream(device_.index()), pool_);
  }
  void end_capture() override {
    kernels_ = pretend::end_capture(current_stream(device_.index()));
    captured_ = true;
  }
  void replay() override {
    TORCH_CHECK(captured_, "[pretend] a graph is replayed that was not captured");
    pretend::replay(current_stream(device_.index()), kernels_);
  }

 private:
  c10::Device device_;
  uint64_t pool_;
  std::vector<Kernel> kernels_;
  bool captured_ = false;
};

class PretendGraphPool final : public GraphPool {
 public:
  explicit PretendGraphPool(c10::Device device) : device_(device) {}
  std::unique_ptr<DeviceGraph> make_graph() override { return std::make_unique<PretendGraph>(device_, pool_); }

 private:
  c10::Device device_;
  uint64_t pool_ = new_pool();
};

}  // namespace

void register_graphs() {
  register_device_graphs(c10::kPrivateUse1,
                         [](c10::Device device) { return std::make_shared<PretendGraphPool>(device); });
}

}  // namespace tessera::pretend
