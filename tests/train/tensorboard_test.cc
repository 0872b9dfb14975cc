// Tests of TensorBoard event files: checksums, record framing and errors.
#include "tessera/train/output/tensorboard.h"

#include <gtest/gtest.h>

#include <cstring>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/train/output/crc32c.h"
#include "tests/support/temp_folder.h"

namespace tessera::train {
namespace {

TEST(Crc32c, MatchesPublishedVectors) {
  EXPECT_EQ(crc32c(""), 0u);
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);  // RFC 3720 B.4
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
}

TEST(TensorBoard, EveryRecordIsFramedWithItsChecksums) {
  testing::TempFolder folder;
  std::filesystem::path path;
  {
    TensorBoardWriter events(folder / "tensorboard");
    events.add_scalar("a", 1, 1);
    events.add_text("b", "text", 2);
    path = events.path();
  }
  const std::string bytes = read_file(path);
  size_t at = 0;
  int records = 0;
  for (; at < bytes.size(); ++records) {
    uint64_t length = 0;
    uint32_t length_crc = 0, data_crc = 0;
    ASSERT_LE(at + 16, bytes.size());
    std::memcpy(&length, &bytes[at], 8);
    std::memcpy(&length_crc, &bytes[at + 8], 4);
    EXPECT_EQ(length_crc, masked_crc32c(std::string_view(bytes).substr(at, 8)));
    ASSERT_LE(at + 16 + length, bytes.size());
    std::memcpy(&data_crc, &bytes[at + 12 + length], 4);
    EXPECT_EQ(data_crc, masked_crc32c(std::string_view(bytes).substr(at + 12, length)));
    at += 16 + length;
  }
  EXPECT_EQ(records, 3);
}

TEST(TensorBoard, FolderThatCannotBeMadeIsAnIoError) {
  testing::TempFolder folder;
  publish_file(folder / "file", "x");
  try {
    TensorBoardWriter events(folder / "file");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kIo);
  }
}

}  // namespace
}  // namespace tessera::train
