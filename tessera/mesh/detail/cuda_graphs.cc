#include "tessera/mesh/detail/cuda_graphs.h"

#include <ATen/cuda/CUDAGraph.h>
#include <c10/core/DeviceGuard.h>

namespace tessera::detail {
namespace {

class CudaGraph final : public DeviceGraph {
 public:
  CudaGraph(c10::Device device, at::MempoolId_t memory) : device_(device), memory_(memory) {}

  // Other threads (of NCCL, of loaders) go on: what they call is not of the capture.
  void begin_capture() override {
    const c10::DeviceGuard guard(device_);
    graph_.capture_begin(memory_, cudaStreamCaptureModeThreadLocal);
  }
  void end_capture() override {
    const c10::DeviceGuard guard(device_);
    graph_.capture_end();
  }
  void replay() override { graph_.replay(); }

 private:
  c10::Device device_;
  at::MempoolId_t memory_;
  at::cuda::CUDAGraph graph_;
};

class CudaGraphMemory final : public GraphMemory {
 public:
  explicit CudaGraphMemory(c10::Device device) : device_(device), memory_(at::cuda::graph_pool_handle()) {}
  std::unique_ptr<DeviceGraph> make_graph() override { return std::make_unique<CudaGraph>(device_, memory_); }

 private:
  c10::Device device_;
  at::MempoolId_t memory_;
};

}  // namespace

GraphMemoryMaker cuda_graph_memory() {
  return [](c10::Device device) -> std::shared_ptr<GraphMemory> { return std::make_shared<CudaGraphMemory>(device); };
}

}  // namespace tessera::detail
