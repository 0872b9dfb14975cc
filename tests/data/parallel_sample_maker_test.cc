// Tests of the number of records in memory before tokenization: many small records, or few large records, for all kinds
// of records.
#include "tessera/data/records/parallel_sample_maker.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/data/byte_tokenizer.h"
#include "tests/support/temp_folder.h"

namespace tessera::data {
namespace {

// The number of records that were added before the first sample was returned.
size_t held(const TrainingRecord& record, size_t added) {
  const testing::TempFolder folder;
  const auto tokenizer = make_byte_tokenizer(folder.path());
  const std::optional<text::ChatTemplate> no_template;
  const SampleMaker maker(tokenizer, no_template);
  size_t given = 0, most = 0, taken = 0;
  ParallelSampleMaker samples(
      maker, [&](const TrainingRecord&, const TokenizedSample&) { most = std::max(most, given - taken++); });
  try {
    while (given < added) {
      ++given;
      samples.add(record);
    }
    samples.finish();
  } catch (const std::exception&) {  // an error: a chat without a template
    return given;
  }
  return most;
}

TEST(ParallelSampleMaker, BuffersFewerRecordsIfTheyAreLarge) {
  EXPECT_EQ(held({.kind = RecordKind::kText, .text = "a"}, 600), 256u);
  EXPECT_EQ(held({.kind = RecordKind::kText, .text = std::string(1 << 20, 'a')}, 12), 4u);
  EXPECT_EQ(held({.kind = RecordKind::kInstruction, .text = "a", .input = std::string(1 << 20, 'a')}, 12), 4u);
  EXPECT_EQ(held({.kind = RecordKind::kTokens, .tokens = std::vector<int32_t>(1 << 18, 7)}, 12), 4u);
  nlohmann::ordered_json chat = {
      {"messages",
       {{{"role", "user"}, {"content", std::string(1 << 20, 'a')}}, {{"role", "assistant"}, {"content", "b"}}}}};
  const TrainingRecord record{.kind = RecordKind::kChat,
                              .json = std::make_shared<const nlohmann::ordered_json>(std::move(chat))};
  EXPECT_EQ(held(record, 12), 4u);
}

}  // namespace
}  // namespace tessera::data
