#include "tessera/comm/rendezvous/device_choice.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/text/number.h"
#include "tessera/base/text/quote.h"
#include "tessera/comm/backends/device_backends.h"
#include "tessera/comm/backends/nccl_backend.h"
#include "tessera/comm/collectives/collectives.h"

namespace tessera::comm {
namespace {

std::string name_of(c10::DeviceType type) { return c10::DeviceTypeName(type, /*lower_case=*/true); }

struct RequestedDevice {
  c10::DeviceType type = c10::DeviceType::CPU;
  std::optional<int> index;
  bool is_auto = false;
};

RequestedDevice parse_requested_device(const DeviceRequest& request) {
  if (request.setting == "auto") {
    const auto accelerator = at::accelerator::getAccelerator();
    const bool cuda_is_out = request.backend == "gloo" || request.backend == "shm";
    const bool takes = accelerator && !(*accelerator == c10::DeviceType::CUDA && cuda_is_out);
    return {.type = takes ? *accelerator : c10::DeviceType::CPU, .index = {}, .is_auto = true};
  }
  const std::string_view text = request.setting;
  const size_t colon = text.find(':');
  const auto type = parse_device_type(text.substr(0, colon));
  RequestedDevice requested;
  bool fits = type.has_value();
  if (fits && colon != std::string_view::npos) {
    requested.index = parse_number<int>(text.substr(colon + 1));
    fits = requested.index && *requested.index >= 0 && *requested.index < 128 && *type != c10::DeviceType::CPU;
  }
  TESSERA_CHECK(
      fits, ErrorKind::kConfig,
      "[comm.device] {}: found {}, wanted auto, {}; an accelerator's name may be followed by ':' and a number.",
      request.key, quote(request.setting), device_type_names());
  requested.type = *type;
  return requested;
}

// Returns why this process has no device for its rank; empty when it has one.
std::string why_not_here(const RequestedDevice& requested, const DeviceRequest& request, int ranks_on_host) {
  if (requested.type == c10::DeviceType::CPU) return "";
  const int visible = visible_devices(requested.type);
  if (visible == 0) return fmt::format("no device of '{}' is visible", name_of(requested.type));
  if (requested.index) {
    if (*requested.index >= visible) return fmt::format("number {} of {} visible devices", *requested.index, visible);
    if (ranks_on_host > 1) return fmt::format("one number for {} ranks on this host; omit the number", ranks_on_host);
    return "";
  }
  // Two ranks cannot share a GPU over NCCL; over Gloo they can.
  const bool over_nccl = requested.type == c10::DeviceType::CUDA && ranks_on_host > 1 && request.backend != "gloo";
  if (over_nccl) return why_no_nccl(ranks_on_host);
  if (visible >= ranks_on_host || visible == 1) return "";  // each process may see another single device
  return fmt::format("{} ranks on this host, but {} devices", ranks_on_host, visible);
}

// `own` is the reason why this rank cannot use the accelerator; empty when it can. Returns the reason of the first rank
// that has one, after "rank N: " if there are several ranks; empty when no rank has a reason. COLLECTIVE over the
// world.
std::string first_reason(World& world, const std::string& own) {
  if (world.size() == 1) return own;
  const auto all = all_gather_bytes(*world.group(), own);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (!all[rank].empty()) return fmt::format("rank {}: {}", rank, all[rank]);
  }
  return "";
}

}  // namespace

// Each rank has a reason why it cannot use the accelerator, or none. All ranks exchange these reasons before any of
// them may throw, so either all ranks choose a device or all throw.
c10::Device choose_device(World& world, const DeviceRequest& request) {
  const RequestedDevice requested = parse_requested_device(request);
  const int local_size = world.info().local_size;
  // With "auto", a rank for which parse_requested_device() chose the CPU must call first_reason(), too. first_reason()
  // is COLLECTIVE, and a rank on another host, whose libtorch has an accelerator, also calls it.
  const bool none_here = requested.is_auto && requested.type == c10::DeviceType::CPU;
  std::string reason = none_here ? "no accelerator" : why_not_here(requested, request, local_size);
  if (requested.is_auto || requested.type != c10::DeviceType::CPU) reason = first_reason(world, reason);
  if (requested.is_auto && !reason.empty()) {
    if (!none_here) log_info("[comm.device] {}=auto: using the CPU ({})", request.key, reason);
    return c10::Device(c10::DeviceType::CPU);
  }
  TESSERA_CHECK(reason.empty(), ErrorKind::kConfig,
                "[comm.device] {}={}: {}. Set {} to cpu, or start as many ranks as there are devices.", request.key,
                request.setting, reason, request.key);
  if (requested.type == c10::DeviceType::CPU) return c10::Device(requested.type);
  bind_device({requested.type, static_cast<c10::DeviceIndex>(requested.index.value_or(-1))});
  const c10::Device device = device_of_rank(requested.type, world.info().local_rank);
  c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
  return device;
}

std::string describe_device(const DeviceRequest& request, int ranks_on_host) {
  const RequestedDevice requested = parse_requested_device(request);
  const std::string reason = why_not_here(requested, request, ranks_on_host);
  if (requested.type == c10::DeviceType::CPU) {
    if (!requested.is_auto) return "cpu";
    const bool has = at::accelerator::getAccelerator().has_value();
    return has ? fmt::format("cpu (auto: comm.backend={} moves CPU tensors only)", request.backend)
               : "cpu (auto: this libtorch has no accelerator)";
  }
  if (requested.is_auto && !reason.empty()) return fmt::format("cpu (auto: {})", reason);
  const auto name =
      requested.index ? fmt::format("{}:{}", name_of(requested.type), *requested.index) : name_of(requested.type);
  return reason.empty() ? fmt::format("{}, {} visible", name, visible_devices(requested.type))
                        : fmt::format("{}, not on this machine: {}", name, reason);
}

}  // namespace tessera::comm
