#include "tessera/checkpoint/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// A manifest of one tensor "w" of float32 with these parts, each [[offset], [shape]].
std::string manifest(const std::string& shape, const std::vector<std::pair<std::string, std::string>>& parts,
                     const std::string& name = "w") {
  std::string list;
  for (const auto& [offset, size] : parts) {
    list += (list.empty() ? "" : ",") + fmt::format(R"({{"file":0,"offset":{},"shape":{}}})", offset, size);
  }
  return fmt::format(R"({{"format":"tessera.checkpoint","version":1,"step":3,"world_size":1,"validation_loss":null,)"
                     R"("files":[{{"name":"a.safetensors","bytes":8,"xxh3":"00ff"}}],)"
                     R"("tensors":{{"{}":{{"dtype":"F32","shape":{},"parts":[{}]}}}},"extra":{{"k":[1]}}}})",
                     name, shape, list);
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

TEST(Manifest, PartsThatCoverTheTensorAreRead) {
  const auto rows = Manifest::parse(manifest("[4,3]", {{"[0,0]", "[2,3]"}, {"[2,0]", "[2,3]"}}), "m");
  EXPECT_EQ(rows.step, 3);
  EXPECT_EQ(rows.extra, nlohmann::json::parse(R"({"k":[1]})"));
  EXPECT_EQ(rows.tensors.at("w").parts.at(1).offset, (std::vector<int64_t>{2, 0}));
  EXPECT_EQ(Manifest::parse(rows.dump(), "again").dump(), rows.dump());
  // A grid whose columns are cut at other places in each row, an empty part, a scalar and an empty tensor.
  Manifest::parse(
      manifest("[2,4]",
               {{"[0,0]", "[1,1]"}, {"[0,1]", "[1,3]"}, {"[1,0]", "[1,3]"}, {"[1,3]", "[1,1]"}, {"[0,0]", "[0,4]"}}),
      "m");
  Manifest::parse(manifest("[]", {{"[]", "[]"}}), "m");
  Manifest::parse(manifest("[0,281474976710656]", {}), "m");
}

TEST(Manifest, PartsThatOverlapOrLeaveGapsAreRefused) {
  EXPECT_THAT(error_of(manifest("[4,3]", {{"[0,0]", "[2,3]"}, {"[0,0]", "[2,3]"}})),
              HasSubstr("'w': the parts at 0,0 and at 0,0 overlap"));
  EXPECT_THAT(error_of(manifest("[2,4]", {{"[0,0]", "[1,3]"}, {"[0,2]", "[2,2]"}, {"[1,0]", "[1,1]"}})),
              HasSubstr("overlap"));
  EXPECT_THAT(error_of(manifest("[4]", {{"[0]", "[3]"}})), HasSubstr("parts cover 3 of 4"));
  EXPECT_THAT(error_of(manifest("[4]", {{"[0]", "[4]"}, {"[0]", "[4]"}})), HasSubstr("more than its 4 elements"));
  EXPECT_THAT(error_of(manifest("[4]", {{"[2]", "[3]"}})), HasSubstr("lies outside"));
}

TEST(Manifest, SizesThatOverflowAreRefused) {
  // 2^48 * 2^16 elements are 0 in 64 bits, as many as no part at all covers.
  EXPECT_THAT(error_of(manifest("[281474976710656,65536]", {})), HasSubstr("too many elements"));
  EXPECT_THAT(error_of(manifest("[281474976710657]", {})), HasSubstr("dim of"));
}

TEST(Manifest, HostileTextIsAnErrorThatATerminalCanShow) {
  EXPECT_THAT(error_of(std::string(100'000, '[')), HasSubstr("nested deeper"));
  EXPECT_THAT(error_of(R"({"format":"tessera.checkpoint","version":)" + std::string(100'000, '[')),
              HasSubstr("nested"));
  EXPECT_THAT(error_of(manifest("[4]", {}, "\\u001b[31m")), HasSubstr("'\\x1b[31m'"));
  EXPECT_THAT(error_of(R"({"format":"\u001b[31m","version":1})"), HasSubstr("format"));
}

}  // namespace
}  // namespace tessera
