// Replaces nccl_backend.cc in builds whose libtorch has no NCCL.
#include <filesystem>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/base/error.h"
#include "tessera/comm/backends/nccl_backend.h"

namespace tessera::comm {

std::string why_no_nccl(int) {
  std::error_code ignored;
  const bool driver = std::filesystem::exists("/proc/driver/nvidia/version", ignored);
  return fmt::format("libtorch has no NCCL (it is a build for CPUs){}",
                     driver ? "" : ", and this machine has no NVIDIA driver");
}

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const DeviceBackendRequest& request) {
  raise(ErrorKind::kConfig,
        "[comm.nccl] {}. Use comm.backend=gloo, or build with TESSERA_TORCH set to a libtorch for CUDA.",
        why_no_nccl(request.ranks_on_host));
}

}  // namespace tessera::comm
