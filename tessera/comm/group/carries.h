// Whether a group's back-ends take a device's tensors.
//
//   const auto device = carries(group, mesh->device_type()) ? mesh->device() : c10::Device(c10::kCPU);
//
// No communication. Thread-safe.
#pragma once

#include <c10/core/DeviceType.h>

#include "tessera/comm/group/group.h"

namespace tessera::comm {

// Collectives of one rank are copies, wherever the tensors lie.
inline bool carries(const Group& group, c10::DeviceType type) {
  return group.size() == 1 || type == c10::DeviceType::CPU || group.context().accelerator_type == type;
}

}  // namespace tessera::comm
