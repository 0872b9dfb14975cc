// The NCCL back-end of builds whose libtorch has NCCL.
#include "tessera/comm/backends/nccl_backend.h"

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "tessera/base/error.h"

namespace tessera::comm {
namespace {

// Disables c10d's watchdog, which would end the process without naming the rank that is the cause. Tessera's watchdog
// collects the flight records of all ranks, reports the cause to them and aborts the group. An environment variable
// that the user has set is not changed. The timeout kNever keeps c10d from reporting a call as timed out.
constexpr std::chrono::hours kNever{24 * 365};
void disable_c10d_watchdog() {
  ::setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", /*overwrite=*/0);
  ::setenv("TORCH_NCCL_ENABLE_MONITORING", "0", /*overwrite=*/0);
}

// c10d's NCCL back-end, bound to one device. As in c10d, Work::wait() only orders the current stream after the
// collective; Tessera's watchdog observes the end of the collective on the device.
class NcclBackend final : public c10d::ProcessGroupNCCL {
 public:
  NcclBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size, c10::intrusive_ptr<Options> options,
              c10::Device device)
      : ProcessGroupNCCL(std::move(store), rank, size, std::move(options)), device_(device) {
    setBoundDeviceId(device);
  }

  // c10d expects the calling thread's current device to be the group's device, and needs the device's index.
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& caller_options) override {
    const c10::cuda::CUDAGuard guard(device_);
    c10d::BarrierOptions options = caller_options;
    options.device_ids = {device_.index()};
    return ProcessGroupNCCL::barrier(options);
  }

 private:
  const c10::Device device_;
};

}  // namespace

std::string why_no_nccl(int ranks_on_host) {
  std::error_code ignored;
  if (!std::filesystem::exists("/proc/driver/nvidia/version", ignored)) return "this machine has no NVIDIA driver";
  const char* list = std::getenv("CUDA_VISIBLE_DEVICES");
  const int visible = c10::cuda::device_count();  // returns 0 when CUDA reports an error
  return why_too_few_gpus(visible, ranks_on_host, list && *list);
}

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const DeviceBackendRequest& request) {
  const std::string reason = why_no_nccl(request.ranks_on_host);
  TESSERA_CHECK(reason.empty(), ErrorKind::kConfig,
                "[comm.nccl] {}. Use comm.backend=gloo, or as many ranks as there are GPUs.", reason);
  disable_c10d_watchdog();
  auto nccl = c10d::ProcessGroupNCCL::Options::create(request.high_priority_streams);
  nccl->timeout = kNever;
  if (request.split_from) {
    nccl->split_from = c10::dynamic_intrusive_pointer_cast<c10d::ProcessGroupNCCL>(request.split_from);
    nccl->split_color = request.split_color;
  }
  return c10::make_intrusive<NcclBackend>(c10::make_intrusive<c10d::PrefixStore>("nccl", request.store), request.rank,
                                          request.size, std::move(nccl), request.device);
}

}  // namespace tessera::comm
