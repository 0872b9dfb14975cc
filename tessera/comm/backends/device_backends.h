// The back-ends for accelerator tensors, and the choice of each rank's device.
//
//   register_device_backend(c10::kPrivateUse1, make_own_backend);   // before any group of that device is made
//   c10::Device device = device_of_rank(c10::kPrivateUse1, world->info().local_rank);
//
// For CUDA the back-end is NCCL. For a vendor's device type (PrivateUse1) the vendor's code registers a back-end. CPU
// tensors of the same group use another back-end (backend_choice.h). Thread-safe.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace tessera::comm {

struct DeviceBackendRequest {
  c10::intrusive_ptr<c10d::Store> store;  // a store that no other group uses
  std::string group;
  int rank = 0;  // position in the group
  int size = 1;
  c10::Device device = c10::Device(c10::DeviceType::CUDA, 0);  // device of this rank
  int ranks_on_host = 1;                                       // ranks of the world on this host
  c10::intrusive_ptr<c10d::Backend> host;  // back-end of the group's CPU tensors, for transfers through the host
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  bool high_priority_streams = false;  // from DeviceBackendSettings
  // Back-end whose communicator is split (ncclCommSplit) to make the communicator of the new back-end. All ranks of
  // `split_from` must call the DeviceBackendMaker, and the ranks that pass the same `split_color` form one new
  // communicator. Null: the new communicator is made without a split.
  c10::intrusive_ptr<c10d::Backend> split_from = {};
  int split_color = 0;
};

// Settings of the groups that this process makes after set_device_backend_settings(). They must be equal on all ranks.
struct DeviceBackendSettings {
  bool high_priority_streams = false;  // run collectives before other kernels that are ready
  // true: communicators are made by ncclCommSplit where possible, which needs no rendezvous. Later groups of the same
  // ranks are split from the first group of these ranks. The groups along the dims of a mesh are split from the group
  // of all ranks.
  bool split_groups = true;
};
void set_device_backend_settings(const DeviceBackendSettings& settings);
DeviceBackendSettings device_backend_settings();

// Function that makes a back-end. COLLECTIVE over the ranks that share the request's store.
using DeviceBackendMaker = std::function<c10::intrusive_ptr<c10d::Backend>(const DeviceBackendRequest&)>;

// Registers `maker` as the function that makes the back-ends of a device type. It replaces the maker that was
// registered for this type before.
void register_device_backend(c10::DeviceType type, DeviceBackendMaker maker);
// Calls the maker that is registered for the device's type and returns its back-end. request.high_priority_streams is
// overwritten by the value in device_backend_settings(). COLLECTIVE over the ranks that share the request's store.
// Error kConfig when no maker is registered for the device's type.
c10::intrusive_ptr<c10d::Backend> make_device_backend(DeviceBackendRequest request);

// Parses "cpu", "cuda" or the name under which the accelerator was registered; nullopt for other names.
std::optional<c10::DeviceType> parse_device_type(std::string_view name);
// The names that parse_device_type() accepts in this process, such as "cpu, cuda or pretend".
std::string device_type_names();

// Number of devices of the type that this process sees; 0 also when this libtorch has no such accelerator.
int visible_devices(c10::DeviceType type);
// Binds `device`, for example one that the user named: device_of_rank() then returns `device` for this device type on
// every rank of this process. A `device` without an index removes the binding for this type.
void bind_device(c10::Device device);
// Returns the CPU, or a rank's accelerator: the bound device, else the only visible device, else the device whose
// number is the local rank.
c10::Device device_of_rank(c10::DeviceType type, int local_rank);

// Returns the index of a rank's device among the `visible` ones. A launcher shows either all devices of a host to each
// rank (torchrun, Tessera's launcher) or one device per rank (Slurm's --gpus-per-task=1).
int gpu_of(int local_rank, int visible);
// Returns why there are too few GPUs; "" when there are enough. `own_list`: CUDA_VISIBLE_DEVICES is set, so a single
// visible GPU may belong to this rank alone. If two ranks have the same GPU, NCCL refuses it and names the GPU.
std::string why_too_few_gpus(int visible, int ranks_on_host, bool own_list);

}  // namespace tessera::comm
