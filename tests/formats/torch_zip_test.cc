// Tests of zip archives of stored entries: the layout is torch's, and damaged archives are refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "tessera/formats/torch/crc32.h"
#include "tessera/formats/torch/zip_archive.h"
#include "tessera/formats/torch/zip_writer.h"
#include "tests/formats/file_bytes.h"
#include "tests/formats/torch_pattern.h"

namespace tessera {
namespace {

using testing::bytes_of_text;
using testing::error_of;
using ::testing::HasSubstr;
using testing::StringSink;

using NamedEntries = std::vector<std::pair<std::string, std::string>>;

std::string zip_of(const NamedEntries& entries) {
  StringSink out;
  const auto sink = out.sink();
  ZipWriter writer(sink);
  for (const auto& [name, content] : entries) writer.add(name, bytes_of_text(content));
  const auto length = writer.finish();
  EXPECT_EQ(length, out.bytes.size());
  return out.bytes;
}

std::string zip_refusal(const std::string& bytes) {
  return error_of(ErrorKind::kFormat, [&] { ZipArchive::parse(bytes_of_text(bytes), "z"); });
}

// The archive with one change: the first `from` at or after `start` becomes `to`, which has the same length.
std::string replaced(std::string bytes, const std::string& from, const std::string& to, size_t start = 0) {
  const auto at = bytes.find(from, start);
  EXPECT_NE(at, bytes.npos);
  EXPECT_EQ(from.size(), to.size());
  return bytes.replace(at, from.size(), to);
}

TEST(TorchZip, Crc32MatchesZip) {
  EXPECT_EQ(crc32(0, {}), 0U);
  EXPECT_EQ(crc32(0, bytes_of_text("123456789")), 0xCBF43926U);  // the check value of CRC-32/ISO-HDLC
  EXPECT_EQ(crc32(0, bytes_of_text("The quick brown fox jumps over the lazy dog")), 0x414FA339U);
  std::string text;
  for (int i = 0; i < 1000; ++i) text.push_back(static_cast<char>(i * 7));
  const uint32_t whole = crc32(0, bytes_of_text(text));
  for (size_t cut = 0; cut <= text.size(); cut += 13) {
    const auto bytes = bytes_of_text(text);
    EXPECT_EQ(crc32(crc32(0, bytes.first(cut)), bytes.subspan(cut)), whole);
  }
}

TEST(TorchZip, EntriesReadBackAlignedAndTheArchiveLengthIsPredicted) {
  const NamedEntries wanted{{"archive/data.pkl", "abc"},
                            {"archive/data/0", std::string(1000, 'x')},
                            {"archive/data/1", ""},
                            {"archive/\u00e9", std::string(64, '\0')}};
  const auto bytes = zip_of(wanted);
  std::vector<ZipEntrySize> sizes;
  for (const auto& [name, content] : wanted) sizes.push_back({name, content.size()});
  EXPECT_EQ(zip_archive_bytes(sizes), bytes.size());
  const auto archive = ZipArchive::parse(bytes_of_text(bytes), "z");
  ASSERT_EQ(archive.entries().size(), wanted.size());
  for (size_t i = 0; i < wanted.size(); ++i) {
    const auto& entry = archive.entries()[i];
    EXPECT_EQ(entry.name, wanted[i].first);
    EXPECT_EQ(entry.begin % 64, 0U);
    EXPECT_EQ(bytes.substr(entry.begin, entry.size_bytes()), wanted[i].second);
    EXPECT_EQ(archive.find(entry.name), &entry);
  }
  EXPECT_EQ(archive.find("archive/data/2"), nullptr);
}

TEST(TorchZip, CorruptDataFailsTheCrcCheck) {
  const auto bytes = zip_of({{"a/x", "abc"}, {"a/y", "defg"}});
  const auto check = [](const std::string& archive, const char* name) {
    const auto parsed = ZipArchive::parse(bytes_of_text(archive), "z");
    parsed.check_crc(*parsed.find(name), "z");
  };
  check(bytes, "a/x");
  check(bytes, "a/y");
  const auto changed = replaced(bytes, "defg", "deFg");
  check(changed, "a/x");
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { check(changed, "a/y"); }),
              HasSubstr("[zip] z: entry 'a/y': its 4 bytes have the CRC"));
  const auto parsed = ZipArchive::parse(bytes_of_text(bytes), "z");
  std::string crc(4, ' ');
  std::memcpy(crc.data(), &parsed.find("a/y")->crc, 4);
  // torch.serialization.set_crc32_options(False) writes a CRC of 0.
  check(replaced(changed, crc, std::string(4, '\0'), changed.find(crc) + 4), "a/y");
}

TEST(TorchZip, ArchiveLengthIncludesZip64Fields) {
  const uint64_t large = uint64_t{5} << 30;
  const ZipEntrySize sizes[] = {{"a/data.pkl", 10}, {"a/data/0", large}, {"a/data/1", 1}};
  const ZipEntrySize small[] = {{"a/data.pkl", 10}, {"a/data/0", 64}, {"a/data/1", 1}};
  // The directory has 20 more bytes for the sizes of the large entry and 12 more for the position of the third entry.
  // The rest is padded to 64.
  const uint64_t more = zip_archive_bytes(sizes) - zip_archive_bytes(small) - (large - 64);
  EXPECT_EQ(more % 64, 32U);
  EXPECT_LE(more, 96U);
}

TEST(TorchZip, WriterRequiresTheAnnouncedLength) {
  StringSink out;
  const auto sink = out.sink();
  ZipWriter writer(sink);
  const std::string two = "ab";
  EXPECT_THAT(error_of(ErrorKind::kInternal,
                       [&] { writer.add("a/b", 3, [&](const ByteSink& data) { data(bytes_of_text(two)); }); }),
              HasSubstr("2 bytes of the announced 3"));
  EXPECT_THAT(error_of(ErrorKind::kInternal,
                       [&] { writer.add("a/c", 1, [&](const ByteSink& data) { data(bytes_of_text(two)); }); }),
              HasSubstr("more than the announced 1"));
}

TEST(TorchZip, TruncatedAndInvalidArchivesAreRefused) {
  const auto bytes = zip_of({{"a/data.pkl", "abc"}, {"a/data/0", "defg"}});
  for (size_t size = 0; size < bytes.size(); ++size) ASSERT_NE(zip_refusal(bytes.substr(0, size)), "");
  EXPECT_THAT(zip_refusal(bytes.substr(0, bytes.size() - 1)), HasSubstr("cut off"));
  EXPECT_THAT(zip_refusal(bytes + "x"), HasSubstr("not the end of a directory"));
  EXPECT_THAT(zip_refusal("x" + bytes), HasSubstr("no ZIP64 record"));
  EXPECT_THAT(zip_refusal(bytes.substr(1)), HasSubstr("no ZIP64 record"));
}

TEST(TorchZip, CompressedAndEncryptedEntriesAreRefusedByName) {
  const auto bytes = zip_of({{"a/data.pkl", "abc"}, {"a/data/0", "defg"}});
  const auto directory = bytes.find("PK\x01\x02");
  auto packed = bytes;
  packed[directory + 10] = 8;
  EXPECT_THAT(zip_refusal(packed), HasSubstr("'a/data.pkl' is compressed (method 8)"));
  packed = bytes;
  packed[8] = 8;
  EXPECT_THAT(zip_refusal(packed), HasSubstr("'a/data.pkl' is compressed (method 8)"));
  auto locked = bytes;
  locked[directory + 8] = static_cast<char>(locked[directory + 8] | 1);
  EXPECT_THAT(zip_refusal(locked), HasSubstr("'a/data.pkl' is encrypted"));
}

TEST(TorchZip, NamesOutsideTheFolderAndDuplicatesAreRefused) {
  for (const auto* name : {"/abs", "../up", "a/../b", "a//b", "a/", "", ".", "a\\b", "a/\xff"}) {
    EXPECT_THAT(zip_refusal(zip_of({{name, "abc"}})), HasSubstr("the name is not a valid path inside a folder"))
        << name;
  }
  EXPECT_THAT(zip_refusal(zip_of({{"a/b", "abc"}, {"a/c", "abc"}, {"a/b", "abc"}})), HasSubstr("'a/b' is there twice"));
}

TEST(TorchZip, EntriesThatOverlapOrDisagreeWithTheirHeadersAreRefused) {
  const auto bytes = zip_of({{"a/x", "abc"}, {"a/y", "defg"}});
  const auto directory = bytes.find("PK\x01\x02");
  EXPECT_THAT(zip_refusal(replaced(bytes, "a/x", "a/z")), HasSubstr("'a/x' has the name 'a/z' in its local header"));
  auto shifted = bytes;  // the second record of the directory points to the first entry
  const auto second = bytes.find("PK\x01\x02", directory + 1);
  std::memset(shifted.data() + second + 42, 0, 4);
  EXPECT_THAT(zip_refusal(shifted), HasSubstr("'a/y' has the name 'a/x' in its local header"));
  auto longer = bytes;  // the first entry reaches into the second
  longer[directory + 20] = longer[directory + 24] = 70;
  EXPECT_THAT(zip_refusal(longer), HasSubstr("'a/y' begins at byte"));
  longer[directory + 20] = 3;
  EXPECT_THAT(zip_refusal(longer), HasSubstr("has 70 bytes and 3 packed bytes"));
  auto beyond = bytes;
  std::memset(beyond.data() + second + 20, 0x7f, 8);
  EXPECT_THAT(zip_refusal(beyond), HasSubstr("the directory begins at"));
  auto far = bytes;
  std::memset(far.data() + second + 42, 0x7f, 4);
  EXPECT_THAT(zip_refusal(far), HasSubstr("would be at bytes"));
  auto plain = bytes;  // the header announces no data descriptor, but has sizes of 0
  plain[6] = 0;
  EXPECT_THAT(zip_refusal(plain), HasSubstr("has 0 bytes by its header, 3 by the directory"));
  auto count = bytes;
  count[bytes.rfind("PK\x06\x06") + 32] = 3;
  EXPECT_THAT(zip_refusal(count), HasSubstr("announces 3 entries and holds 2"));
}

TEST(TorchZip, DamagedArchivesAreReadOrRefused) {
  const auto bytes = zip_of({{"a/data.pkl", "abc"}, {"a/data/0", "defg"}, {"a/data/1", ""}});
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int flip = 0; flip < 5000; ++flip) {
    auto damaged = bytes;
    for (uint32_t i = 0; i < 1 + random() % 3; ++i) damaged[random() % damaged.size()] = static_cast<char>(random());
    try {
      const auto archive = ZipArchive::parse(bytes_of_text(damaged), "z");
      for (const auto& entry : archive.entries()) ASSERT_LE(entry.end, damaged.size());
    } catch (const Error& error) {
      ASSERT_EQ(error.kind(), ErrorKind::kFormat) << error.what();
    }
  }
}

}  // namespace
}  // namespace tessera
