#include "tessera/mesh/detail/cuda_graphs.h"

#include <ATen/cuda/CUDAGraph.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDACachingAllocator.h>

namespace tessera::detail {
namespace {

// Keeps the pool while no graph does: one that everybody has left cannot be captured into again.
class CudaPool {
 public:
  explicit CudaPool(c10::Device device) : device_(device), id_(at::cuda::graph_pool_handle()) {
    c10::cuda::CUDACachingAllocator::createOrIncrefPool(device_.index(), id_);
  }
  ~CudaPool() { c10::cuda::CUDACachingAllocator::releasePool(device_.index(), id_); }
  CudaPool(const CudaPool&) = delete;
  CudaPool& operator=(const CudaPool&) = delete;
  c10::Device device() const { return device_; }
  at::MempoolId_t id() const { return id_; }

 private:
  c10::Device device_;
  at::MempoolId_t id_;
};

class CudaGraph final : public DeviceGraph {
 public:
  explicit CudaGraph(std::shared_ptr<CudaPool> pool) : pool_(std::move(pool)) {}

  // Other threads (of NCCL, of loaders) go on: what they call is not of the capture.
  void begin_capture() override {
    const c10::DeviceGuard guard(pool_->device());
    graph_.capture_begin(pool_->id(), cudaStreamCaptureModeThreadLocal);
  }
  void end_capture() override {
    const c10::DeviceGuard guard(pool_->device());
    graph_.capture_end();
  }
  void replay() override { graph_.replay(); }

 private:
  std::shared_ptr<CudaPool> pool_;
  at::cuda::CUDAGraph graph_;  // ends before its pool does
};

class CudaGraphMemory final : public GraphMemory {
 public:
  explicit CudaGraphMemory(c10::Device device) : pool_(std::make_shared<CudaPool>(device)) {}
  std::unique_ptr<DeviceGraph> make_graph() override { return std::make_unique<CudaGraph>(pool_); }

 private:
  std::shared_ptr<CudaPool> pool_;
};

}  // namespace

GraphMemoryMaker cuda_graph_memory() {
  return [](c10::Device device) -> std::shared_ptr<GraphMemory> { return std::make_shared<CudaGraphMemory>(device); };
}

}  // namespace tessera::detail
