#include "tessera/checkpoint/share.h"

#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

TEST(ShareReport, TellsTheManifestWhatWasWritten) {
  const testing::TempFolder folder;
  const NamedTensors tensors = {{"w", at::ones({2, 3})}, {"scalar", at::ones({}, at::kDouble)}};
  Manifest manifest;
  add_report(manifest, write_share(take_share(tensors, 0, 0), folder.path(), 0, 2));
  add_report(manifest, write_share(take_share(tensors, 1, 0), folder.path(), 1, 2));  // of replicas: no parts
  manifest.check();
  EXPECT_EQ(manifest.files.size(), 2U);
  EXPECT_EQ(manifest.files.at(0).xxh3, hash_file(folder / manifest.files[0].name));
  ASSERT_EQ(manifest.tensors.at("w").parts.size(), 1U);
  EXPECT_EQ(manifest.tensors.at("w").parts[0].shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(manifest.tensors.at("scalar").dtype, at::kDouble);
  EXPECT_EQ(Manifest::parse(manifest.dump(), "again").dump(), manifest.dump());
}

TEST(ShareReport, AFailureIsAnErrorAndSoIsRubbish) {
  Manifest manifest;
  try {
    add_report(manifest, failure_report(3, std::runtime_error("disk \"full\"\xff")));
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kIo);
    EXPECT_EQ(std::string(error.what()).rfind("rank 3: disk \"full\"", 0), 0U) << error.what();
  }
  const std::string tensor = R"({"name": "w", "dtype": "F32", "shape": [2], "parts": )";
  const auto report = [](const std::string& tensors) {
    return R"({"file": "a", "bytes": 1, "xxh3": 2, "tensors": [)" + tensors + "]}";
  };
  for (const std::string& rubbish :
       {std::string(), std::string("[]"), std::string("{}"), std::string(100'000, '['),
        report(tensor + std::string(100'000, '[')), report(tensor + "[{}]}"), report(tensor + "3}"),
        report(R"({"name": "w", "dtype": "F33", "shape": [2], "parts": []})"),
        report(R"({"name": "w", "dtype": "F32", "shape": [-2], "parts": []})")}) {
    Manifest other;
    EXPECT_THROW(add_report(other, rubbish), std::exception) << rubbish.substr(0, 80);
  }
  Manifest outside;  // a part that lies outside its tensor is found before it is published
  add_report(outside, report(tensor + R"([{"file": 0, "offset": [1], "shape": [2]}]})"));
  EXPECT_THROW(outside.check(), Error);
}

}  // namespace
}  // namespace tessera
