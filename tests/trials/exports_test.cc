// Tests of the files that are exported with a model, with the commands of a user.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/process.h"
#include "tests/support/temp_folder.h"
#include "tests/trials/chain_model.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using testing::TempFolder;

TEST(Exports, OmitFilesThatLinkOutOfTheModelFolder) {
  TempFolder folder;
  const auto model = folder / "model";
  testing::write_chain_folder(model);
  publish_file(folder / "id_ed25519", "secret");
  fs::create_symlink(folder / "id_ed25519", model / "merges.txt");
  publish_file(model / "LICENSE", "MIT");
  const auto convert = [&](const fs::path& from, const fs::path& to, const char* kind) {
    const auto run =
        testing::run_process({testing::program(), "ckpt", "convert", from.string(), to.string(), "--to", kind});
    EXPECT_EQ(run.exit_code, 0) << run.err;
    return run.err;
  };
  EXPECT_THAT(convert(model, folder / "dcp", "dcp"), HasSubstr("merges.txt: is a link to"));
  EXPECT_THAT(convert(model, folder / "hf", "hf"), HasSubstr("merges.txt: is a link to"));
  for (const char* name : {"dcp", "hf"}) {
    EXPECT_FALSE(fs::exists(folder / name / "merges.txt")) << name;
    EXPECT_TRUE(fs::exists(folder / name / "tokenizer.json")) << name;
    EXPECT_EQ(read_file(folder / name / "LICENSE"), "MIT") << name;
  }
}

}  // namespace
}  // namespace tessera
