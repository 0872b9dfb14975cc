// Tests of adapters from users against PEFT: every spelling of target_modules, and weights in every file format.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/files/staged.h"
#include "tessera/models/adapters/adapters.h"
#include "tests/models/tiny.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

const json kTargets = {
    // A string is a regular expression of the whole path, except "all-linear".
    "q_proj",
    ".*q_proj",
    ".*\\.q_proj|.*\\.v_proj",
    "model.layers.0.mlp.down_proj",
    "q_proj$",
    ".*_proj",
    "",
    "all-linear",
    "ALL-LINEAR",
    ".*layers\\.[01]\\..*(up|down)_proj",
    "(.*)\\.o_proj",
    // A list holds names.
    json::array(),
    {"q_proj"},
    {"self_attn.q_proj"},
    {"model.layers.1.mlp.up_proj"},
    {"proj"},
    {".*q_proj"},
    {"all-linear"},
    {"q_proj", "query_key_value"},
    {"q_proj", ".*"},
    {"1.self_attn.v_proj", "0.mlp.gate_proj"},
    {"query_key_value", "dense"}};

json targeted(const std::filesystem::path& folder, const json& targets) {
  publish_file(folder / "adapter_config.json",
               json({{"peft_type", "LORA"}, {"r", 2}, {"target_modules", targets}}).dump());
  const auto model = testing::tiny_model();
  try {
    auto paths = add_adapters(*model, read_adapter_config(folder));
    std::ranges::sort(paths);
    return paths;
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kConfig) << error.what();
    return nullptr;
  }
}

std::shared_ptr<CausalLM> with_adapter(const std::filesystem::path& folder) {
  auto model = testing::tiny_model();
  add_adapters(*model, read_adapter_config(folder));
  load_adapters(*model, folder);
  return model;
}

TEST(AdapterFilesOracle, TargetModulesAndWeightsMatchPeft) {
  const testing::TempFolder folder;
  save_pretrained(*testing::tiny_model(), folder / "base", {});
  const auto run = testing::run_python("tests/trials/oracle/peft_targets.py", {(folder / "").string(), kTargets.dump()},
                                       {.timeout_seconds = 300});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const auto wanted = json::parse(read_file(folder / "targets.json"));
  ASSERT_EQ(wanted.size(), kTargets.size());
  std::filesystem::create_directory(folder / "ours");
  size_t refused = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_EQ(targeted(folder / "ours", kTargets[i]), wanted[i]) << kTargets[i];
    refused += wanted[i].is_null();
  }
  EXPECT_GT(refused, 4u);
  EXPECT_LT(refused, wanted.size() / 2);

  const auto tokens = testing::tiny_tokens(2, 9);
  const auto logits = with_adapter(folder / "safe")->logits({.tokens = tokens});
  EXPECT_FALSE(logits.equal(testing::tiny_model()->logits({.tokens = tokens}))) << "the adapter does something";
  EXPECT_TRUE(with_adapter(folder / "zip")->logits({.tokens = tokens}).equal(logits));
  try {
    with_adapter(folder / "legacy");
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kFormat);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("adapter_model.bin"), HasSubstr("Load it with PEFT and save it again"),
                                    HasSubstr("adapter_model.safetensors")));
  }
}

}  // namespace
}  // namespace tessera
