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

// Reads the last byte of a map of a file that is cut meanwhile.
void read_behind_the_end(const std::filesystem::path& path, bool reported) {
  if (reported) report_cut_files();
  // An earlier map of the same name has left its place.
  MappedFile::open(path);
  const auto file = MappedFile::open(path);
  std::filesystem::resize_file(path, 100);
  volatile const std::byte* last = &file->bytes().back();
  static_cast<void>(*last);
}

TEST(MappedFileDeathTest, AFileThatIsCutWhileItIsMappedIsNamedWithTheExitCodeOfIo) {
  const testing::TempFolder folder;
  const auto path = written(folder, 100'000);
  EXPECT_EXIT(read_behind_the_end(path, true), ::testing::ExitedWithCode(3),
              "weights.safetensors: became shorter while it was read");
}

TEST(MappedFileDeathTest, OtherBusErrorsStaySignals) {
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
