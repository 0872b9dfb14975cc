// Tests of our event files with TensorBoard's own reader.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>

#include "tessera/train/output/tensorboard.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera::train {
namespace {

nlohmann::json read_events(const std::filesystem::path& folder) {
  const auto run = testing::run_python("tests/train/oracle/read_events.py", {folder.string()});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  return nlohmann::json::parse(run.out);
}

TEST(TensorBoard, TensorBoardsReaderFindsScalarsAndTexts) {
  testing::TempFolder folder;
  const std::string text = "# recipe\n" + std::string(100000, 'x') + "\xc3\xa4";
  {
    TensorBoardWriter events(folder.path());
    for (int64_t step = 1; step <= 300; ++step) events.add_scalar("train/loss", 3.0 / static_cast<double>(step), step);
    events.add_scalar("train/lr", 0, int64_t{1} << 40);
    events.add_text("recipe", text, 0);
  }
  const auto found = read_events(folder.path());
  const auto& losses = found["scalars"]["train/loss"];
  ASSERT_EQ(losses.size(), 300u);
  for (size_t i = 0; i < 300; ++i) {
    EXPECT_EQ(losses[i][0], i + 1);
    EXPECT_EQ(losses[i][1].get<float>(), static_cast<float>(3.0 / static_cast<double>(i + 1)));
  }
  EXPECT_EQ(found["scalars"]["train/lr"][0][0], int64_t{1} << 40);
  EXPECT_EQ(found["texts"]["recipe"][0][1], text);
  EXPECT_EQ(found["plugins"]["recipe"], "text");
  const double now = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  EXPECT_NEAR(found["wall_time"].get<double>(), now, 120);
}

TEST(TensorBoard, ResumedSessionReplacesRepeatedSteps) {
  testing::TempFolder folder;
  {
    TensorBoardWriter events(folder.path());
    events.start_session(0);
    for (int64_t step = 1; step <= 5; ++step) events.add_scalar("train/loss", 1, step);
  }
  {
    TensorBoardWriter events(folder.path());
    events.start_session(3);
    for (int64_t step = 4; step <= 6; ++step) events.add_scalar("train/loss", 2, step);
  }
  const auto found = read_events(folder.path());
  EXPECT_EQ(found["scalars"]["train/loss"], nlohmann::json::parse("[[1,1.0],[2,1.0],[3,1.0],[4,2.0],[5,2.0],[6,2.0]]"));
}

}  // namespace
}  // namespace tessera::train
