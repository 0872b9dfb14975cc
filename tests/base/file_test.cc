// Reading and publishing whole files, and the errors of both.
#include "tessera/base/files/file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tessera/base/error.h"
#include "tessera/base/files/mapped_file.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

TEST(File, PublishedContentIsReadBackByReadAndByMap) {
  testing::TempFolder folder;
  publish_file(folder / "a", "first");
  publish_file(folder / "a", "second\n");
  EXPECT_EQ(read_file(folder / "a"), "second\n");
  const auto mapped = MappedFile::open(folder / "a");
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(mapped->bytes().data()), mapped->bytes().size()), "second\n");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
}

TEST(File, FailureNamesThePathAndLeavesNothing) {
  testing::TempFolder folder;
  EXPECT_THROW(publish_file(folder / "missing" / "a", "x"), Error);
  EXPECT_THROW(read_file(folder / "missing"), Error);
  EXPECT_THROW(MappedFile::open(folder.path()), Error);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

}  // namespace
}  // namespace tessera
