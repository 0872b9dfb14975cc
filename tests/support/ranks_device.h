// The device that ranks of tests compute on: the CPU, or the accelerator that TESSERA_TEST_DEVICE names ("pretend",
// "cuda").
//
//   TESSERA_RANKS_TEST(Norm, IsThatOfAllRanks, (2)) {
//     const auto mesh = init_device_mesh(world, test_device_type(), {world->size()});
//     const auto x = here(at::ones({4}));                    // on mesh->device()
//     EXPECT_EQ(x.norm().item<double>(), 2);
//   }
//
// run_ranks() gives each rank one of its own. Outside of ranks it is the CPU, so what a test compares with is the
// CPU's.
#pragma once

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <string>

namespace tessera::testing {

// That of the calling rank.
c10::Device test_device();
std::string test_device_type();
at::Tensor here(const at::Tensor& tensor);

// That of the ranks of this program, wherever it is asked.
std::string device_type_of_ranks();
inline bool on_accelerator() { return device_type_of_ranks() != "cpu"; }

// For run_ranks(): whether there is a device for each of so many ranks, and that the calling thread is one of them.
bool devices_suffice(int ranks);
void use_device_of_rank(int rank);

}  // namespace tessera::testing

// Ends a test that says something about the CPU alone; `reason`: why no accelerator has that.
#define TESSERA_CPU_ONLY(reason) \
  if (::tessera::testing::on_accelerator()) GTEST_SKIP() << reason
