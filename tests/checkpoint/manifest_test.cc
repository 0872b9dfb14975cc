// Tests of the manifest of a checkpoint: reading, names, versions and hostile text.
#include "tessera/checkpoint/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::string manifest(const std::string& file, int version = 2, const std::string& xxh3 = "00ff") {
  return fmt::format(R"({{"format":"tessera.checkpoint","version":{},"step":3,"number":7,"world_size":1,)"
                     R"("validation_loss":null,"files":[{{"name":"{}","bytes":8,"xxh3":"{}"}}],"extra":{{"k":[1]}}}})",
                     version, file, xxh3);
}

std::string error_of(const std::string& text) {
  try {
    Manifest::parse(text, "dir/manifest.json");
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kFormat);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("dir/manifest.json"), Not(HasSubstr("\n")), Not(HasSubstr("\x1b"))));
    return error.what();
  }
  return "no error";
}

TEST(Manifest, RoundTrips) {
  const auto read = Manifest::parse(manifest("__0_0.distcp"), "m");
  EXPECT_EQ(read.step, 3);
  EXPECT_EQ(read.number, 7);
  EXPECT_FALSE(read.validation_loss);
  EXPECT_EQ(read.files.at(0).name, "__0_0.distcp");
  EXPECT_EQ(read.files.at(0).xxh3, 255U);
  EXPECT_EQ(read.extra, nlohmann::json::parse(R"({"k":[1]})"));
  EXPECT_EQ(Manifest::parse(read.dump(), "again").dump(), read.dump());
}

TEST(Manifest, NamesOutsideTheFolderAreRefused) {
  for (const char* name : {"", "..", "../x", "/etc/passwd", "a/b"}) {
    EXPECT_THAT(error_of(manifest(name)), HasSubstr("leaves the folder")) << name;
  }
}

TEST(Manifest, AnotherVersionIsNotReportedAsDamage) {
  EXPECT_THAT(error_of(manifest("a", 1)), AllOf(HasSubstr("format version 1, this program reads version 2"),
                                                HasSubstr("the program that wrote it"), Not(HasSubstr("damaged"))));
}

TEST(Manifest, HostileTextIsAnErrorWithEscapedCharacters) {
  EXPECT_THAT(error_of(std::string(100'000, '[')), HasSubstr("nested deeper"));
  EXPECT_THAT(error_of(R"({"format":"tessera.checkpoint","version":)" + std::string(100'000, '[')),
              HasSubstr("nested"));
  EXPECT_THAT(error_of(manifest("\\u001b[31m/")), HasSubstr("'\\x1b[31m/'"));
  EXPECT_THAT(error_of(R"({"format":"\u001b[31m","version":1})"), HasSubstr("format"));
  EXPECT_THAT(error_of(manifest("a", 2, "rubbish")), AllOf(HasSubstr("damaged"), HasSubstr("hash 'rubbish'")));
  EXPECT_THAT(error_of(manifest("a", 2, "0123456789abcdef0")), HasSubstr("hexadecimal digits"));
  auto huge = manifest("a");
  huge.replace(huge.find("\"bytes\":8"), 9, "\"bytes\":1e117");
  EXPECT_THAT(error_of(huge), HasSubstr("files[0].bytes"));
}

}  // namespace
}  // namespace tessera
