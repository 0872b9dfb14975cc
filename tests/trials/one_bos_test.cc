// Tests of texts that already begin with the BOS token that the tokenizer adds: every reader of texts gives exactly one
// BOS.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tessera/base/files/file.h"
#include "tessera/cli/score/score_records.h"
#include "tessera/serve/requests.h"
#include "tessera/text/document.h"
#include "tests/data/byte_tokenizer.h"
#include "tests/support/temp_folder.h"

namespace tessera::trials {
namespace {

using ::testing::ElementsAre;

constexpr int64_t kBos = data::kTurnStart;  // <|im_start|>

class OneBos : public ::testing::Test {
 protected:
  OneBos() {
    data::make_byte_tokenizer(folder_.path());
    auto file = nlohmann::json::parse(read_file(folder_ / "tokenizer.json"));
    file["post_processor"] = nlohmann::json::parse(R"({"type": "TemplateProcessing",
      "single": [{"SpecialToken": {"id": "B", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
      "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
      "special_tokens": {"B": {"id": "B", "ids": [256], "tokens": ["<|im_start|>"]}}})");
    std::ofstream(folder_ / "tokenizer.json") << file;
    std::ofstream(folder_ / "tokenizer_config.json") << R"({"eos_token": "<eos>", "bos_token": "<|im_start|>"})";
    tokenizer_ = text::Tokenizer::from_folder(folder_.path());
    config_.vocab_size = 260;
    config_.max_position_embeddings = 100;
  }

  testing::TempFolder folder_;
  std::optional<text::Tokenizer> tokenizer_;
  ModelConfig config_;
};

TEST_F(OneBos, DocumentsHaveOneBos) {
  const auto ids = [&](const char* text) { return text::encode_document(*tokenizer_, text).ids; };
  EXPECT_THAT(ids("a"), ElementsAre(kBos, 'a'));
  EXPECT_THAT(ids("<|im_start|>a"), ElementsAre(kBos, 'a'));
  EXPECT_THAT(ids("<|im_start|>"), ElementsAre(kBos));
  EXPECT_THAT(ids("<|im_start|><|im_start|>a"), ElementsAre(kBos, kBos, 'a'));
  EXPECT_THAT(ids(""), ElementsAre(kBos));
  EXPECT_TRUE(text::encode_document(*tokenizer_, "<|im_start|>a").begins_with_bos);
  EXPECT_FALSE(text::encode_document(*tokenizer_, "a<|im_start|>").begins_with_bos);
}

TEST_F(OneBos, ScoredTextsHaveOneBos) {
  const auto records = cli::read_score_records(
      "{\"text\": \"<|im_start|>ab\"}\n{\"prompt\": \"<|im_start|>a\", \"completion\": \"<|im_start|>b\"}\n", "test",
      {}, *tokenizer_, config_);
  ASSERT_EQ(records.size(), 2u);
  for (const auto& record : records) EXPECT_THAT(record.sequences[0].tokens, ElementsAre(kBos, 'a', 'b'));
  EXPECT_EQ(records[1].sequences[0].first, 2u);
}

TEST_F(OneBos, PromptsOfCompletionsHaveOneBos) {
  const serve::ServedModel served{
      .name = "tiny", .config = config_, .defaults = {}, .tokenizer = *tokenizer_, .chat = {}, .cache_tokens = 100};
  const auto request =
      serve::read_request(R"({"prompt": "<|im_start|>ab", "max_tokens": 2})", serve::Endpoint::kText, served);
  EXPECT_THAT(request.choices.at(0).prompt, ElementsAre(kBos, 'a', 'b'));
}

}  // namespace
}  // namespace tessera::trials
