// Linked to tests that were written for any device (tests/support/ranks_device.h): they run on the pretend device, and
// what it found where it could not throw fails them.
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

// Before any backward of the program: libtorch's engine counts the devices at its first.
[[maybe_unused]] const bool kInstalled = [] {
  setenv("TESSERA_TEST_DEVICE", "pretend", /*overwrite=*/1);
  ::testing::UnitTest::GetInstance()->listeners().Append(new FaultsFail);
  return install();
}();

}  // namespace
}  // namespace tessera::pretend
