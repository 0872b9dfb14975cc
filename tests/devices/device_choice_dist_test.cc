// Tests how a setting becomes the device of each rank.
#include "tessera/base/error.h"
#include "tessera/comm/backends/device_backends.h"
#include "tessera/comm/rendezvous/device_choice.h"
#include "tessera/mesh/device_mesh.h"
#include "tests/devices/pretend.h"
#include "tests/support/ranks.h"

namespace tessera::comm {
namespace {

using ::testing::HasSubstr;
using testing::pretend_device;
using WorldPtr = std::shared_ptr<World>;

std::string refusal(World& world, const std::string& setting) {
  try {
    choose_device(world, {.setting = setting, .key = "train.device"});
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kConfig);
    return error.what();
  }
  return "";
}

TEST(DeviceChoice, AutoSelectsTheAcceleratorOfTheLocalRank) {
  testing::run_ranks({.size = 3}, [](const WorldPtr& world) {
    EXPECT_EQ(choose_device(*world, {}), pretend_device(world->rank()));
    EXPECT_EQ(at::empty({1}, at::TensorOptions().device(c10::kPrivateUse1)).device(), pretend_device(world->rank()));
    EXPECT_EQ(choose_device(*world, {.setting = "cpu"}), c10::Device(c10::kCPU));
    EXPECT_EQ(choose_device(*world, {.setting = "pretend"}), pretend_device(world->rank()));
  });
}

TEST(DeviceChoice, SelectsTheCpuWhenARankHasNoDevice) {
  testing::run_ranks({.size = pretend::kDevices + 1}, [](const WorldPtr& world) {
    EXPECT_EQ(choose_device(*world, {}), c10::Device(c10::kCPU));
    EXPECT_THAT(refusal(*world, "pretend"), HasSubstr("rank 0: 9 ranks on this host, but 8 devices"));
  });
}

// As under Slurm's --gpus-per-task=1, each rank sees one device, its own. Here the ranks are threads and share the
// device.
TEST(DeviceChoice, SelectsTheOnlyVisibleDevice) {
  ::setenv(pretend::kVisibleDevices, "1", 1);
  testing::run_ranks({.size = 3}, [](const WorldPtr& world) {
    EXPECT_EQ(choose_device(*world, {}), pretend_device(0));
    EXPECT_EQ(at::empty({1}, at::TensorOptions().device(c10::kPrivateUse1)).device(), pretend_device(0));
    EXPECT_EQ(choose_device(*world, {.setting = "pretend"}), pretend_device(0));
  });
  ::setenv(pretend::kVisibleDevices, "2", 1);
  testing::run_ranks({.size = 3}, [](const WorldPtr& world) {
    EXPECT_EQ(choose_device(*world, {}), c10::Device(c10::kCPU));
    EXPECT_THAT(refusal(*world, "pretend"), HasSubstr("rank 0: 3 ranks on this host, but 2 devices"));
  });
  ::unsetenv(pretend::kVisibleDevices);
}

TEST(DeviceChoice, DeviceIndexRequiresOneRankPerHost) {
  const auto alone = World::single();
  EXPECT_EQ(choose_device(*alone, {.setting = "pretend:3"}), pretend_device(3));
  EXPECT_EQ(init_device_mesh(alone, "pretend", {1})->device(), pretend_device(3));
  EXPECT_EQ(choose_device(*alone, {.setting = "pretend"}), pretend_device(0));
  EXPECT_THAT(refusal(*alone, "pretend:8"), HasSubstr("number 8 of 8 visible devices"));
  testing::run_ranks({.size = 2}, [](const WorldPtr& world) {
    EXPECT_THAT(refusal(*world, "pretend:1"), HasSubstr("one number for 2 ranks on this host"));
  });
}

TEST(DeviceChoice, RefusesInvalidDevices) {
  const auto alone = World::single();
  for (const char* setting : {"", "gpu", "cpu:0", "pretend:", "pretend:x", "pretend:-1", "cuda:99999999999"}) {
    EXPECT_THAT(refusal(*alone, setting), HasSubstr("[comm.device] train.device: found")) << setting;
  }
  EXPECT_THAT(refusal(*alone, "cuda"), HasSubstr("no device of 'cuda' is visible"));
}

TEST(DeviceChoice, DescribesTheDeviceOfARun) {
  EXPECT_EQ(describe_device({}, 2), "pretend, 8 visible");
  EXPECT_EQ(describe_device({.setting = "cpu"}, 2), "cpu");
  EXPECT_THAT(describe_device({}, 9), HasSubstr("cpu (auto: 9 ranks"));
  EXPECT_THAT(describe_device({.setting = "cuda:1"}, 1), HasSubstr("cuda:1, not on this machine"));
}

TEST(DeviceChoice, GroupOfADeviceWithoutABackendIsAnError) {
  try {
    make_device_backend({.store = nullptr, .group = "dp", .device = c10::Device(c10::kXPU, 0), .host = nullptr});
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("group 'dp': no back-end carries tensors of 'xpu'"));
  }
}

}  // namespace
}  // namespace tessera::comm
