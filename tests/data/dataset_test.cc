// Tests of data sets: tokenization, packing, loss masks of chats, limits on length and errors.
#include "tessera/data/rows/dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <xxhash.h>

#include <array>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <utility>

#include "tessera/base/error.h"
#include "tests/data/byte_tokenizer.h"
#include "tests/support/temp_folder.h"

namespace tessera::data {

namespace {

using tessera::testing::TempFolder;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const char* kChatMl =
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

class DatasetTest : public ::testing::Test {
 protected:
  std::string write(const std::string& name, const std::string& content) {
    std::ofstream(folder_ / name, std::ios::binary) << content;
    return (folder_ / name).string();
  }

  std::shared_ptr<const Dataset> load(DataOptions options) {
    return Dataset::load(options, tokenizer_, chat_template_);
  }

  std::shared_ptr<const Dataset> load(const std::string& name, const std::string& content, int64_t length,
                                      bool packing = true) {
    return load({.sources = {write(name, content)}, .sequence_length = length, .packing = packing, .shuffle = false});
  }

  // The text of the tokens that count in the loss, for a record that fills one row. Special tokens are shown as <s>,
  // <e> and <eos>.
  std::string learnt(const std::string& record) {
    const auto set = load("record.jsonl", record + "\n", 1000);
    EXPECT_EQ(set->rows(), 1);
    const int64_t index = 0;
    const Batch batch = set->rows({&index, 1});
    EXPECT_EQ(batch.label_tokens, set->stats().label_tokens);
    std::string text;
    const auto* labels = batch.labels.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < 1000; ++i) {
      if (labels[i] == kTurnStart) text += "<s>";
      if (labels[i] == kTurnEnd) text += "<e>";
      if (labels[i] == kEos) text += "<eos>";
      if (labels[i] >= 0 && labels[i] < 256) text += static_cast<char>(labels[i]);
    }
    return text;
  }

  void use_template(const std::string& source) { chat_template_ = text::ChatTemplate::parse(source, "test.jinja"); }

  std::string error_of(const DataOptions& options, ErrorKind kind) {
    try {
      load(options);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), kind) << error.what();
      EXPECT_THAT(error.what(), Not(HasSubstr("\n")));
      return error.what();
    }
    ADD_FAILURE() << "no error";
    return "";
  }

  TempFolder folder_;
  text::Tokenizer tokenizer_ = make_byte_tokenizer(folder_.path());
  std::optional<text::ChatTemplate> chat_template_ = text::ChatTemplate::parse(kChatMl, "test.jinja");
};

std::vector<int64_t> all_rows(const Dataset& set) {
  std::vector<int64_t> indices(static_cast<size_t>(set.rows()));
  std::iota(indices.begin(), indices.end(), 0);
  return indices;
}

std::vector<int64_t> row(const at::Tensor& tensor, int64_t index) {
  const auto* data = tensor.const_data_ptr<int64_t>() + index * tensor.size(1);
  return {data, data + tensor.size(1)};
}

TEST_F(DatasetTest, TextFileIsOneStreamSplitIntoRows) {
  const auto set = load("a.txt", "abcdefghij", 4);  // 11 tokens with EOS
  EXPECT_EQ(set->rows(), 3);
  EXPECT_EQ(set->stats().tokens, 11);
  EXPECT_EQ(set->stats().label_tokens, 3 + 3 + 2);
  EXPECT_EQ(set->stats().truncated, 0);
  const Batch batch = set->rows(all_rows(*set));
  EXPECT_EQ(row(batch.tokens, 1), (std::vector<int64_t>{'e', 'f', 'g', 'h'}));
  EXPECT_EQ(row(batch.labels, 1), (std::vector<int64_t>{'f', 'g', 'h', -100}));
  EXPECT_EQ(row(batch.tokens, 2), (std::vector<int64_t>{'i', 'j', kEos, kEos}));
  EXPECT_EQ(row(batch.labels, 2), (std::vector<int64_t>{'j', kEos, -100, -100}));
  EXPECT_EQ(row(batch.document_ids, 2), (std::vector<int64_t>{0, 0, 0, kPadding}));
  EXPECT_EQ(batch.tokens_used, 11);
  EXPECT_EQ(batch.label_tokens, 8);
}

TEST_F(DatasetTest, PackedRowsSeparateDocuments) {
  const auto set =
      load("a.jsonl", "{\"text\": \"abc\"}\n\n{\"text\": \"de\"}\n{\"text\": \"fghij\"}\n{\"text\": \"k\"}\n", 8);
  ASSERT_EQ(set->rows(), 2);  // abc+de+. has 7 tokens and fghij. 6; k. goes behind fghij. (first-fit)
  const Batch batch = set->rows(all_rows(*set));
  EXPECT_EQ(row(batch.tokens, 0), (std::vector<int64_t>{'a', 'b', 'c', kEos, 'd', 'e', kEos, kEos}));
  EXPECT_EQ(row(batch.labels, 0), (std::vector<int64_t>{'b', 'c', kEos, -100, 'e', kEos, -100, -100}));
  EXPECT_EQ(row(batch.positions, 0), (std::vector<int64_t>{0, 1, 2, 3, 0, 1, 2, 0}));
  EXPECT_EQ(row(batch.document_ids, 0), (std::vector<int64_t>{0, 0, 0, 0, 1, 1, 1, kPadding}));
  EXPECT_EQ(row(batch.document_ids, 1), (std::vector<int64_t>{0, 0, 0, 0, 0, 0, 1, 1}));
  EXPECT_EQ(set->stats().documents, 4);
}

TEST_F(DatasetTest, WithoutPackingEachSampleHasARow) {
  const auto set = load("a.jsonl", "{\"text\": \"abc\"}\n{\"text\": \"de\"}\n", 8, /*packing=*/false);
  EXPECT_EQ(set->rows(), 2);
}

// Checks many samples of random lengths: no document crosses a row, every label is the next token of its document, and
// every sample is there once.
TEST_F(DatasetTest, PackingSplitsNoDocumentAndLosesNoSample) {
  std::string lines;
  std::multiset<std::string> wanted;
  uint32_t random = 7;
  for (int i = 0; i < 500; ++i) {
    random = random * 1664525 + 1013904223;
    const std::string text = std::to_string(i) + std::string(1 + (random >> 16) % 24, 'x');
    lines += "{\"text\": \"" + text + "\"}\n";
    wanted.insert(text);
  }
  const auto set = load({.sources = {write("a.jsonl", lines)}, .sequence_length = 32});
  const Batch batch = set->rows(all_rows(*set));
  std::multiset<std::string> found;
  for (int64_t r = 0; r < set->rows(); ++r) {
    const auto tokens = row(batch.tokens, r), labels = row(batch.labels, r), positions = row(batch.positions, r),
               documents = row(batch.document_ids, r);
    std::string text;
    for (size_t i = 0; i < tokens.size(); ++i) {
      if (documents[i] == kPadding) {
        EXPECT_EQ(labels[i], -100);
        continue;
      }
      const bool ends = i + 1 == tokens.size() || documents[i + 1] != documents[i];
      const bool begins = i == 0 || documents[i - 1] != documents[i];
      EXPECT_EQ(positions[i], begins ? 0 : positions[i - 1] + 1);
      EXPECT_EQ(labels[i], ends ? -100 : tokens[i + 1]);
      EXPECT_EQ(ends, tokens[i] == kEos);
      if (!ends) text += static_cast<char>(tokens[i]);
      if (ends) found.insert(std::exchange(text, ""));
    }
  }
  EXPECT_EQ(found, wanted);
  EXPECT_EQ(batch.label_tokens, set->stats().label_tokens);
  EXPECT_GT(static_cast<double>(set->stats().tokens), 0.9 * static_cast<double>(set->rows() * 32))
      << "first-fit leaves little padding";
}

TEST_F(DatasetTest, PackingIsAFunctionOfDataSeedAndLength) {
  std::string lines;
  for (int i = 0; i < 100; ++i) {
    lines += "{\"text\": \"" + std::string(static_cast<size_t>(1 + i % 9), 'a') + std::to_string(i) + "\"}\n";
  }
  const DataOptions options{.sources = {write("a.jsonl", lines)}, .sequence_length = 32, .seed = 1};
  DataOptions other_seed = options, other_length = options;
  other_seed.seed = 2;
  other_length.sequence_length = 31;
  EXPECT_EQ(load(options)->fingerprint(), load(options)->fingerprint());
  EXPECT_NE(load(options)->fingerprint(), load(other_seed)->fingerprint());
  EXPECT_NE(load(options)->fingerprint(), load(other_length)->fingerprint());
}

// Checkpoints store the fingerprint, so it must not change. The fingerprint is the hash of the arrays that an earlier
// version stored; the hash of each array is the seed of the next hash.
TEST_F(DatasetTest, FingerprintMatchesEarlierCheckpoints) {
  const auto path = write("a.jsonl", "{\"text\": \"abc\"}\n{\"prompt\": \"d\", \"completion\": \"e\"}\n");
  const auto set = load({.sources = {path}, .format = "jsonl", .sequence_length = 8, .shuffle = false});
  EXPECT_EQ(set->rows(), 1);
  const int32_t tokens[] = {'a', 'b', 'c', kEos, 'd', 'e', kEos};
  const uint8_t learnt[] = {1, 1, 1, 1, 0, 1, 1};
  const uint64_t sample_begin[] = {0, 4, 7}, row_samples[] = {0, 1}, row_begin[] = {0, 2};
  const int64_t sequence_length = 8;
  XXH64_hash_t hash = XXH3_64bits(tokens, sizeof(tokens));
  const auto include = [&](const void* data, size_t bytes) { hash = XXH3_64bits_withSeed(data, bytes, hash); };
  include(learnt, sizeof(learnt));
  include(sample_begin, sizeof(sample_begin));
  include(row_samples, sizeof(row_samples));
  include(row_begin, sizeof(row_begin));
  include(&sequence_length, sizeof(sequence_length));
  EXPECT_EQ(set->fingerprint(), fmt::format("{:016x}", hash));
}

TEST_F(DatasetTest, CompletionTokensHaveLabelsAndPromptTokensHaveNone) {
  EXPECT_EQ(learnt(R"({"prompt": "What? ", "completion": "That."})"), "That.<eos>");
  EXPECT_EQ(learnt(R"({"prompt": "", "completion": "That."})"), "hat.<eos>");  // no token predicts the first token
}

TEST_F(DatasetTest, AssistantTurnsHaveLabelsIncludingTheEndOfTurn) {
  EXPECT_EQ(
      learnt(
          R"({"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}, )"
          R"({"role": "assistant", "content": "A"}, {"role": "user", "content": "R"}, {"role": "assistant", "content": "Bö"}]})"),
      "A<e>Bö<e>");
}

TEST_F(DatasetTest, EqualContentOfUserAndAssistantIsDistinguished) {
  EXPECT_EQ(
      learnt(
          R"({"messages": [{"role": "user", "content": "yes"}, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "yes"}]})"),
      "yes<e>");
}

TEST_F(DatasetTest, GenerationBlocksSelectTheLabelTokens) {
  use_template(
      "{% for m in messages %}{% if m.role == 'assistant' %}[{% generation %}{{ m.content }}!{% endgeneration %}]{% "
      "else %}{{ m.content }}{% endif %}{% endfor %}");
  EXPECT_EQ(
      learnt(
          R"({"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}, {"role": "assistant", "content": "B"}]})"),
      "A!B!");
}

TEST_F(DatasetTest, TemplatesThatRenderTheLastTurnDifferentlyAreSupported) {  // as Qwen3 and Llama 3 do
  use_template(
      "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last and m.role == 'assistant' %}<t></t>{% endif "
      "%}{{ m.content }}<|im_end|>\n{% endfor %}"
      "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}");
  const std::string record =
      R"({"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}, {"role": "user", "content": "R"}, {"role": "assistant", "content": "B"}]})";
  EXPECT_EQ(learnt(record), "A<e><t></t>B<e>");
  use_template(
      "{% for m in messages %}<|im_start|>{{ m.role }}|{{ m.content | trim }}<|im_end|>{% endfor "
      "%}<|im_start|>assistant|");
  EXPECT_EQ(learnt(record), "A<e>B<e>");
}

TEST_F(DatasetTest, ToolCallsOfTheAssistantHaveLabels) {
  use_template(
      "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}<c>{{ "
      "c.name }}</c>{% endfor %}<|im_end|>\n{% endfor %}"
      "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}");
  EXPECT_EQ(
      learnt(
          R"({"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A", "tool_calls": [{"name": "f"}]}, {"role": "tool", "content": "R"}]})"),
      "A<c>f</c><e>");
}

TEST_F(DatasetTest, OverlongSamplesAreTruncatedDroppedOrRefused) {
  const std::string path = write("a.jsonl", "{\"text\": \"abcdefgh\"}\n{\"text\": \"abc\"}\n");
  DataOptions options{.sources = {path}, .sequence_length = 6, .packing = false, .shuffle = false};
  const auto cut = load(options);
  EXPECT_EQ(cut->stats().truncated, 1);
  EXPECT_EQ(cut->stats().documents, 2);
  EXPECT_EQ(cut->stats().label_tokens, 5 + 3);
  options.overlong = "drop";
  const auto dropped = load(options);
  EXPECT_EQ(dropped->stats().dropped, 1);
  EXPECT_EQ(dropped->rows(), 1);
  options.overlong = "error";
  EXPECT_THAT(error_of(options, ErrorKind::kFormat),
              AllOf(HasSubstr("a.jsonl line 1"), HasSubstr("9 tokens"), HasSubstr("a row has 6")));
}

TEST_F(DatasetTest, SamplesWithoutLabelsAreCountedAndOmitted) {
  const auto path = write("a.jsonl", R"({"messages": [{"role": "user", "content": "Q"}]})"
                                     "\n{\"text\": \"ab\"}\n");
  const auto set = load({.sources = {path}, .format = "jsonl", .sequence_length = 64});
  EXPECT_EQ(set->stats().unlabelled, 1);
  EXPECT_EQ(set->stats().documents, 1);
}

TEST_F(DatasetTest, SamplesWhoseLabelsWereTruncatedAreReported) {
  const std::string question(40, 'q');
  const auto chat = [&](const std::string& words) {
    return fmt::format(
        R"({{"messages": [{{"role": "user", "content": "{}"}}, {{"role": "assistant", "content": "A"}}]}})"
        "\n",
        words);
  };
  const auto path =
      write("a.jsonl", chat(question) + chat("q") + R"({"messages": [{"role": "user", "content": "Q"}]})");
  const DataOptions options{.sources = {path}, .sequence_length = 32};
  const auto stats = load(options)->stats();
  EXPECT_EQ(stats.truncated, 1);
  EXPECT_EQ(stats.unlabelled, 2);
  EXPECT_EQ(stats.cut_away, 1);
  EXPECT_EQ(stats.describe_dropped(32),
            "1 cut to data.sequence_length 32, 2 left out without anything to learn (1 of them because of the cut)");
  const auto text =
      error_of({.sources = {write("b.jsonl", chat(question))}, .sequence_length = 16}, ErrorKind::kFormat);
  EXPECT_THAT(text, AllOf(HasSubstr("b.jsonl: no sample is left to train on: 1 cut to data.sequence_length 16, 1 left "
                                    "out without anything to learn (1 of them because of the cut)"),
                          HasSubstr("Raise data.sequence_length")));
  const auto silent = write("c.jsonl", R"({"messages": [{"role": "user", "content": "Q"}]})");
  EXPECT_THAT(error_of({.sources = {silent}}, ErrorKind::kFormat),
              AllOf(HasSubstr("1 left out without anything to learn. Give it other files"), Not(HasSubstr("Raise"))));
  EXPECT_EQ(DataStats{.dropped = 3}.describe_dropped(8), "3 longer than data.sequence_length 8 dropped");
  EXPECT_EQ(DataStats{.documents = 3}.describe_dropped(8), "");
}

TEST_F(DatasetTest, PaddingRowsHaveNoTokensOrLabels) {
  const auto set = load("a.jsonl", "{\"text\": \"ab\"}\n", 8);
  const std::array<int64_t, 3> rows = {kPaddingRow, 0, kPaddingRow};
  const auto batch = set->rows(rows), alone = set->rows(std::span(rows).subspan(1, 1));
  EXPECT_EQ(batch.label_tokens, alone.label_tokens);
  EXPECT_EQ(batch.tokens_used, alone.tokens_used);
  EXPECT_TRUE(batch.tokens[1].equal(alone.tokens[0]));
  EXPECT_FALSE(batch.document_ids[0].ge(0).any().item<bool>());
  const std::array<int64_t, 1> wrong = {-2};
  EXPECT_THROW(set->rows(wrong), Error);
}

TEST_F(DatasetTest, FormatIsChosenByNameOrFirstCharacter) {
  const std::string line = "{\"text\": \"ab\"}\n";
  EXPECT_EQ(load({.sources = {write("a.jsonl", line)}, .sequence_length = 64})->stats().tokens, 3);
  EXPECT_EQ(load({.sources = {write("a.txt", line)}, .sequence_length = 64})->stats().tokens, 16);
  EXPECT_EQ(load({.sources = {write("a.data", line)}, .sequence_length = 64})->stats().tokens, 3);
  EXPECT_EQ(load({.sources = {write("b.data", "plain")}, .sequence_length = 64})->stats().tokens, 6);
  EXPECT_EQ(load({.sources = {write("a.jsonl", line)}, .format = "text", .sequence_length = 64})->stats().tokens, 16);
}

TEST_F(DatasetTest, CorruptLinesNameFileLineAndByte) {
  const auto error = [&](const std::string& content, const std::string& format = "auto") {
    return error_of({.sources = {write("bad.jsonl", content)}, .format = format}, ErrorKind::kFormat);
  };
  EXPECT_THAT(error("{\"text\": \"a\"}\n{\"text\": oops}\n"), HasSubstr("bad.jsonl line 2: byte 10: no valid JSON"));
  EXPECT_THAT(error("{\"text\": \"a\"} trailing\n"), HasSubstr("line 1: byte"));
  EXPECT_THAT(error("[1]\n"), HasSubstr("wanted a JSON object"));
  EXPECT_THAT(error("{\"txt\": \"a\"}\n"),
              AllOf(HasSubstr("'txt'"), HasSubstr("'prompt' and 'completion', 'instruction' and 'output', or 'text'")));
  EXPECT_THAT(error("{\"text\": 5}\n"), HasSubstr("'text' is number"));
  EXPECT_THAT(error("{\"prompt\": \"a\", \"completion\": null}\n"), HasSubstr("'completion' (null)"));
  EXPECT_THAT(error("{\"messages\": []}\n"), HasSubstr("empty"));
  EXPECT_THAT(error("{\"messages\": [{\"content\": \"a\"}]}\n"), HasSubstr("'role'"));
  EXPECT_THAT(error("{\"text\": \"a\"}\n", "chat"), HasSubstr("wanted 'messages'"));
  EXPECT_THAT(error("{\"text\": " + std::string(100000, '[') + "\n"), HasSubstr("nested deeper"));
}

TEST_F(DatasetTest, WideRecordsTakeLinearTime) {
  std::string wide = "{\"text\": \"a\"";
  for (int i = 0; i < 300'000; ++i) wide += ", \"key " + std::to_string(i) + "\": 1";  // quadratic: minutes
  EXPECT_EQ(load({.sources = {write("wide.jsonl", wide + "}\n")}, .sequence_length = 8})->stats().tokens, 2);
}

TEST_F(DatasetTest, ErrorsNameUnsupportedFileFormats) {
  const auto error = [&](const std::string& content, const char* name, ErrorKind kind = ErrorKind::kFormat) {
    return error_of({.sources = {write(name, content)}}, kind);
  };
  const std::string zeros(40, '\0'), rest = zeros + "\xff\xfe" + zeros;
  EXPECT_THAT(error("\x28\xb5\x2f\xfd" + rest, "a.jsonl.zst"), HasSubstr("compressed with zstd. Unpack it"));
  EXPECT_THAT(error("ARROW1" + rest, "a.arrow"), HasSubstr("an Arrow file. Write it as Parquet"));
  EXPECT_THAT(error("PK\x03\x04" + rest, "a.jsonl"), HasSubstr("a zip archive"));
  EXPECT_THAT(error("{\n  \"text\": \"a\"\n}\n", "one.json"), HasSubstr("one object over several lines"));
  EXPECT_THAT(error("question,answer\na,b\n", "a.csv", ErrorKind::kConfig), HasSubstr("data.format=text"));
  EXPECT_GT(load({.sources = {write("a.csv", "a,b\n")}, .format = "text", .sequence_length = 8})->stats().tokens, 0);
  EXPECT_GT(load({.sources = {write("b.txt", "BZh is no bzip2, nor is PK.")}, .sequence_length = 8})->stats().tokens,
            0);
  EXPECT_THAT(error_of({.sources = {std::string("acme/chats")}}, ErrorKind::kIo),
              HasSubstr("'hf download --repo-type dataset acme/chats'"));
  EXPECT_THAT(error_of({.sources = {std::string("/no/such/chats")}}, ErrorKind::kIo),
              ::testing::Not(HasSubstr("hf download")));
}

TEST_F(DatasetTest, TextThatIsNotUtf8IsRefusedWithItsEncodingAndByte) {
  const auto error = [&](const std::string& content, const char* name = "a.txt") {
    return error_of({.sources = {write(name, content)}}, ErrorKind::kFormat);
  };
  const auto wide = [](std::string_view text, bool little) {
    std::string out;
    for (const char c : text) out += little ? std::string{c, '\0'} : std::string{'\0', c};
    return out;
  };
  EXPECT_THAT(error("\xff\xfe" + wide("In the beginning", true)),
              AllOf(HasSubstr("a.txt: byte 0 is 0xff"), HasSubstr("seems to be UTF-16"), HasSubstr("iconv -f UTF-16")));
  EXPECT_THAT(error("\xfe\xff" + wide("In the beginning", false)), HasSubstr("seems to be UTF-16."));
  EXPECT_THAT(error(wide("In the beginning", true)),
              AllOf(HasSubstr("byte 1 is 0x00"), HasSubstr("iconv -f UTF-16LE")));
  EXPECT_THAT(error(wide("{\"text\": \"a\"}\n", false), "a.jsonl"),
              AllOf(HasSubstr("byte 0 is 0x00"), HasSubstr("iconv -f UTF-16BE")));
  EXPECT_THAT(error("caf\xe9 au lait"), AllOf(HasSubstr("byte 3 is 0xe9"), HasSubstr("Latin-1")));
  EXPECT_THAT(error("{\"text\": \"caf\xe9 au lait\"}\n", "a.jsonl"), HasSubstr("byte 13 is 0xe9"));
  EXPECT_THAT(error("na\u00efve caf\xc3"), AllOf(HasSubstr("byte 10 is 0xc3"), HasSubstr("cut off")));
  EXPECT_EQ(load({.sources = {write("b.txt",
                                    "\xef\xbb\xbf"
                                    "caf\u00e9")},
                  .sequence_length = 8})
                ->stats()
                .tokens,
            6);
}

TEST_F(DatasetTest, EmptyPromptAndCompletionAreASampleWithoutLabels) {
  EXPECT_THAT(
      error_of({.sources = {write("a.jsonl", "{\"prompt\": \"\", \"completion\": \"\"}\n")}}, ErrorKind::kFormat),
      HasSubstr("1 left out without anything to learn"));
}

TEST_F(DatasetTest, TokensBeyondTheVocabularyAreRefusedWithTheRecord) {
  const std::string path = write("a.jsonl", "{\"text\": \"a\"}\n{\"text\": \"b<|im_end|>\"}\n");
  EXPECT_THAT(error_of({.sources = {path}, .vocab_size = kTurnEnd}, ErrorKind::kConfig),
              AllOf(HasSubstr("a.jsonl line 1"), HasSubstr("token 258 ('<eos>')"), HasSubstr("the model knows 257")));
  EXPECT_EQ(load({.sources = {path}, .sequence_length = 8, .vocab_size = kEos + 1})->stats().documents, 2);
}

TEST_F(DatasetTest, RefusesInvalidOptionsAndFiles) {
  const std::string path = write("a.txt", "abc");
  EXPECT_THAT(error_of({}, ErrorKind::kConfig), HasSubstr("no files"));
  EXPECT_THAT(error_of({.sources = {path}, .format = "csv"}, ErrorKind::kConfig),
              HasSubstr("auto | text | jsonl | chat"));
  EXPECT_THAT(error_of({.sources = {path}, .overlong = "cut"}, ErrorKind::kConfig),
              HasSubstr("truncate | drop | error"));
  EXPECT_THAT(error_of({.sources = {path}, .sequence_length = 1}, ErrorKind::kConfig), HasSubstr("sequence_length"));
  EXPECT_THAT(error_of({.sources = {path + "x"}}, ErrorKind::kIo), HasSubstr("a.txtx"));
  EXPECT_THAT(error_of({.sources = {write("empty.txt", " \n")}}, ErrorKind::kFormat), HasSubstr("empty"));
  EXPECT_THAT(error_of({.sources = {write("empty.jsonl", "")}}, ErrorKind::kFormat), HasSubstr("empty"));
  const std::string chat =
      write("chat.jsonl", R"({"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]})");
  use_template("{{ raise_exception('never') }}");
  EXPECT_THAT(error_of({.sources = {chat}}, ErrorKind::kFormat),
              AllOf(HasSubstr("chat.jsonl line 1"), HasSubstr("never")));
  use_template("{{ messages | length }}");
  EXPECT_THAT(error_of({.sources = {chat}}, ErrorKind::kFormat), HasSubstr("{% generation %}"));
  chat_template_.reset();
  EXPECT_THAT(error_of({.sources = {chat}}, ErrorKind::kConfig), HasSubstr("no chat template"));
}

}  // namespace
}  // namespace tessera::data
