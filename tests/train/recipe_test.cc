// Tests of recipes: keys, aliases, defaults, overrides, printing and errors.
#include "tessera/train/recipe/recipe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/train/recipe/recipe_print.h"
#include "tessera/train/recipe/recipe_schema.h"
#include "tessera/train/recipe/recipe_value.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera::train {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr const char* kMinimal = "model: {path: m}\ndata: {train: a.txt}\n";

Recipe parse(const std::string& yaml, const std::vector<std::string>& overrides = {}) {
  return parse_recipe(yaml, "my.yaml", overrides);
}

// The message of the Error kConfig for `yaml`. The message must be one line.
std::string error_of(const std::string& yaml, const std::vector<std::string>& overrides = {}) {
  try {
    parse(yaml, overrides);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kConfig);
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
    return error.what();
  }
  return "no error";
}

std::string error_with(const std::string& more) { return error_of(kMinimal + more); }

TEST(RecipeSchema, EveryKeyAndAliasIsDeclaredOnceAndItsDefaultIsAcceptable) {
  std::set<std::string> seen;
  Recipe defaults;
  for (const auto& key : recipe_keys()) {
    EXPECT_TRUE(seen.insert(key.path()).second) << key.path();
    for (const char* alias : key.aliases) EXPECT_TRUE(seen.insert(alias).second) << alias;
    EXPECT_EQ(find_recipe_key(key.path()), &key);
    if (key.required && key.name != std::string("dir")) continue;
    Recipe copy;
    EXPECT_NO_THROW(assign_value(key, parse_yaml(format_value(key, defaults), "default"), "default", copy))
        << key.path();
  }
}

TEST(RecipeSchema, SectionsAndKeysHaveTheSameOrder) {
  std::vector<std::string> sections, of_keys;
  for (const auto& section : recipe_sections()) sections.push_back(section.name);
  for (const auto& key : recipe_keys()) {
    if (of_keys.empty() || of_keys.back() != key.section) of_keys.push_back(key.section);
  }
  EXPECT_EQ(sections, of_keys);
}

TEST(Recipe, FullExampleHasTheDefaults) {
  const Recipe recipe = parse(R"(
model:      {path: DIR, dtype: float32, init: pretrained, lora: null}        # init: pretrained | random (config.json only)
data:       {train: [PATH], validation: [PATH], format: auto, sequence_length: 512, packing: true, overlong: truncate}
parallel:   {dp_replicate: 1, dp_shard: -1, tp: 1, cp: 1, pp: 1, ep: 1, sequence_parallel: false, activation_checkpointing: none, cpu_offload: false, plan: auto}
optimizer:  {name: adamw, lr: 1.0e-4, betas: [0.9, 0.95], eps: 1.0e-8, weight_decay: 0.1, max_grad_norm: 1.0}
schedule:   {name: cosine, warmup_steps: 10, min_lr_ratio: 0.1}              # cosine | linear | constant
train:      {steps: 100, epochs: null, global_batch_size: 8, local_batch_size: 2, seed: 42, device: auto, deterministic: false, on_nonfinite: stop, validate_every: 20, sample_every: 0, profile: false}
precision:  {param: float32, reduce: float32, output: float32}
checkpoint: {dir: runs/NAME, every: 50, keep_last: 2, keep_best: 1, async: true, resume: auto, export: final}
log:        {every: 1, tensorboard: true, jsonl: true}
comm:       {backend: auto, timeout_seconds: 300, check: timeout}            # auto | shm | gloo | nccl
)");
  EXPECT_EQ(recipe.name, "my");
  EXPECT_EQ(recipe.model.path, "DIR");
  EXPECT_THAT(recipe.data.validation, ElementsAre("PATH"));
  EXPECT_EQ(recipe.checkpoint.dir, "runs/NAME");
  // All other settings of the contract have their defaults.
  Recipe defaults = parse("model: {path: DIR}\ndata: {train: PATH, validation: PATH}\ncheckpoint: {dir: runs/NAME}");
  EXPECT_EQ(to_yaml(recipe), to_yaml(defaults));
}

TEST(Recipe, CheckpointDirDefaultsToTheRecipesName) {
  const Recipe recipe = parse_recipe(kMinimal, "recipes/smollm2-dialogues.yaml");
  EXPECT_EQ(recipe.checkpoint.dir, "runs/smollm2-dialogues");
  EXPECT_THAT(recipe.data.train, ElementsAre("a.txt"));
  EXPECT_EQ(recipe.train.steps, 100);
}

TEST(Recipe, PrintedRecipeReadsBackTheSame) {
  const Recipe recipe = parse(kMinimal, {"optimizer.lr=3e-4", "optimizer.eps=1e-12", "optimizer.betas=[0.8,0.999]",
                                         "data.train=[a b.txt, 'c: \"d\".txt', null.txt]", "model.path=1e5",
                                         "train.epochs=3", "checkpoint.dir=/x/#y\\z", "model.dtype=bf16"});
  const std::string printed = to_yaml(recipe);
  const Recipe again = parse_recipe(printed, "my.yaml");
  EXPECT_EQ(to_yaml(again), printed);
  EXPECT_EQ(again.model.path, "1e5");
  EXPECT_EQ(again.checkpoint.dir, "/x/#y\\z");
  EXPECT_THAT(again.data.train, ElementsAre("a b.txt", "c: \"d\".txt", "null.txt"));
  EXPECT_EQ(again.optimizer.eps, 1e-12);
  EXPECT_EQ(again.train.epochs, 3);
  EXPECT_EQ(again.train.steps, std::nullopt);
  EXPECT_EQ(again.model.dtype, "bfloat16");
}

TEST(Recipe, OverridesReplaceTheFileAndTheLastWins) {
  const Recipe recipe = parse(std::string(kMinimal) + "train: {steps: 5}\nschedule: {warmup_steps: 1}\n",
                              {"train.steps=7", "train.steps=9", "data.train=b.txt"});
  EXPECT_EQ(recipe.train.steps, 9);
  EXPECT_THAT(recipe.data.train, ElementsAre("b.txt"));
}

TEST(Recipe, OverrideOfEpochsTakesThePlaceOfSteps) {
  const std::string with_steps = std::string(kMinimal) + "train: {steps: 50}\n";
  EXPECT_EQ(parse(with_steps, {"train.epochs=2"}).train.steps, std::nullopt);
  const std::string with_epochs = std::string(kMinimal) + "train: {epochs: 2}\n";
  EXPECT_EQ(parse(with_epochs).train.steps, std::nullopt);
  EXPECT_EQ(parse(with_epochs, {"train.steps=50"}).train.epochs, std::nullopt);
  EXPECT_THAT(error_with("train: {steps: 50, epochs: 2}"),
              HasSubstr("my.yaml:3: train.epochs: found 2 with train.steps 50, wanted one of the two"));
  EXPECT_THAT(error_with("train: {steps: null}"), HasSubstr("wanted one of them"));
}

TEST(Recipe, NamesOfTorchtitanAndNemoAreAccepted) {
  const Recipe recipe = parse(R"(
model: {pretrained_model_name_or_path: m, torch_dtype: torch.bfloat16}
training: {dataset_path: a.txt, seq_len: 128, max_norm: 0.5, steps: 30}
lr_scheduler: {warmup_steps: 3}
parallelism: {data_parallel_shard_degree: 2}
step_scheduler: {global_batch_size: 4}
policy: {optimizer: {kwargs: {lr: 0.002}}}
)");
  EXPECT_EQ(recipe.model.path, "m");
  EXPECT_EQ(recipe.model.dtype, "bfloat16");
  EXPECT_EQ(recipe.data.sequence_length, 128);
  EXPECT_EQ(recipe.optimizer.max_grad_norm, 0.5);
  EXPECT_EQ(recipe.optimizer.lr, 0.002);
  EXPECT_EQ(recipe.train.steps, 30);
  EXPECT_EQ(recipe.schedule.warmup_steps, 3);
  EXPECT_EQ(recipe.parallel.dp_shard, 2);
  EXPECT_EQ(recipe.train.global_batch_size, 4);
  const Recipe cased = parse(kMinimal, {"parallel.schedule=zbvzerobubble", "optimizer.name=AdamW"});
  EXPECT_EQ(cased.parallel.schedule, "ZBVZeroBubble");
  EXPECT_EQ(cased.optimizer.name, "adamw");
  EXPECT_THAT(error_with("train: {steps: 3}\ntraining: {steps: 4}"),
              HasSubstr("my.yaml:4: 'training.steps' is set twice, as 'train.steps' at my.yaml:3"));
}

TEST(Recipe, UnknownKeyNamesTheNearest) {
  EXPECT_THAT(error_with("train:\n  step: 5\n"),
              HasSubstr("my.yaml:4: unknown key 'train.step'. Did you mean 'train.steps'?"));
  EXPECT_THAT(error_with("trian: {steps: 5}"), HasSubstr("unknown key 'trian.steps'. Did you mean 'train.steps'?"));
  EXPECT_THAT(error_with("optmizer: {}"), HasSubstr("unknown key 'optmizer'. Did you mean 'optimizer'?"));
  EXPECT_THAT(error_with("\"tr\u202ea\\x1bin\": 1"), HasSubstr("unknown key 'tr\\u202ea\\x1bin'"));
  EXPECT_THAT(error_with("validation: {every: 5}"), HasSubstr("Did you mean 'train.validate_every'?"));
  EXPECT_THAT(error_with("sample: {every: 5}"), HasSubstr("Did you mean 'train.sample_every'?"));
  EXPECT_THAT(error_with("train: {warmup_steps: 5}"), HasSubstr("Did you mean 'schedule.warmup_steps'?"));
  EXPECT_THAT(error_of(kMinimal, {"optimizer.lrr=1"}),
              HasSubstr("override 'optimizer.lrr=1': unknown key 'optimizer.lrr'. Did you mean 'optimizer.lr'?"));
  EXPECT_THAT(error_with("log:\n  every: {steps: 4}"),
              HasSubstr("my.yaml:4: log.every: found a mapping, wanted integer >= 0."));
}

TEST(Recipe, WrongTypeOrRangeReportsFoundAndExpected) {
  const std::pair<const char*, const char*> cases[] = {
      {"optimizer: {lr: fast}", "my.yaml:3: optimizer.lr: found 'fast', wanted number >= 0"},
      {"optimizer: {lr: -1}", "found '-1', wanted number >= 0"},
      {"optimizer: {lr: .nan}", "optimizer.lr: found '.nan'"},
      {"optimizer: {lr: nan}", "optimizer.lr: found 'nan'"},
      {"optimizer: {lr: 1e999}", "optimizer.lr: found '1e999'"},
      {"optimizer: {eps: 0}", "optimizer.eps: found '0', wanted number > 0"},
      {"optimizer: {betas: [0.9]}", "optimizer.betas: found a list of 1, wanted list of 2 numbers in [0, 1)"},
      {"optimizer: {betas: [0.9, 1.0]}", "optimizer.betas: found a list of 2, wanted list of 2 numbers in [0, 1)"},
      {"optimizer: {betas: 0.9}", "optimizer.betas: found '0.9'"},
      {"optimizer: {name: adam}", "optimizer.name: found 'adam', wanted adamw, adamw8bit, muon or sgd"},
      {"train: {steps: 0}", "train.steps: found '0', wanted integer >= 1, or null"},
      {"train: {steps: 1.5}", "train.steps: found '1.5'"},
      {"train: {steps: 1e3}", "train.steps: found '1e3'"},
      {"train: {steps: \"5\"}", "train.steps: found '5'"},
      {"train: {steps: 99999999999999999999}", "train.steps: found '99999999999999999999'"},
      {"train: {seed: null}", "train.seed: found null, wanted integer >= 0"},
      {"train: {on_nonfinite: ignore}", "found 'ignore', wanted stop or skip"},
      {"data: {packing: yes}", "key 'data' twice"},
      {"log: {jsonl: yes}", "log.jsonl: found 'yes', wanted true or false"},
      {"parallel: {dp_shard: 0}", "parallel.dp_shard: found '0', wanted integer >= 1, or -1"},
      {"parallel: {dp_shard: -2}", "parallel.dp_shard: found '-2'"},
      {"checkpoint: {dir: \"\"}", "checkpoint.dir: found ''"},
      {"checkpoint: {dir: \"a\\nb\"}", "checkpoint.dir: found 'a\\nb'"},
      {"train: 5", "my.yaml:3: section 'train': found no keys"},
      {"train: [steps]", "section 'train': found no keys"},
      {"precision: {param: float16}", "precision.param: found 'float16', wanted float32 or bfloat16"},
  };
  for (const auto& [yaml, message] : cases) EXPECT_THAT(error_with(yaml), HasSubstr(message)) << yaml;
}

TEST(Recipe, LoraKeysAreParsedAndValidated) {
  const Recipe recipe = parse(kMinimal, {"model.lora.rank=4", "lora.target_modules=[q_proj]", "peft.alpha=32"});
  EXPECT_EQ(recipe.lora.rank, 4);
  EXPECT_EQ(recipe.lora.alpha, 32);
  EXPECT_THAT(recipe.lora.target_modules, ::testing::ElementsAre("q_proj"));
  EXPECT_TRUE(recipe.lora.is_enabled());
  EXPECT_FALSE(parse(kMinimal).lora.is_enabled());
  EXPECT_THAT(error_with("lora: {alpha: 3}"), HasSubstr("my.yaml:3: model.lora.alpha: found 3.0 without adapters"));
  const Recipe packed = parse(kMinimal, {"lora.rank=4", "lora.quantize=nf4", "lora.double_quant=true"});
  EXPECT_EQ(packed.lora.quantize, "nf4");
  EXPECT_TRUE(packed.lora.double_quant);
  EXPECT_THAT(error_of(kMinimal, {"lora.quantize=nf4"}), HasSubstr("model.lora.quantize: found nf4 without adapters"));
  EXPECT_THAT(error_of(kMinimal, {"lora.rank=4", "lora.double_quant=true"}), HasSubstr("wanted nf4"));
  EXPECT_THAT(error_of(kMinimal, {"lora.rank=4", "lora.quantize=int3"}),
              HasSubstr("model.lora.quantize: found 'int3'"));
  EXPECT_THAT(error_with("lora: {rnk: 3}"), HasSubstr("unknown key 'lora.rnk'"));
}

TEST(Recipe, InvalidGroupsAndSchedulesAreErrors) {
  EXPECT_THAT(error_of(kMinimal, {"optimizer.groups=[\"*.bias\"]"}),
              HasSubstr("wanted a pattern of names and settings"));
  EXPECT_THAT(error_of(kMinimal, {"optimizer.groups=[\"*.bias lr=fast\"]"}), HasSubstr("lr: found 'fast'"));
  EXPECT_THAT(error_of(kMinimal, {"optimizer.groups=[\"*.bias lr=1 lr=2\"]"}), HasSubstr("once at most"));
  EXPECT_THAT(error_of(kMinimal, {"optimizer.groups=[\"*.bias betas=0.9\"]"}), HasSubstr("wanted two numbers"));
  const std::vector<std::string> wsd = {"schedule.name=wsd", "train.steps=20", "schedule.decay_steps=15"};
  auto warmed = wsd;
  warmed.emplace_back("schedule.warmup_steps=10");
  EXPECT_THAT(error_of(kMinimal, warmed), HasSubstr("wsd of 20 steps: found 10 steps of warm-up and 15 of decay"));
  EXPECT_EQ(parse(kMinimal, wsd).schedule.warmup_steps, 5);  // the default is reduced to fit
  EXPECT_THAT(error_of(kMinimal, {"schedule.decay_steps=5"}), HasSubstr("with schedule.name cosine, wanted wsd"));
  EXPECT_EQ(parse(kMinimal, {"train.early_stopping.patience=2", "data.validation=[v]"}).train.early_stopping_patience,
            2);
  EXPECT_THAT(error_of(kMinimal, {"train.early_stopping.patience=2"}), HasSubstr("without validations"));
}

TEST(Recipe, MissingKeysAreNamed) {
  EXPECT_THAT(error_of(""), HasSubstr("my.yaml: model.path is missing"));
  EXPECT_THAT(error_of("model: {path: m}"), HasSubstr("my.yaml: data.train is missing"));
  EXPECT_THAT(error_of("model: {path: m}\ndata:\n  train: []"), HasSubstr("my.yaml:3: data.train is missing"));
}

TEST(Recipe, KeysThatContradictAreAnError) {
  EXPECT_THAT(error_with("schedule: {warmup_steps: 20}\ntrain: {steps: 10}"),
              HasSubstr("my.yaml:3: schedule.warmup_steps: found 20, wanted at most train.steps, 10"));
  EXPECT_EQ(parse(kMinimal, {"train.steps=3"}).schedule.warmup_steps, 3);  // the default is reduced to fit
  EXPECT_THAT(error_with("train: {global_batch_size: 5, local_batch_size: 2}"),
              HasSubstr("found 5, wanted a multiple of"));
  EXPECT_THAT(error_with("parallel: {dp_replicate: -1}"), HasSubstr("wanted at most one -1"));
}

TEST(Recipe, MalformedOverrideShowsTheForm) {
  EXPECT_THAT(error_of(kMinimal, {"train.steps"}), HasSubstr("wanted section.key=value"));
  EXPECT_THAT(error_of(kMinimal, {"=5"}), HasSubstr("wanted section.key=value"));
  EXPECT_THAT(error_of(kMinimal, {"train.steps="}), HasSubstr("wanted one of them"));
  EXPECT_THAT(error_of(kMinimal, {"data.train=[a"}), HasSubstr("override 'data.train=[a'"));
}

TEST(Recipe, MissingFileAndFolderAreConfigErrors) {
  testing::TempFolder folder;
  for (const auto& path : {folder / "none.yaml", folder.path()}) {
    try {
      read_recipe(path);
      FAIL() << path;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kConfig);
      EXPECT_THAT(error.what(), HasSubstr(path.string()));
    }
  }
}

TEST(RecipeLayout, MinusOneIsTheRemainingRanks) {
  const Recipe recipe = parse(kMinimal, {"parallel.dp_replicate=2", "train.global_batch_size=24"});
  const RunLayout layout = resolve_layout(recipe, 6);
  EXPECT_EQ(layout.dp_shard, 3);
  EXPECT_EQ(layout.data_parallel, 6);
  EXPECT_EQ(layout.micro_batches, 2);
}

TEST(RecipeLayout, WorldThatDoesNotFitIsAConfigError) {
  const auto error = [](const std::vector<std::string>& overrides, int64_t world) -> std::string {
    try {
      resolve_layout(parse(kMinimal, overrides), world);
    } catch (const Error& caught) {
      EXPECT_EQ(caught.exit_code(), 2);
      return caught.what();
    }
    return "no error";
  };
  EXPECT_THAT(error({"parallel.dp_replicate=2"}, 3), HasSubstr("does not fit a world of 3 ranks"));
  EXPECT_THAT(error({"parallel.dp_shard=4"}, 2), HasSubstr("dp_shard 4"));
  EXPECT_THAT(error({"parallel.dp_replicate=16777216", "parallel.dp_shard=16777216"}, 2),
              HasSubstr("does not fit a world of 2 ranks"));
  EXPECT_THAT(error({}, 3), HasSubstr("train.global_batch_size: found 8, wanted a multiple of 6"));
}

TEST(RecipeDocs, CommittedPageIsTheGeneratedOne) {
  EXPECT_EQ(read_file(testing::source_folder() / "docs" / "recipe.md"), recipe_docs())
      << "write it again: build/tessera train --recipe-docs > docs/recipe.md";
}

TEST(RecipeDocs, HelpNamesEveryKey) {
  const std::string help = recipe_help();
  for (const auto& key : recipe_keys()) EXPECT_THAT(help, HasSubstr("  " + key.path()));
}

TEST(Recipe, HomeIsExpandedInPathsAndOtherUsersAreNot) {
  ::setenv("HOME", "/home/me", 1);
  const auto recipe =
      parse("model: {path: ~/m}\ndata: {train: [~/a.txt, b~], validation: \"~/v\"}\ncheckpoint: {dir: \"~\"}");
  EXPECT_EQ(recipe.model.path, "/home/me/m");
  EXPECT_EQ(recipe.data.train, (std::vector<std::string>{"/home/me/a.txt", "b~"}));
  EXPECT_EQ(recipe.data.validation, std::vector<std::string>{"/home/me/v"});
  EXPECT_EQ(recipe.checkpoint.dir, "/home/me");
  EXPECT_EQ(
      parse_recipe("model: {path: m}\ndata: {train: a}", "my.yaml", std::vector<std::string>{"checkpoint.dir=~/x"})
          .checkpoint.dir,
      "/home/me/x");
  EXPECT_EQ(parse("model: {path: ./~m}\ndata: {train: a}").model.path, "./~m");
  EXPECT_THROW(parse("model: {path: ~you/m}\ndata: {train: a}"), Error);
  ::unsetenv("HOME");
  EXPECT_THROW(parse("model: {path: ~/m}\ndata: {train: a}"), Error);
}

}  // namespace
}  // namespace tessera::train
