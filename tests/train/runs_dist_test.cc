// Tests with the real program: which run may use a run folder, from which checkpoint a run resumes, and the values that
// must be equal on all ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "tessera/kernels/simd/vector_level.h"
#include "tests/train/tiny_run.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;

std::set<std::string> names_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}

#define ASSERT_RUNS(run) ASSERT_EQ((run).exit_code, 0) << (run).err

TEST(Runs, FreshStartArchivesTheEarlierHistory) {
  const TinyRun runs;
  const auto first = runs.train("a", 2, {"train.steps=12"});
  ASSERT_RUNS(first);
  const auto weights = runs.weights("a");
  const auto again = runs.train("a", 2, {"checkpoint.resume=never", "train.steps=4", "train.seed=7"});
  ASSERT_RUNS(again);
  EXPECT_EQ(runs.latest("a"), "step-00000004\n");
  EXPECT_EQ(names_in(runs / "a/checkpoints"), (std::set<std::string>{"LATEST", "step-00000002", "step-00000004"}));
  EXPECT_EQ(runs.metrics("a").size(), 4u);
  EXPECT_EQ(read_file(runs / "a/previous/001/checkpoints/LATEST"), "step-00000012\n");
  EXPECT_TRUE(read_file(runs / "a/previous/001/model/model.safetensors") == weights);
  EXPECT_THAT(read_file(runs / "a/previous/001/metrics.jsonl"), HasSubstr("\"step\":12"));
  EXPECT_EQ(names_in(runs / "a"), (std::set<std::string>{".tessera", "checkpoints", "events.jsonl", "metrics.jsonl",
                                                         "model", "previous", "recipe.yaml"}));
  // The new run resumes from its own checkpoint.
  const auto resumed = runs.train("a", 2, {"train.steps=6", "train.seed=7"});
  ASSERT_RUNS(resumed);
  EXPECT_EQ(runs.metrics("a").size(), 6u);
}

TEST(Runs, HistoryOfAnotherModelIsRefused) {
  const TinyRun runs;
  ASSERT_RUNS(runs.train("a", 1, {"train.steps=2"}));
  auto config = read_file(runs / "base/config.json");
  config.replace(config.find("\"rms_norm_eps\": 1e-05"), 21, "\"rms_norm_eps\": 1e-06");  // same shapes, another model
  runs.write("base/config.json", config);
  const auto other = runs.train("a", 2, {});
  EXPECT_EQ(other.exit_code, 2) << other.err;
  EXPECT_THAT(other.err, HasSubstr("written with another model"));
  EXPECT_EQ(runs.latest("a"), "step-00000002\n");
  const auto seed = runs.train("a", 1, {"train.seed=7"});
  EXPECT_EQ(seed.exit_code, 2) << seed.err;
  EXPECT_EQ(runs.metrics("a").size(), 2u);
}

TEST(Runs, UsersFilesInTheFolderAreNotChanged) {
  const TinyRun runs;
  // A folder with the user's own model and recipe, as with 'checkpoint: {dir: .}'.
  fs::create_directory(runs / "mine");
  fs::copy(runs / "base", runs / "mine/model");
  fs::copy(runs / "recipe.yaml", runs / "mine/recipe.yaml");
  const auto before = read_file(runs / "mine/recipe.yaml");
  for (const int ranks : {1, 2}) {
    const auto run = runs.train("mine", ranks, {"train.steps=2"});
    EXPECT_EQ(run.exit_code, 2) << run.err;
    EXPECT_THAT(run.err, HasSubstr("is in the way, and no run wrote it"));
  }
  EXPECT_EQ(names_in(runs / "mine"), (std::set<std::string>{"model", "recipe.yaml"}));
  EXPECT_EQ(read_file(runs / "mine/recipe.yaml"), before);
  EXPECT_EQ(names_in(runs / "mine/model"), names_in(runs / "base"));
  // A run must not export over the model from which it starts.
  ASSERT_RUNS(runs.train("a", 1, {"train.steps=2"}));
  const auto onto = runs.train("a", 1, {"checkpoint.resume=never", "model.path=" + (runs / "a/model").string()});
  EXPECT_EQ(onto.exit_code, 2) << onto.err;
  EXPECT_THAT(onto.err, HasSubstr("is where this run would export its own model to"));
  // A run must not export over an earlier export that the user has changed.
  runs.write("a/model/notes.txt", "x");
  const auto kept = runs.train("a", 2, {"train.steps=4"});
  EXPECT_EQ(kept.exit_code, 2) << kept.err;
  EXPECT_THAT(kept.err, HasSubstr("is not as a run exported it"));
  ASSERT_RUNS(runs.train("a", 2, {"train.steps=4", "checkpoint.export=never"}));
  EXPECT_EQ(read_file(runs / "a/model/notes.txt"), "x");
}

TEST(Runs, DamagedCheckpointIsRefused) {
  const TinyRun runs;
  ASSERT_RUNS(runs.train("a", 2, {}));
  const auto file = runs / "a/checkpoints/step-00000006/__1_0.distcp";
  auto bytes = read_file(file);
  bytes[bytes.size() - 5] ^= 0x10;  // one byte of a value; all shapes stay the same
  publish_file(file, bytes);
  for (const int ranks : {1, 2}) {
    const auto run = runs.train("a", ranks, {"train.steps=8"});
    EXPECT_EQ(run.exit_code, 3) << run.err;
    EXPECT_THAT(run.err, HasSubstr("step-00000006/__1_0.distcp: hash is "));
  }
  // The older checkpoint that the message names.
  const auto older =
      runs.train("a", 2, {"train.steps=8", "checkpoint.resume=" + (runs / "a/checkpoints/step-00000004").string()});
  ASSERT_RUNS(older);
  ASSERT_EQ(runs.metrics("a").size(), 8u);
  ASSERT_RUNS(runs.train("b", 2, {"train.steps=8"}));
  EXPECT_TRUE(runs.weights("a") == runs.weights("b"));
  const auto none = runs.train("a", 1, {"checkpoint.resume=nver"});
  EXPECT_EQ(none.exit_code, 2) << none.err;
}

TEST(Runs, ResumeOnAnotherNumberOfRanks) {
  const TinyRun runs;
  ASSERT_RUNS(runs.train("straight", 2, {"train.steps=9"}));
  for (const auto& [from, to] : {std::pair{2, 3}, {3, 1}, {1, 2}}) {
    const auto dir = fmt::format("{}to{}", from, to);
    ASSERT_RUNS(runs.train(dir, from, {"train.steps=4"}));
    ASSERT_RUNS(runs.train(dir, to, {"train.steps=9"}));
    const auto ours = runs.metrics(dir), theirs = runs.metrics("straight");
    ASSERT_EQ(ours.size(), 9u) << dir;
    for (size_t i = 0; i < 9; ++i) {
      const double loss = theirs[i]["loss"], norm = theirs[i]["grad_norm"];
      EXPECT_EQ(ours[i]["step"], i + 1);
      EXPECT_NEAR(ours[i]["loss"].get<double>(), loss, 1e-5 * loss) << dir << ", step " << i + 1;
      EXPECT_NEAR(ours[i]["grad_norm"].get<double>(), norm, 1e-3 * norm) << dir << ", step " << i + 1;
    }
  }
}

// A run that resumes with other kernels is equal only up to rounding, and its output must contain a warning.
TEST(Runs, ResumeWithOtherKernelsIsReported) {
  TinyRun runs;
  const auto plain = testing::run_process(runs.command("a", 1, {"train.steps=2"}),
                                          {.environment = {{"TESSERA_ROW_KERNELS", "plain"}}});
  ASSERT_EQ(plain.exit_code, 0) << plain.err;
  EXPECT_THAT(plain.err, Not(HasSubstr("up to rounding")));
  const auto same = testing::run_process(runs.command("a", 1, {"train.steps=4"}),
                                         {.environment = {{"TESSERA_ROW_KERNELS", "plain"}}});
  EXPECT_THAT(same.err, Not(HasSubstr("up to rounding")));
  const auto other = runs.train("a", 1, {"train.steps=6"});
  ASSERT_EQ(other.exit_code, 0) << other.err;
  if (kernels::vector_level() == kernels::VectorLevel::kPlain) GTEST_SKIP() << "this processor has no others";
  EXPECT_THAT(other.err, HasSubstr("loops plain, here with fp32 products"));
}

// Each rank has its own recipe or data, as on hosts whose copies differ.
TEST(Runs, DifferentRecipesAndDataOfRanksAreReported) {
  const TinyRun runs;
  fs::create_directories(runs / "host0");
  fs::create_directories(runs / "host1");
  fs::copy(runs / "train.jsonl", runs / "host0/data.jsonl");
  auto lines = read_file(runs / "train.jsonl");
  lines.replace(lines.find("3 times"), 1, "4");
  runs.write("host1/data.jsonl", lines);
  const auto launched = [&](const std::string& more) {
    const auto script = fmt::format("exec {} train {} checkpoint.dir={} {}", testing::program(),
                                    (runs / "recipe.yaml").string(), (runs / "a").string(), more);
    return testing::run_process({testing::program(), "launch", "--nproc", "2", "--", "bash", "-c", script});
  };
  const auto data = launched("data.train=" + (runs / "host$RANK/data.jsonl").string());
  EXPECT_EQ(data.exit_code, 2) << data.err;
  EXPECT_THAT(data.err,
              ::testing::ContainsRegex("the ranks differ.*data.train: .* rows of hash [0-9a-f]+ on rank 0, .* rows of "
                                       "hash [0-9a-f]+ on rank 1"));
  const auto recipe = launched("train.seed=4$RANK optimizer.lr=1.0e-$((3+RANK))");
  EXPECT_EQ(recipe.exit_code, 2) << recipe.err;
  EXPECT_THAT(recipe.err, HasSubstr("train.seed: 40 on rank 0, 41 on rank 1"));
  EXPECT_THAT(recipe.err, HasSubstr("optimizer.lr: 0.001 on rank 0, 0.0001 on rank 1"));
  const auto resume = launched("checkpoint.resume=$([ $RANK = 0 ] && echo auto || echo never)");
  EXPECT_EQ(resume.exit_code, 2) << resume.err;
  EXPECT_THAT(resume.err, HasSubstr("checkpoint.resume: auto on rank 0, never on rank 1"));
  const auto missing = launched("data.train=" + (runs / "host$((RANK*2))/data.jsonl").string());
  EXPECT_EQ(missing.exit_code, 3) << missing.err;
  EXPECT_THAT(missing.err, HasSubstr("host2/data.jsonl"));
  EXPECT_FALSE(fs::exists(runs / "a/.tessera"));
}

TEST(Runs, HsdpAndBfloat16HaveTheLossesOfFsdp) {
  const TinyRun runs;
  ASSERT_RUNS(runs.train("plain", 2, {}));
  ASSERT_RUNS(runs.train("hsdp", 4, {"parallel.dp_replicate=2", "parallel.dp_shard=2", "train.local_batch_size=1"}));
  ASSERT_RUNS(runs.train("half", 2, {"precision.param=bfloat16"}));
  const auto plain = runs.metrics("plain"), hsdp = runs.metrics("hsdp"), half = runs.metrics("half");
  ASSERT_EQ(plain.size(), 6u);
  ASSERT_EQ(hsdp.size(), 6u);
  ASSERT_EQ(half.size(), 6u);
  bool differs = false;
  for (size_t i = 0; i < plain.size(); ++i) {
    const double loss = plain[i]["loss"], norm = plain[i]["grad_norm"];
    EXPECT_NEAR(hsdp[i]["loss"].get<double>(), loss, 1e-5 * loss) << "step " << i + 1;
    EXPECT_NEAR(hsdp[i]["grad_norm"].get<double>(), norm, 1e-3 * norm) << "step " << i + 1;
    EXPECT_NEAR(half[i]["loss"].get<double>(), loss, 0.02 * loss) << "step " << i + 1;
    differs = differs || half[i]["loss"] != plain[i]["loss"];
  }
  EXPECT_TRUE(differs) << "nothing was computed in bfloat16";
  EXPECT_LT(plain.back()["loss"], plain.front()["loss"]);
  // HSDP's checkpoint resumes on another number of ranks.
  ASSERT_RUNS(runs.train("hsdp", 1, {"train.steps=8"}));
  ASSERT_RUNS(runs.train("plain", 2, {"train.steps=8"}));
  EXPECT_NEAR(runs.metrics("hsdp")[7]["loss"].get<double>(), runs.metrics("plain")[7]["loss"].get<double>(), 1e-4);
}

TEST(Runs, KeepBestUsesTheValidationLossOfEachCheckpointsStep) {
  const TinyRun runs;
  // The learning rate is so large that the loss rises. Validation is due at steps 3 and 6 only.
  ASSERT_RUNS(runs.train("a", 2,
                         {"data.validation=" + (runs / "held-out.jsonl").string(), "train.validate_every=3",
                          "optimizer.lr=0.3", "train.steps=8", "checkpoint.keep_last=1", "checkpoint.keep_best=1"}));
  std::map<int64_t, double> losses;
  for (const auto& line : runs.metrics("a", "validation_loss")) losses[line["step"]] = line["validation_loss"];
  ASSERT_TRUE(losses.contains(0));
  int64_t best = 0;
  for (const int64_t saved : {2, 4, 6, 8}) {
    ASSERT_TRUE(losses.contains(saved)) << saved;
    if (best == 0 || losses[saved] < losses[best]) best = saved;
  }
  EXPECT_TRUE(losses.contains(3));
  EXPECT_FALSE(losses.contains(5));
  std::set<std::string> expected = {"LATEST", "step-00000008", fmt::format("step-{:08}", best)};
  EXPECT_EQ(names_in(runs / "a/checkpoints"), expected);
  for (const auto& name : expected) {
    if (name == "LATEST") continue;
    const auto manifest = nlohmann::json::parse(read_file(runs / "a/checkpoints" / name / "manifest.json"));
    EXPECT_EQ(manifest["validation_loss"], losses[manifest["step"]]) << name;
  }
  // A run on one rank and a run on three ranks have the same validation losses.
  ASSERT_RUNS(runs.train(
      "b", 3, {"data.validation=" + (runs / "held-out.jsonl").string(), "train.validate_every=1", "train.steps=2"}));
  ASSERT_RUNS(runs.train(
      "c", 1, {"data.validation=" + (runs / "held-out.jsonl").string(), "train.validate_every=1", "train.steps=2"}));
  const auto three = runs.metrics("b", "validation_loss"), one = runs.metrics("c", "validation_loss");
  ASSERT_EQ(three.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_NEAR(three[i]["validation_loss"].get<double>(), one[i]["validation_loss"].get<double>(), 1e-5);
  }
}

TEST(Runs, ZeroDisablesCheckpointsAndValidation) {
  const TinyRun runs;
  ASSERT_RUNS(runs.train("a", 1, {"data.validation=" + (runs / "held-out.jsonl").string(), "checkpoint.every=0"}));
  EXPECT_TRUE(runs.metrics("a", "validation_loss").empty());
  EXPECT_FALSE(fs::exists(runs / "a/checkpoints/LATEST"));
  // A finished run without checkpoints is not overwritten.
  const auto weights = runs.weights("a");
  ASSERT_RUNS(runs.train("a", 1, {"checkpoint.every=0", "train.steps=2"}));
  EXPECT_TRUE(read_file(runs / "a/previous/001/model/model.safetensors") == weights);
}

TEST(Runs, TildeIsTheHomeFolder) {
  const TinyRun runs;
  fs::create_directory(runs / "home");
  const auto run = testing::run_process(
      {"bash", "-c",
       fmt::format("cd {0} && HOME={0}/home exec {1} train recipe.yaml 'checkpoint.dir=~/x' train.steps=2",
                   (runs / "").string(), testing::program())});
  ASSERT_RUNS(run);
  EXPECT_TRUE(fs::exists(runs / "home/x/model/config.json"));
  EXPECT_FALSE(fs::exists(runs / "~"));
}

}  // namespace
}  // namespace tessera::train
