// The fixture of tests on the pretend device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/pretend_device/pretend_device.h"

namespace tessera::testing {

// The device is installed before any backward of the program, because libtorch's engine counts the devices at its first
// backward.
inline const bool kPretendInstalled = pretend::install();

inline c10::Device pretend_device(int index = 0) {
  return c10::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(index));
}

// Fails the test if the device found a fault that it could not throw.
class OnPretendDevice : public ::testing::Test {
 protected:
  void SetUp() override { pretend::take_faults(); }
  void TearDown() override { EXPECT_THAT(pretend::take_faults(), ::testing::IsEmpty()); }
};

}  // namespace tessera::testing
