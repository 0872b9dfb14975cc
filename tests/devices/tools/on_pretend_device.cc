// This file is linked to tests that were written for any device (tests/support/ranks_device.h). The tests then run on
// the pretend device, and fail if the device found a fault that it could not throw.
#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/support/pretend_device/pretend_device.h"

namespace tessera::pretend {
namespace {

class FaultsFail : public ::testing::EmptyTestEventListener {
  void OnTestStart(const ::testing::TestInfo& /*test*/) override { take_faults(); }
  void OnTestEnd(const ::testing::TestInfo& /*test*/) override {
    for (const auto& fault : take_faults()) ADD_FAILURE() << fault;
  }
};

// The device is installed before any backward of the program, because libtorch's engine counts the devices at its first
// backward.
[[maybe_unused]] const bool kInstalled = [] {
  setenv("TESSERA_TEST_DEVICE", "pretend", /*overwrite=*/1);
  ::testing::UnitTest::GetInstance()->listeners().Append(new FaultsFail);
  return install();
}();

}  // namespace
}  // namespace tessera::pretend
