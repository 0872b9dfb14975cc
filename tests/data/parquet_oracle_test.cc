// Tests of Parquet files against pyarrow: nested columns, every codec of pyarrow's wheel, and incomplete files.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/data/records/row_source.h"
#include "tessera/data/rows/dataset.h"
#include "tests/data/byte_tokenizer.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera::data {
namespace {

using tessera::testing::run_python;
using tessera::testing::TempFolder;
using ::testing::AnyOf;
using ::testing::HasSubstr;

// The files are written once for all tests of this class.
class ParquetOracle : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!reads_parquet()) {
      GTEST_SKIP() << "built without libparquet";
    }
  }
  static void SetUpTestSuite() {
    if (!reads_parquet()) return;
    folder_ = new TempFolder();
    const auto run = run_python("tests/data/oracle/parquet_oracle.py", {folder_->path().string()});
    ASSERT_EQ(run.exit_code, 0) << run.err;
    facts_ = new nlohmann::json(nlohmann::json::parse(run.out));
  }
  static void TearDownTestSuite() {
    delete folder_;
    delete facts_;
  }

  static size_t expect_equal(const std::string& name) {
    const auto rows = open_parquet(*folder_ / name);
    std::ifstream lines(*folder_ / (name + ".jsonl"));
    size_t number = 0;
    for (std::string line; std::getline(lines, line); ++number) {
      RecordRow row;
      EXPECT_TRUE(rows->next(row)) << name << " ends before row " << number + 1;
      EXPECT_EQ(row.value, Json::parse(line)) << name << " row " << number + 1;
      EXPECT_THAT(row.where, HasSubstr(fmt::format("{} row {}", name, number + 1)));
      if (::testing::Test::HasFailure()) return number;
    }
    RecordRow row;
    EXPECT_FALSE(rows->next(row)) << name;
    return number;
  }

  static TempFolder* folder_;
  static nlohmann::json* facts_;
};
TempFolder* ParquetOracle::folder_ = nullptr;
nlohmann::json* ParquetOracle::facts_ = nullptr;

TEST_F(ParquetOracle, NestedColumnsMatchPyarrowInEveryCodec) {
  const auto codecs = facts_->at("codecs").get<std::vector<std::string>>();
  EXPECT_GE(codecs.size(), 5u);
  for (const auto& codec : codecs) EXPECT_EQ(expect_equal("nested_" + codec + ".parquet"), 1000u);
  EXPECT_EQ(expect_equal("pages.parquet"), 1000u);
}

TEST_F(ParquetOracle, EveryTypeMatchesPyarrow) {
  EXPECT_EQ(expect_equal("types.parquet"), 50u);
  EXPECT_EQ(expect_equal("empty.parquet"), 0u);
}

TEST_F(ParquetOracle, TheSameRecordsAsJsonLinesGiveTheSameTokens) {
  TempFolder tokenizer_folder;
  const auto tokenizer = make_byte_tokenizer(tokenizer_folder.path());
  const std::optional<text::ChatTemplate> chat = text::ChatTemplate::parse(
      "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
      "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
      "test.jinja");
  std::string first;
  for (const char* name : {"set_messages.parquet", "set_sharegpt.parquet", "set_alpaca.parquet"}) {
    for (const auto& file : {std::string(name), std::string(name) + ".jsonl"}) {
      const auto set = Dataset::load({.sources = {(*folder_ / file).string()}, .sequence_length = 64, .quiet = true},
                                     tokenizer, chat);
      EXPECT_EQ(set->stats().documents, 20);
      if (first.empty()) first = set->fingerprint();
      EXPECT_EQ(set->fingerprint(), first) << file;
    }
  }
}

TEST_F(ParquetOracle, IncompleteFilesAreErrorsThatNameTheFile) {
  const std::string whole = read_file(*folder_ / "nested_snappy.parquet");
  const auto read_all = [&](const std::string& content) {
    std::ofstream(*folder_ / "broken.parquet", std::ios::binary) << content;
    const auto rows = open_parquet(*folder_ / "broken.parquet");
    size_t count = 0;
    for (RecordRow row; rows->next(row);) ++count;
    return count;
  };
  const auto error = [&](const std::string& content) -> std::string {
    try {
      read_all(content);
    } catch (const Error& raised) {
      EXPECT_EQ(raised.kind(), ErrorKind::kFormat);
      EXPECT_THAT(raised.what(), ::testing::Not(HasSubstr("\n")));
      return raised.what();
    }
    return "no error";
  };
  for (const size_t size : {size_t{0}, size_t{3}, size_t{12}, whole.size() / 2, whole.size() - 1}) {
    EXPECT_THAT(error(whole.substr(0, size)), HasSubstr("broken.parquet: not a complete Parquet file:")) << size;
  }
  // The footer is complete, but pages are missing or bytes are changed. The result is an error, or other values if no
  // check finds the change, but never a crash.
  auto gap = whole;
  gap.erase(whole.size() / 4, whole.size() / 4);
  EXPECT_THAT(error(gap), HasSubstr("not a complete Parquet file:"));
  for (size_t at = 5; at < whole.size(); at += whole.size() / 60) {
    auto flipped = whole;
    flipped[at] = static_cast<char>(flipped[at] ^ 0x55);
    EXPECT_THAT(error(flipped), AnyOf(HasSubstr("broken.parquet"), ::testing::Eq("no error"))) << at;
  }
}

}  // namespace
}  // namespace tessera::data
