// Which device the ranks of a run compute on, from a setting.
//
//   const c10::Device device = choose_device(*world, {.setting = "auto"});     // "cuda:1" on local rank 1
//   auto mesh = init_device_mesh(world, c10::DeviceTypeName(device.type(), true), {world->size()});
//
// A setting is "auto", "cpu", "cuda", "cuda:N", or the name under which a library registered its accelerator with
// libtorch (PrivateUse1), with ":N" or without. "auto" is the accelerator where every rank sees one for itself, else
// the CPU. Without N a rank takes the only device that it sees, or the one of its number on the host; N is for one rank
// a host. Not thread-safe.
#pragma once

#include <c10/core/Device.h>

#include <string>

#include "tessera/comm/rendezvous/world.h"

namespace tessera::comm {

struct DeviceRequest {
  std::string setting = "auto";
  std::string backend = "auto";  // comm.backend: gloo and shm move CPU tensors only, nccl those of CUDA only
  std::string key = "device";    // where the setting stands, for messages
};

// All ranks end with the same kind of device, and with the same error. The calling thread's current device becomes this
// rank's, before anything is allocated on it. COLLECTIVE over the world. Error kConfig: an unknown setting, or a device
// that some rank has not.
c10::Device choose_device(World& world, const DeviceRequest& request);

// The same for a run to come, of so many ranks on this host, as this host sees it: "cuda, 2 visible", or
// "cpu (auto: this libtorch has no accelerator)". No communication. Error kConfig: an unknown setting.
std::string describe_device(const DeviceRequest& request, int ranks_on_host);

}  // namespace tessera::comm
