// Tests of the uses of a run's checkpoints besides resuming: going back to an earlier step, conversion to other
// formats, start of other runs, and reading by PyTorch.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/formats/torch/dcp_folder.h"
#include "tests/train/kills.h"
#include "tests/train/tiny_run.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

#define ASSERT_ENDS_WELL(...)                   \
  do {                                          \
    const auto ended = __VA_ARGS__;             \
    ASSERT_EQ(ended.exit_code, 0) << ended.err; \
  } while (false)

testing::ProcessResult ckpt(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {testing::program(), "ckpt"});
  return testing::run_process(arguments);
}

TEST(RunCheckpoints, ResumeFromAnEarlierStepArchivesLaterCheckpoints) {
  const TinyRun runs;
  ASSERT_ENDS_WELL(runs.train("a", 2, {"checkpoint.keep_last=9"}));
  const auto straight = runs.weights("a");
  const auto checkpoints = runs / "a/checkpoints";
  // The tied head is stored once, under the name of the embedding, and has a second name.
  const auto saved = DcpFolder::open(checkpoints / "step-00000006");
  const DcpLookup lookup(saved->metadata());
  for (const auto& chunk : saved->find_tensor("model.lm_head.weight")->chunks) {
    EXPECT_EQ(lookup.storage("model.lm_head.weight", chunk.offsets),
              lookup.storage("model.model.embed_tokens.weight", chunk.offsets));
  }
  runs.write("a/checkpoints/step-00000002/notes.txt", "x");  // a user's file: the checkpoint stays usable
  ASSERT_ENDS_WELL(
      runs.train("a", 2, {"checkpoint.keep_last=9", "checkpoint.resume=" + (checkpoints / "step-00000002/").string()}));
  EXPECT_TRUE(runs.weights("a") == straight);
  for (const char* name : {"step-00000004", "step-00000006"}) {
    EXPECT_TRUE(fs::is_directory(runs / "a/previous/001/checkpoints" / name)) << name;
    EXPECT_TRUE(fs::is_directory(checkpoints / name)) << name << " of the second time";
  }
  EXPECT_EQ(runs.latest("a"), "step-00000006\n");
  // A resume from the newest step moves no checkpoint.
  ASSERT_ENDS_WELL(
      runs.train("a", 2, {"train.steps=7", "checkpoint.resume=" + (checkpoints / "step-00000006").string()}));
  EXPECT_FALSE(fs::exists(runs / "a/previous/002"));
}

TEST(RunCheckpoints, ReshardedCheckpointResumesInAnotherRun) {
  const TinyRun runs;
  ASSERT_ENDS_WELL(runs.train("straight", 2, {}));
  ASSERT_ENDS_WELL(runs.train("short", 2, {"train.steps=4"}));
  const auto cut = (runs / "cut").string();
  ASSERT_ENDS_WELL(ckpt({"reshard", (runs / "short/checkpoints/step-00000004").string(), cut, "--ranks", "5"}));
  const auto verified = ckpt({"verify", cut});
  EXPECT_THAT(verified.out, AllOf(HasSubstr("step 4"), HasSubstr("every file has the hash"))) << verified.err;
  const auto same = ckpt({"diff", (runs / "short/checkpoints/step-00000004").string(), cut});
  EXPECT_EQ(same.exit_code, 0) << same.out;
  EXPECT_THAT(same.out, HasSubstr(" tensors are equal, 0 differ"));
  ASSERT_ENDS_WELL(runs.train("other", 2, {"checkpoint.resume=" + cut}));
  // The folder of a run stands for its newest checkpoint.
  ASSERT_ENDS_WELL(runs.train("named", 2, {"checkpoint.resume=" + (runs / "short").string()}));
  EXPECT_TRUE(runs.weights("named") == runs.weights("other"));
  EXPECT_EQ(runs.metrics("named").size(), 2u);
  auto bytes = read_file(runs / "cut/__3_0.distcp");
  bytes[bytes.size() / 2] ^= 1;
  publish_file(runs / "cut/__3_0.distcp", bytes);
  for (const auto& arguments : {std::vector<std::string>{"reshard", cut, (runs / "new").string(), "--ranks", "2"},
                                {"convert", cut, (runs / "new").string(), "--to", "hf"}}) {
    const auto damaged = ckpt(arguments);
    EXPECT_EQ(damaged.exit_code, 3) << damaged.err;
    EXPECT_THAT(damaged.err, HasSubstr("__3_0.distcp: hash is "));
    EXPECT_FALSE(fs::exists(runs / "new"));
  }
  EXPECT_TRUE(runs.weights("other") == runs.weights("straight"));
  EXPECT_TRUE(fs::is_directory(runs / "other/checkpoints/step-00000006"));
}

TEST(RunCheckpoints, AnotherRunStartsFromEveryFormat) {
  const TinyRun runs;
  ASSERT_ENDS_WELL(runs.train("first", 2, {"train.steps=2"}));
  const auto checkpoint = (runs / "first/checkpoints/step-00000002").string();
  const auto torch_file = (runs / "whole.pt").string(), folder = (runs / "hf").string(), dcp = (runs / "dcp").string();
  ASSERT_ENDS_WELL(ckpt({"convert", checkpoint, torch_file, "--to", "torch"}));
  ASSERT_ENDS_WELL(ckpt({"convert", checkpoint, folder, "--to", "hf", "--config", (runs / "base").string()}));
  ASSERT_ENDS_WELL(ckpt({"convert", folder, dcp, "--to", "dcp"}));
  const auto compared = ckpt({"diff", checkpoint, (runs / "first/model").string()});
  EXPECT_EQ(compared.exit_code, 1);  // the checkpoint also has the tied head under its own name
  EXPECT_THAT(compared.out,
              AllOf(HasSubstr("lm_head.weight: only in the first"), HasSubstr(", 1 differ (weights alone)")));
  for (const auto& other : {dcp, torch_file}) {
    EXPECT_THAT(ckpt({"diff", folder, other}).out, HasSubstr(" tensors are equal, 0 differ (weights alone)")) << other;
  }
  ASSERT_ENDS_WELL(runs.train(
      "exported", 1, {"train.steps=2", "model.init=pretrained", "model.path=" + (runs / "first/model").string()}));
  int number = 0;
  for (const auto& weights : {checkpoint, torch_file, folder, dcp}) {
    const auto dir = fmt::format("warm{}", number++);
    ASSERT_ENDS_WELL(runs.train(dir, 1, {"train.steps=2", "model.init=pretrained", "model.weights=" + weights}));
    EXPECT_TRUE(runs.weights(dir) == runs.weights("exported")) << weights;
  }
  // A folder with both config.json and a checkpoint is a model.
  ASSERT_ENDS_WELL(runs.train("whole", 1, {"train.steps=2", "model.init=pretrained", "model.path=" + dcp}));
  EXPECT_TRUE(runs.weights("whole") == runs.weights("exported"));
  // The checkpoint of a run names its model. The folder of a run stands for its newest checkpoint.
  for (const fs::path& source : {fs::path(checkpoint), runs / "first", runs / "first/checkpoints"}) {
    const auto dir = fmt::format("named{}", number++);
    ASSERT_ENDS_WELL(runs.train(dir, 1, {"train.steps=2", "model.init=pretrained", "model.path=" + source.string()}));
    EXPECT_TRUE(runs.weights(dir) == runs.weights("exported")) << source;
  }
  const auto nameless = runs.train("nameless", 1, {"model.init=pretrained", "model.path=" + torch_file});
  EXPECT_EQ(nameless.exit_code, 2);
  EXPECT_THAT(nameless.err, AllOf(HasSubstr("does not name their model"), HasSubstr("model.weights=" + torch_file)));
  EXPECT_THAT(ckpt({"verify", (runs / "first").string()}).out, HasSubstr("step 2"));
  fs::rename(runs / "base", runs / "moved");
  const auto moved = runs.train("moved-base", 1, {"model.path=" + checkpoint});
  EXPECT_EQ(moved.exit_code, 2);
  EXPECT_THAT(moved.err, HasSubstr("where there is no model now"));
  fs::rename(runs / "moved", runs / "base");
  const auto no_run = runs.train("none", 1, {"checkpoint.resume=" + dcp});
  EXPECT_EQ(no_run.exit_code, 2) << no_run.err;
  EXPECT_THAT(no_run.err, HasSubstr("no run of this program wrote it"));
}

TEST(RunCheckpoints, ASecondSignalEndsARunThatCannotSave) {
  const TinyRun runs;
  Processes processes(runs.command("a", 2, {"train.steps=1000000", "checkpoint.every=1000000"}), runs / "",
                      runs / "log");
  const auto wait_for = [&](const std::function<bool()>& condition) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!condition() && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    ASSERT_TRUE(condition()) << read_file(runs / "log");
  };
  wait_for([&] { return runs.metrics("a").size() > 2; });
  pid_t launcher = -1, stopped = -1;
  for (const auto& [pid, role] : processes.alive()) {
    if (role == "launcher") launcher = pid;
    if (role == "rank") stopped = pid;
  }
  ::kill(stopped, SIGSTOP);  // the other rank waits for this rank in the middle of a step
  ::kill(launcher, SIGTERM);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_FALSE(processes.ended()) << "the first signal only asks";
  ::kill(launcher, SIGTERM);
  EXPECT_EQ(processes.wait(), 128 + SIGTERM) << read_file(runs / "log");
}

}  // namespace
}  // namespace tessera::train
