// The device on which ranks of tests compute: the CPU, or the accelerator that TESSERA_TEST_DEVICE names ("pretend",
// "cuda").
//
//   TESSERA_RANKS_TEST(Norm, IsReducedOverAllRanks, (2)) {
//     const auto mesh = init_device_mesh(world, test_device_type(), {world->size()});
//     const auto x = here(at::ones({4}));                    // on mesh->device()
//     EXPECT_EQ(x.norm().item<double>(), 2);
//   }
//
// run_ranks() gives each rank its own device. Outside of ranks the device is the CPU, so expected values are computed
// on the CPU.
#pragma once

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <string>

namespace tessera::testing {

// The device of the calling rank.
c10::Device test_device();
std::string test_device_type();
at::Tensor here(const at::Tensor& tensor);

// The device type of this program's ranks; may be called anywhere.
std::string device_type_of_ranks();
inline bool on_accelerator() { return device_type_of_ranks() != "cpu"; }

// For run_ranks(): devices_suffice() says whether each of `ranks` ranks has a device; use_device_of_rank() makes the
// calling thread one of the ranks.
bool devices_suffice(int ranks);
void use_device_of_rank(int rank);

}  // namespace tessera::testing

// Ends a test that is about the CPU only. `reason` says why the test does not apply to accelerators.
#define TESSERA_CPU_ONLY(reason) \
  if (::tessera::testing::on_accelerator()) GTEST_SKIP() << reason
