// Staged files and folders: they appear whole on publish, leave nothing if they are dropped, and overwrite no other
// files.
#include "tessera/base/files/staged.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "tests/formats/file_bytes.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using testing::error_of;
using testing::TempFolder;

TEST(StagedFolder, AppearsCompleteOnPublishAndNotBefore) {
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

TEST(StagedFolder, DestructorRemovesItAndNonEmptyDestinationIsRefused) {
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

TEST(StagedFolder, DestinationThatIsFilledBeforePublishIsKept) {
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

// If the name of a staged file could be guessed, another user could put a link to some file there, or another writer
// could use it.
TEST(StagedFile, DoesNotUseExistingNames) {
  TempFolder folder;
  testing::write_bytes(folder / "victim", "precious");
  const auto guessed = (folder / "a").string() + ".tmp." + std::to_string(::getpid());
  std::filesystem::create_symlink(folder / "victim", guessed);
  std::filesystem::create_directory(folder / ("b.tmp." + std::to_string(::getpid())));
  testing::write_bytes(folder / ("b.tmp." + std::to_string(::getpid())) / "theirs", "x");
  publish_file(folder / "a", "new");
  const std::string text = "new";
  StagedFile file(folder / "a");
  file.write_at(0, std::as_bytes(std::span(text)));
  file.publish();
  { StagedFolder staged(folder / "b"); }
  EXPECT_EQ(read_file(folder / "victim"), "precious");
  EXPECT_FALSE(std::filesystem::is_symlink(folder / "a"));
  EXPECT_EQ(read_file(folder / ("b.tmp." + std::to_string(::getpid())) / "theirs"), "x");
}

TEST(StagedFile, ConcurrentPublishesOfOnePathAreAtomic) {
  TempFolder folder;
  const std::string contents[] = {std::string(40000, 'a'), std::string(50000, 'b'), std::string(60000, 'c')};
  publish_file(folder / "file", contents[0]);
  std::atomic<int> writing{3};
  std::vector<std::thread> writers;
  for (const auto& content : contents) {
    writers.emplace_back([&] {
      for (int i = 0; i < 30; ++i) EXPECT_NO_THROW(publish_file(folder / "file", content));
      --writing;
    });
  }
  while (writing > 0) {
    const auto seen = read_file(folder / "file");
    EXPECT_TRUE(std::find(std::begin(contents), std::end(contents), seen) != std::end(contents))
        << seen.size() << " bytes";
  }
  for (auto& writer : writers) writer.join();
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
}

TEST(StagedFile, StagesInTheGivenFolder) {
  TempFolder folder;
  std::filesystem::create_directory(folder / "staging");
  StagedFile file(folder / "a", folder / "staging");
  EXPECT_FALSE(std::filesystem::is_empty(folder / "staging"));
  EXPECT_FALSE(std::filesystem::exists(folder / "a"));
  file.publish();
  EXPECT_TRUE(std::filesystem::is_empty(folder / "staging"));
  EXPECT_TRUE(std::filesystem::exists(folder / "a"));
  const std::string longest(255, 'n');
  publish_file(folder / longest, "x");
  EXPECT_EQ(read_file(folder / longest), "x");
}

}  // namespace
}  // namespace tessera
