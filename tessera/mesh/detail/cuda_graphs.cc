#include "tessera/mesh/detail/cuda_graphs.h"

#include <ATen/cuda/CUDAGraph.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDACachingAllocator.h>

namespace tessera::detail {
namespace {

// Holds a reference to a memory pool of CUDA's caching allocator. Without it the allocator would release the pool when
// the last graph is destroyed, and no later graph could be captured into the pool.
class CudaGraphPool final : public GraphPool, public std::enable_shared_from_this<CudaGraphPool> {
 public:
  explicit CudaGraphPool(c10::Device device) : device_(device), pool_(at::cuda::graph_pool_handle()) {
    c10::cuda::CUDACachingAllocator::createOrIncrefPool(device_.index(), pool_);
  }
  ~CudaGraphPool() override { c10::cuda::CUDACachingAllocator::releasePool(device_.index(), pool_); }
  CudaGraphPool(const CudaGraphPool&) = delete;
  CudaGraphPool& operator=(const CudaGraphPool&) = delete;

  std::unique_ptr<DeviceGraph> make_graph() override;
  c10::Device device() const { return device_; }
  at::MempoolId_t pool() const { return pool_; }

 private:
  c10::Device device_;
  at::MempoolId_t pool_;
};

class CudaGraph final : public DeviceGraph {
 public:
  explicit CudaGraph(std::shared_ptr<CudaGraphPool> memory) : memory_(std::move(memory)) {}

  // The thread-local mode lets other threads (of NCCL, of data loaders) call CUDA during the capture.
  void begin_capture() override {
    const c10::DeviceGuard guard(memory_->device());
    graph_.capture_begin(memory_->pool(), cudaStreamCaptureModeThreadLocal);
  }
  void end_capture() override {
    const c10::DeviceGuard guard(memory_->device());
    graph_.capture_end();
  }
  void replay() override { graph_.replay(); }

 private:
  std::shared_ptr<CudaGraphPool> memory_;
  at::cuda::CUDAGraph graph_;  // destroyed before its memory
};

std::unique_ptr<DeviceGraph> CudaGraphPool::make_graph() { return std::make_unique<CudaGraph>(shared_from_this()); }

}  // namespace

GraphPoolFactory cuda_graph_pool_factory() {
  return [](c10::Device device) -> std::shared_ptr<GraphPool> { return std::make_shared<CudaGraphPool>(device); };
}

}  // namespace tessera::detail
