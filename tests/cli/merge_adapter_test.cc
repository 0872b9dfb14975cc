// `tessera ckpt convert --adapter`: the output is the model with the PEFT adapters added to its weights.
#include <gmock/gmock.h>

#include "tessera/base/error.h"
#include "tessera/cli/ckpt/ckpt_convert.h"
#include "tessera/models/adapters/adapters.h"
#include "tests/formats/file_bytes.h"
#include "tests/models/tiny.h"
#include "tests/support/temp_folder.h"

namespace tessera::cli {
namespace {

using ::testing::HasSubstr;

TEST(MergeAdapter, MatchesTheModelWithTheAdapter) {
  const testing::TempFolder folder;
  const auto model = testing::tiny_model();
  save_pretrained(*model, folder / "base", {});
  add_adapters(*model, {.rank = 2, .target_modules = {"q_proj", "down_proj"}});
  init_adapters(*model, 3);
  {
    const at::NoGradGuard no_grad;
    for (const auto& [path, linear] : adapted_linears(*model)) linear->lora_B->weight.fill_(0.2);
  }
  save_adapters(*model, folder / "adapter");
  convert_checkpoint(folder / "base", folder / "merged", {.to = "hf", .dtype = "", .adapter = folder / "adapter"});
  const auto tokens = testing::tiny_tokens(1, 6);
  const auto merged = from_pretrained(folder / "merged")->logits({.tokens = tokens});
  EXPECT_TRUE(merged.allclose(model->logits({.tokens = tokens}), 1e-4, 1e-5));
  EXPECT_FALSE(merged.allclose(from_pretrained(folder / "base")->logits({.tokens = tokens}), 1e-2, 1e-2));
  EXPECT_THROW(
      convert_checkpoint(folder / "base", folder / "no", {.to = "gguf", .dtype = "", .adapter = folder / "adapter"}),
      Error);
  EXPECT_THROW(
      convert_checkpoint(folder / "base", folder / "no", {.to = "hf", .dtype = "", .adapter = folder / "base"}), Error);
  EXPECT_FALSE(std::filesystem::exists(folder / "no"));
  EXPECT_THAT(testing::error_of(ErrorKind::kIo, [&] { from_pretrained(folder / "adapter"); }),
              HasSubstr("holds only adapters. Merge them into their model with 'tessera ckpt convert"));
}

// transformers loads such a folder with the adapter. A copy without the adapter would be another model.
TEST(MergeAdapter, AnAdapterInTheModelFolderIsNotIgnoredSilently) {
  const testing::TempFolder folder;
  const auto model = testing::tiny_model();
  save_pretrained(*model, folder / "both", {});
  add_adapters(*model, {.rank = 2, .target_modules = {"q_proj"}});
  init_adapters(*model, 3);
  save_adapters(*model, folder / "adapter");
  for (const auto& file : std::filesystem::directory_iterator(folder / "adapter")) {
    std::filesystem::copy(file, folder / "both" / file.path().filename());
  }
  for (const std::string to : {"", "gguf", "hf", "dcp"}) {
    SCOPED_TRACE(to);
    EXPECT_THAT(
        testing::error_of(ErrorKind::kConfig,
                          [&] { convert_checkpoint(folder / "both", folder / "out", {.to = to, .dtype = ""}); }),
        HasSubstr("holds a model and, in adapter_config.json, an adapter of it. Merge them with"));
    EXPECT_FALSE(std::filesystem::exists(folder / "out"));
  }
  convert_checkpoint(folder / "both", folder / "out", {.to = "hf", .dtype = "", .adapter = folder / "both"});
  EXPECT_FALSE(std::filesystem::exists(folder / "out" / "adapter_config.json"));
}

}  // namespace
}  // namespace tessera::cli
