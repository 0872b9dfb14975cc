// MappedFile, and the error for a file that is truncated while it is mapped.
#include "tessera/base/files/mapped_file.h"

#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

std::filesystem::path written(const testing::TempFolder& folder, size_t bytes) {
  const auto path = folder / "weights.safetensors";
  std::ofstream(path, std::ios::binary) << std::string(bytes, 'x');
  return path;
}

TEST(MappedFile, HoldsTheBytesOfTheFile) {
  const testing::TempFolder folder;
  const auto file = MappedFile::open(written(folder, 10'000));
  ASSERT_EQ(file->bytes().size(), 10'000U);
  EXPECT_EQ(file->bytes().back(), std::byte{'x'});
}

// Maps a file, truncates the file, and reads the last byte of the map.
void read_behind_the_end(const std::filesystem::path& path, bool reported) {
  if (reported) report_cut_files();
  // This map ends at once. Its slot in the table of maps must be free for the next map of the same file.
  MappedFile::open(path);
  const auto file = MappedFile::open(path);
  std::filesystem::resize_file(path, 100);
  volatile const std::byte* last = &file->bytes().back();
  static_cast<void>(*last);
}

TEST(MappedFileDeathTest, FileTruncatedWhileMappedIsNamedWithTheIoExitCode) {
  const testing::TempFolder folder;
  const auto path = written(folder, 100'000);
  EXPECT_EXIT(read_behind_the_end(path, true), ::testing::ExitedWithCode(3),
              "weights.safetensors: became shorter while it was read");
}

TEST(MappedFileDeathTest, OtherBusErrorsRemainSignals) {
  EXPECT_EXIT(
      {
        report_cut_files();
        std::raise(SIGBUS);
        std::raise(SIGBUS);
      },
      ::testing::KilledBySignal(SIGBUS), "");
}

}  // namespace
}  // namespace tessera
