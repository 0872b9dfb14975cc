// Which back-end carries the tensors of an accelerator, and which device of it a rank has.
//
//   register_device_backend(c10::kPrivateUse1, make_own_backend);   // before any group of that device is made
//   c10::Device device = device_of_rank(c10::kPrivateUse1, world->info().local_rank);
//
// CUDA's is NCCL; for the device type that a vendor registered with libtorch (PrivateUse1) the vendor's code registers
// one. The host's tensors of the same group go another way (backend_choice.h). Thread-safe.
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
  c10::intrusive_ptr<c10d::Store> store;  // which no other group uses
  std::string group;
  int rank = 0;  // in the group
  int size = 1;
  c10::Device device = c10::Device(c10::DeviceType::CUDA, 0);  // of this rank
  int ranks_on_host = 1;                                       // of the world
  c10::intrusive_ptr<c10d::Backend> host;  // carries the same group's CPU tensors; for what goes through the host
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  bool high_priority_streams = false;  // DeviceBackendSettings
  // One whose ranks all make a group at this moment, this one being number `split_color` of these, or of the same
  // ranks. Null: none, or not to split.
  c10::intrusive_ptr<c10d::Backend> split_from = {};
  int split_color = 0;
};

// Of all groups that this process makes from then on, alike on all ranks.
struct DeviceBackendSettings {
  bool high_priority_streams = false;  // collectives come before what computes, where both are ready
  // A further group of the same ranks is split from the communicator of the first, the groups along the dims of a mesh
  // from that of the world, which saves them meetings of their own.
  bool split_groups = true;
};
void set_device_backend_settings(const DeviceBackendSettings& settings);
DeviceBackendSettings device_backend_settings();

// COLLECTIVE over the ranks that share `store`.
using DeviceBackendMaker = std::function<c10::intrusive_ptr<c10d::Backend>(const DeviceBackendRequest&)>;

// Takes the place of one that was there.
void register_device_backend(c10::DeviceType type, DeviceBackendMaker maker);
// As the settings say. COLLECTIVE over the ranks that share the request's store. Error kConfig: there is none for the
// device's type.
c10::intrusive_ptr<c10d::Backend> make_device_backend(DeviceBackendRequest request);

// "cpu", "cuda" or the name that the accelerator was registered with; nothing for another.
std::optional<c10::DeviceType> parse_device_type(std::string_view name);
// "cpu, cuda or pretend": what parse_device_type takes in this process.
std::string device_type_names();

// Devices of the type that this process sees; 0: none, or no such accelerator in this libtorch.
int visible_devices(c10::DeviceType type);
// From here on every rank of this process has this device of its type: one that a user named. Without an index: each
// its own again.
void bind_device(c10::Device device);
// The CPU, or a rank's accelerator: the bound one, else the only one that it sees, or the one of its number on the
// host.
c10::Device device_of_rank(c10::DeviceType type, int local_rank);

// Number of a rank's device among the `visible` ones. A launcher either shows all of a host to all its ranks (torchrun,
// ours) or to each its own (Slurm's --gpus-per-task=1).
int gpu_of(int local_rank, int visible);
// Empty: no GPU is missing. `own_list`: CUDA_VISIBLE_DEVICES is set, so that one visible GPU may be this rank's own;
// two ranks that were given the same one are refused by NCCL, which names it.
std::string why_too_few_gpus(int visible, int ranks_on_host, bool own_list);

}  // namespace tessera::comm
