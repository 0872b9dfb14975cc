// Tests of the files that are copied with a model: tokenizer, chat templates and licences.
#include "tessera/formats/companions.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/files/file.h"
#include "tessera/base/warning_log.h"
#include "tessera/formats/folder_links.h"
#include "tests/formats/file_bytes.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;
using testing::TempFolder;

std::vector<std::string> files_below(const fs::path& dir) {
  std::vector<std::string> names;
  for (const auto& entry : fs::recursive_directory_iterator(dir)) {
    if (entry.is_regular_file()) names.push_back(entry.path().lexically_relative(dir).string());
  }
  std::ranges::sort(names);
  return names;
}

// Writes files whose content is their name.
void put(const fs::path& dir, std::initializer_list<const char*> names) {
  for (const fs::path name : names) {
    fs::create_directories((dir / name).parent_path());
    publish_file(dir / name, name.string());
  }
}

TEST(Companions, TemplatesAndLicencesAreCopiedWithTheModel) {
  TempFolder folder;
  const auto from = folder / "from", to = folder / "to";
  put(from, {"tokenizer.json", "merges.txt", "LICENSE", "License.md", "NOTICE.txt", "USE_POLICY.md", "README.md",
             "model.safetensors", "config.json", "additional_chat_templates/tool_use.jinja",
             "additional_chat_templates/notes.txt"});
  publish_file(from / "NOTICE.bin", std::string((1 << 20) + 1, 'x'));  // too large for a notice
  fs::create_directories(from / "LICENSES");
  fs::create_directories(to);
  copy_companions(from, to);
  EXPECT_THAT(files_below(to), ElementsAre("LICENSE", "License.md", "NOTICE.txt", "USE_POLICY.md",
                                           "additional_chat_templates/tool_use.jinja", "merges.txt", "tokenizer.json"));
  EXPECT_EQ(read_file(to / "additional_chat_templates/tool_use.jinja"), "additional_chat_templates/tool_use.jinja");
  copy_config_and_companions(from, to);
  EXPECT_EQ(read_file(to / "config.json"), "config.json");
}

// A model folder may come from an untrusted source, and an export may be published. Files outside the folder must
// therefore not be copied.
TEST(Companions, LinksOutOfTheFolderAreNotCopied) {
  TempFolder folder;
  const auto from = folder / "from", to = folder / "to";
  put(folder.path(), {"secret/id", "secret/templates/x.jinja"});
  put(from, {"tokenizer.json", "parts/vocab"});
  fs::create_symlink(folder / "secret/id", from / "merges.txt");
  fs::create_symlink("../secret/id", from / "LICENSE");
  fs::create_symlink("parts/vocab", from / "vocab.json");  // a link inside the folder
  fs::create_symlink("../secret/templates", from / "additional_chat_templates");
  fs::create_symlink("nowhere", from / "added_tokens.json");
  fs::create_directories(to);
  WarningLog warnings;
  copy_companions(from, to);
  EXPECT_THAT(files_below(to), ElementsAre("tokenizer.json", "vocab.json"));
  const auto told = warnings.take_warnings();
  ASSERT_EQ(told.size(), 3U);
  EXPECT_THAT(told[0], HasSubstr("merges.txt: is a link to '" + fs::canonical(folder / "secret/id").string() + "'"));
  fs::create_symlink("../secret/id", from / "config.json");
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { copy_config_and_companions(from, to); }),
              HasSubstr("config.json: is a link to"));
}

// The folders of the Hub's cache contain only links.
TEST(Companions, AreCopiedFromTheHubCache) {
  TempFolder folder;
  const auto model = folder / "models--a--b", snapshot = model / "snapshots/0123", to = folder / "to";
  put(model, {"blobs/one", "blobs/two"});
  put(folder.path(), {"models--c--d/blobs/other"});
  fs::create_directories(snapshot / "additional_chat_templates");
  fs::create_symlink("../../blobs/one", snapshot / "tokenizer.json");
  fs::create_symlink("../../../blobs/two", snapshot / "additional_chat_templates/rag.jinja");
  fs::create_symlink("../../../models--c--d/blobs/other", snapshot / "merges.txt");
  fs::create_directories(to);
  copy_companions(snapshot, to);
  EXPECT_THAT(files_below(to), ElementsAre("additional_chat_templates/rag.jinja", "tokenizer.json"));
  EXPECT_EQ(read_file(to / "tokenizer.json"), "blobs/one");
  // A link to the snapshot folder. Scripts create such links.
  fs::create_directory_symlink(snapshot, folder / "link");
  EXPECT_TRUE(resolve_links(folder / "link", "tokenizer.json").is_inside);
  EXPECT_FALSE(resolve_links(folder / "link", "merges.txt").is_inside);
  EXPECT_FALSE(resolve_links(folder / "none", "merges.txt").is_inside);
}

}  // namespace
}  // namespace tessera
