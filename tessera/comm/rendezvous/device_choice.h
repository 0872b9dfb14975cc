// Chooses the device that the ranks of a run compute on, from a setting.
//
//   const c10::Device device = choose_device(*world, {.setting = "auto"});     // "cuda:1" on local rank 1
//   auto mesh = init_device_mesh(world, c10::DeviceTypeName(device.type(), true), {world->size()});
//
// A setting is "auto", "cpu", "cuda", "cuda:N", or the name under which a library registered its accelerator with
// libtorch (PrivateUse1), with or without ":N". "auto" means the accelerator where every rank has a device of its own,
// otherwise the CPU. Without N, a rank uses the only visible device, or the device whose number is its local rank. N is
// allowed only with one rank per host. Not thread-safe.
#pragma once

#include <c10/core/Device.h>

#include <string>

#include "tessera/comm/rendezvous/world.h"

namespace tessera::comm {

struct DeviceRequest {
  std::string setting = "auto";
  std::string backend = "auto";  // comm.backend: gloo and shm move CPU tensors only, nccl CUDA tensors only
  std::string key = "device";    // key of the setting, for messages
};

// Returns this rank's device. All ranks choose the same type of device or throw the same error. The device becomes the
// current device of the calling thread, before anything is allocated on it. COLLECTIVE over the world. Error kConfig:
// the setting is unknown, or some rank lacks the device.
c10::Device choose_device(World& world, const DeviceRequest& request);

// Describes the device that a run with `ranks_on_host` ranks on this host would use: "cuda, 2 visible", or "cpu (auto:
// this libtorch has no accelerator)". No communication. Error kConfig: request.setting names no known device.
std::string describe_device(const DeviceRequest& request, int ranks_on_host);

}  // namespace tessera::comm
