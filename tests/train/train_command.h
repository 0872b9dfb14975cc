// `tessera train` on the device that tests compute on (tests/support/ranks_device.h).
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "tests/support/process.h"
#include "tests/support/ranks_device.h"

namespace tessera::train {

inline std::vector<std::string> train_command(const std::filesystem::path& recipe, const std::filesystem::path& dir,
                                              int ranks, const std::vector<std::string>& more = {}) {
  const std::string device = testing::device_type_of_ranks();
  const std::string program = device == "pretend" ? testing::pretend_program() : testing::program();
  std::vector<std::string> all = {
      program, "train", recipe.string(), "--nproc", std::to_string(ranks), "checkpoint.dir=" + dir.string()};
  if (testing::on_accelerator()) all.push_back("train.device=" + device);
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

}  // namespace tessera::train
