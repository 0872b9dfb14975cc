// Included by tests without ranks that take the device as a parameter (ranks_device.h). The thread that runs the tests
// is rank 0, and its device is the tests' device.
#pragma once

#include <gtest/gtest.h>

#include "tests/support/ranks_device.h"

namespace tessera::testing {

struct AloneOnDevice : ::testing::Environment {
  void SetUp() override { use_device_of_rank(0); }
};
inline ::testing::Environment* const kAloneOnDevice = ::testing::AddGlobalTestEnvironment(new AloneOnDevice);

}  // namespace tessera::testing
