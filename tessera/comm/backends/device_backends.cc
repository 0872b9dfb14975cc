#include "tessera/comm/backends/device_backends.h"

#include <c10/core/DeviceType.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <map>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/base/error.h"
#include "tessera/comm/backends/nccl_backend.h"

namespace tessera::comm {
namespace {

struct DeviceBackends {
  std::mutex mutex;
  std::map<c10::DeviceType, DeviceBackendMaker> makers = {{c10::DeviceType::CUDA, &make_nccl_backend}};
  std::map<c10::DeviceType, c10::DeviceIndex> bound;
  DeviceBackendSettings settings;
};

DeviceBackends& device_backends() {
  static DeviceBackends backends;
  return backends;
}

std::string lower_name(c10::DeviceType type) { return c10::DeviceTypeName(type, /*lower_case=*/true); }

}  // namespace

void register_device_backend(c10::DeviceType type, DeviceBackendMaker maker) {
  const std::lock_guard lock(device_backends().mutex);
  device_backends().makers[type] = std::move(maker);
}

void set_device_backend_settings(const DeviceBackendSettings& settings) {
  const std::lock_guard lock(device_backends().mutex);
  device_backends().settings = settings;
}

DeviceBackendSettings device_backend_settings() {
  const std::lock_guard lock(device_backends().mutex);
  return device_backends().settings;
}

// The registered maker is copied, and the copy is called without the lock on `mutex`: a maker communicates with the
// other ranks, and ranks that are threads of this process must be able to make their back-ends at the same time.
c10::intrusive_ptr<c10d::Backend> make_device_backend(DeviceBackendRequest request) {
  DeviceBackendMaker maker;
  {
    const std::lock_guard lock(device_backends().mutex);
    request.high_priority_streams = device_backends().settings.high_priority_streams;
    const auto found = device_backends().makers.find(request.device.type());
    if (found != device_backends().makers.end()) maker = found->second;
  }
  TESSERA_CHECK(maker, ErrorKind::kConfig,
                "[comm.new_group] group '{}': no back-end carries tensors of '{}'. Register one with "
                "comm::register_device_backend, or use the CPU.",
                request.group, lower_name(request.device.type()));
  return maker(request);
}

std::optional<c10::DeviceType> parse_device_type(std::string_view name) {
  if (name == "cpu") return c10::DeviceType::CPU;
  if (name == "cuda") return c10::DeviceType::CUDA;
  if (c10::is_privateuse1_backend_registered() && name == lower_name(c10::DeviceType::PrivateUse1)) {
    return c10::DeviceType::PrivateUse1;
  }
  return std::nullopt;
}

std::string device_type_names() {
  if (!c10::is_privateuse1_backend_registered()) return "cpu or cuda";
  return fmt::format("cpu, cuda or {}", lower_name(c10::DeviceType::PrivateUse1));
}

// Returns the number of visible devices of a type, as the device guard that libtorch registers for the type reports it.
// Returns 0 when libtorch has no guard, because it was built without this accelerator.
int visible_devices(c10::DeviceType type) {
  if (type == c10::DeviceType::CPU) return 1;
  const auto* const devices = c10::impl::device_guard_impl_registry.at(static_cast<size_t>(type)).load();
  return devices ? devices->deviceCount() : 0;
}

void bind_device(c10::Device device) {
  const std::lock_guard lock(device_backends().mutex);
  device_backends().bound.insert_or_assign(device.type(), device.index());
}

c10::Device device_of_rank(c10::DeviceType type, int local_rank) {
  if (type == c10::DeviceType::CPU) return c10::Device(type);
  {
    const std::lock_guard lock(device_backends().mutex);
    const auto bound = device_backends().bound.find(type);
    if (bound != device_backends().bound.end() && bound->second >= 0) return {type, bound->second};
  }
  return {type, static_cast<c10::DeviceIndex>(gpu_of(local_rank, visible_devices(type)))};
}

int gpu_of(int local_rank, int visible) { return visible == 1 ? 0 : local_rank; }

std::string why_too_few_gpus(int visible, int ranks_on_host, bool own_list) {
  if (visible == 0) return "no GPU is visible (see nvidia-smi and CUDA_VISIBLE_DEVICES)";
  if (visible >= ranks_on_host || (visible == 1 && own_list)) return "";
  return fmt::format("{} ranks on this host, but {} GPU{}", ranks_on_host, visible, visible == 1 ? "" : "s");
}

}  // namespace tessera::comm
