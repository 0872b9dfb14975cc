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
  std::filesystem::path program = testing::program();
  if (device == "pretend") program.replace_filename("tessera_pretend");  // which has it
  std::vector<std::string> all = {
      program.string(), "train", recipe.string(), "--nproc", std::to_string(ranks), "checkpoint.dir=" + dir.string()};
  if (testing::on_accelerator()) all.push_back("train.device=" + device);
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

}  // namespace tessera::train
