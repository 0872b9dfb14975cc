// Runs many saves and expects that the store and the memory do not grow.
#pragma once

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tests/support/ranks_device.h"
#include "tests/support/sanitized.h"
#include "tests/support/temp_folder.h"

namespace tessera {

inline int64_t resident_kib() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmRSS:")) return std::stoll(line.substr(6));
  }
  return 0;
}

// Store and memory are measured after a fifth of the saves. The remaining saves may add `allowed_kib` to this process.
inline void expect_no_growth(const std::shared_ptr<comm::World>& world, int saves, int64_t allowed_kib) {
  static const testing::TempFolder folder;  // processes have one folder each; only the first rank's is used
  const auto path = std::filesystem::path(comm::broadcast_bytes(*world->group(), folder.path().string()));
  CheckpointWriter writer({.folder = path, .world = world, .keep_last = 1});
  const auto mesh = init_device_mesh(world, testing::test_device_type(), {world->size()});
  NamedTensors tensors;  // in the past the reports of many names filled the store
  for (int i = 0; i < 50; ++i) {
    tensors.emplace_back(fmt::format("layer.{}.weight", i), distribute_tensor(at::ones({8, 4}), mesh, {Shard(0)}));
  }
  int64_t keys = 0, resident = 0;
  for (int step = 1; step <= saves; ++step) {
    writer.save(step, tensors, {}, step);
    if (step != saves / 5) continue;
    writer.finish();
    comm::barrier(*world->group());
    keys = world->store().getNumKeys();
    resident = resident_kib();
    comm::barrier(*world->group());
  }
  writer.finish();
  comm::barrier(*world->group());
  EXPECT_EQ(world->store().getNumKeys(), keys);
  if (!testing::kSanitized) {  // a sanitizer keeps freed memory
    EXPECT_LT(resident_kib() - resident, allowed_kib);
  }
  EXPECT_EQ(Checkpoint::latest(path)->step(), saves);
  comm::barrier(*world->group());  // the folder is removed with the first rank's process
}

}  // namespace tessera
