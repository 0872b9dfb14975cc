#include "tessera/formats/staging.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/formats/file_bytes.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using testing::error_of;
using testing::TempFolder;

TEST(StagedFolder, AppearsWholeOnPublishAndNotBefore) {
  TempFolder folder;
  std::filesystem::create_directory(folder / "empty");
  for (const auto* name : {"new", "empty", "slash/", "deep/er"}) {
    StagedFolder staged(folder / name);
    testing::write_bytes(staged.path() / "a", "x");
    EXPECT_FALSE(std::filesystem::exists(folder / name / "a"));
    staged.publish();
    EXPECT_EQ(read_file(folder / name / "a"), "x");
    EXPECT_FALSE(std::filesystem::exists(staged.path()));
  }
}

TEST(StagedFolder, DroppedLeavesNothingAndFullDestinationIsRefused) {
  TempFolder folder;
  {
    StagedFolder staged(folder / "gone");
    testing::write_bytes(staged.path() / "a", "x");
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  testing::write_bytes(folder / "file", "x");
  EXPECT_THAT(error_of(ErrorKind::kIo, [&] { StagedFolder{folder / "file"}; }), ::testing::HasSubstr("exists already"));
  EXPECT_THAT(error_of(ErrorKind::kIo, [&] { StagedFolder{folder.path()}; }), ::testing::HasSubstr("exists already"));
}

TEST(StagedFolder, DestinationThatFillsUpMeanwhileIsKept) {
  TempFolder folder;
  {
    StagedFolder staged(folder / "a");
    std::filesystem::create_directory(folder / "a");
    testing::write_bytes(folder / "a" / "theirs", "x");
    error_of(ErrorKind::kIo, [&] { staged.publish(); });
  }
  EXPECT_EQ(read_file(folder / "a" / "theirs"), "x");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
}

TEST(StagedFile, ReplacesTheOldFileOnlyOnPublish) {
  TempFolder folder;
  testing::write_bytes(folder / "a", "old");
  const std::string text = "new";
  { StagedFile(folder / "a").write_at(0, std::as_bytes(std::span(text))); }
  EXPECT_EQ(read_file(folder / "a"), "old");
  StagedFile staged(folder / "a");
  staged.write_at(1, std::as_bytes(std::span(text)));
  staged.publish();
  EXPECT_EQ(read_file(folder / "a"), std::string("\0new", 4));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
}

}  // namespace
}  // namespace tessera
