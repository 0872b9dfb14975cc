// Tests of the data loader: shuffling, epochs, batches, state for resume and errors.
#include "tessera/data/loader/loader.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "tessera/base/error.h"
#include "tessera/data/rows/shuffle.h"
#include "tests/data/byte_tokenizer.h"
#include "tests/support/temp_folder.h"

namespace tessera::data {
namespace {

using tessera::testing::TempFolder;
using ::testing::HasSubstr;

TEST(PermutedIndex, IsAPermutationOfEverySize) {
  for (const int64_t size : {1, 2, 3, 4, 5, 7, 16, 17, 63, 100, 1000, 4097}) {
    std::set<int64_t> seen;
    for (int64_t i = 0; i < size; ++i) {
      const int64_t value = permuted_index(i, size, 42, 3);
      EXPECT_TRUE(value >= 0 && value < size);
      seen.insert(value);
    }
    EXPECT_EQ(static_cast<int64_t>(seen.size()), size);
  }
}

TEST(PermutedIndex, DependsOnSeedAndEpoch) {
  int same = 0, same_epoch = 0, same_seed = 0;
  for (int64_t i = 0; i < 1000; ++i) {
    same += permuted_index(i, 1000, 42, 0) == i;
    same_epoch += permuted_index(i, 1000, 42, 0) == permuted_index(i, 1000, 42, 1);
    same_seed += permuted_index(i, 1000, 42, 0) == permuted_index(i, 1000, 43, 0);
  }
  EXPECT_LT(same, 10);
  EXPECT_LT(same_epoch, 10);
  EXPECT_LT(same_seed, 10);
}

class LoaderTest : public ::testing::Test {
 protected:
  std::shared_ptr<const Dataset> make(int rows, int64_t length = 8) {
    std::ofstream file(folder_ / "data.jsonl");
    for (int i = 0; i < rows; ++i) file << "{\"text\": \"" << i << "\"}\n";
    file.close();
    const auto tokenizer = make_byte_tokenizer(folder_.path());
    return Dataset::load(
        {.sources = {(folder_ / "data.jsonl").string()}, .sequence_length = length, .packing = false, .shuffle = false},
        tokenizer, std::nullopt);
  }

  // The tokens of the next `steps` global batches, assembled from the slices of `ranks` loaders.
  static std::vector<at::Tensor> batches(const std::shared_ptr<const Dataset>& set, int ranks, int steps,
                                         int64_t global_batch, const nlohmann::json& state = {}) {
    std::vector<DataLoader> loaders;
    for (int rank = 0; rank < ranks; ++rank) {
      loaders.emplace_back(set, 42, true);
      if (!state.is_null()) loaders.back().load_state(state);
    }
    std::vector<at::Tensor> result;
    for (int step = 0; step < steps; ++step) {
      std::vector<at::Tensor> parts;
      const int64_t rows = global_batch / ranks;
      for (int rank = 0; rank < ranks; ++rank) {
        parts.push_back(loaders[static_cast<size_t>(rank)].next_global_slice(global_batch, rank * rows, rows).tokens);
      }
      result.push_back(at::cat(parts));
    }
    return result;
  }

  static void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << "batch " << i;
  }

  TempFolder folder_;
};

TEST_F(LoaderTest, OrderDoesNotDependOnTheNumberOfRanks) {
  const auto set = make(53);
  const auto one = batches(set, 1, 20, 12);
  for (const int ranks : {2, 3, 4, 6, 12}) expect_equal(one, batches(set, ranks, 20, 12));
}

TEST_F(LoaderTest, EveryEpochHasEveryRowOnceAndBatchesSpanEpochs) {
  const auto set = make(10);
  DataLoader loader(set, 42, true);
  std::vector<int64_t> order;
  for (int64_t sample = 0; sample < 30; ++sample) order.push_back(loader.row_of(sample));
  for (int epoch = 0; epoch < 3; ++epoch) {
    EXPECT_EQ(std::set<int64_t>(order.begin() + epoch * 10, order.begin() + (epoch + 1) * 10).size(), 10u);
  }
  EXPECT_NE(std::vector<int64_t>(order.begin(), order.begin() + 10),
            std::vector<int64_t>(order.begin() + 10, order.begin() + 20));
  for (int step = 0; step < 7; ++step) {  // batches of 4 from 10 rows, so the third batch spans two epochs
    const auto tokens = loader.next_global_slice(4, 0, 4).tokens;
    for (int64_t i = 0; i < 4; ++i) {
      const int64_t wanted = order[static_cast<size_t>(step * 4 + i)];
      EXPECT_EQ(tokens.const_data_ptr<int64_t>()[i * 8], '0' + wanted);
    }
  }
  EXPECT_EQ(loader.next_sample(), 28);
  EXPECT_EQ(loader.epoch(), 2);
}

TEST_F(LoaderTest, WithoutShuffleRowsComeInOrder) {
  DataLoader loader(make(5), 42, false);
  for (int64_t sample = 0; sample < 12; ++sample) EXPECT_EQ(loader.row_of(sample), sample % 5);
}

TEST_F(LoaderTest, ABatchMayBeLargerThanTheDataSet) {
  DataLoader loader(make(3), 42, true);
  EXPECT_EQ(loader.next_global_slice(8, 0, 8).tokens.size(0), 8);
}

TEST_F(LoaderTest, TheLastBatchIsPaddedAndAdvancesByItsRealRows) {
  const auto set = make(10);
  const auto whole = batches(set, 1, 3, 4);
  for (const int ranks : {1, 2, 4}) {
    int64_t tokens = 0, labels = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      DataLoader loader(set, 42, true, 10);
      const int64_t rows = 4 / ranks;
      loader.advance(4);
      loader.advance(4);
      EXPECT_EQ(loader.samples_left(), 2);
      const auto last = loader.next_global_slice(4, rank * rows, rows);
      EXPECT_EQ(last.tokens.size(0), rows);
      tokens += last.tokens_used;
      labels += last.label_tokens;
      for (int64_t row = 0; row < rows; ++row) {
        const bool real = rank * rows + row < 2;
        EXPECT_EQ(at::equal(last.tokens[row], whole[2][rank * rows + row]), real);
        EXPECT_EQ(last.document_ids[row].ge(0).any().item<bool>(), real);
      }
      EXPECT_EQ(loader.samples_left(), 0);
      EXPECT_EQ(loader.next_sample(), 10);
      EXPECT_EQ(loader.state().at("next_sample"), 10);
      // A run of two epochs continues with the first row of the second epoch.
      DataLoader longer(set, 42, true, 20);
      longer.load_state(loader.state());
      EXPECT_EQ(longer.samples_left(), 10);
      EXPECT_EQ(longer.next_global_slice(1, 0, 1).tokens.const_data_ptr<int64_t>()[0], '0' + longer.row_of(10));
    }
    EXPECT_EQ(tokens, 2 * 2) << "a digit and the end";
    EXPECT_EQ(labels, 2);
  }
}

TEST_F(LoaderTest, ResumeIsExactOnAnyNumberOfRanks) {
  const auto set = make(17);
  const auto whole = batches(set, 2, 9, 4);
  DataLoader loader(set, 42, true);
  loader.next_global_slice(4, 2, 2);
  loader.advance(4);
  loader.advance(4);
  loader.advance(4);
  const auto saved = nlohmann::json::parse(loader.state().dump());
  for (const int ranks : {1, 2, 4}) expect_equal({whole.begin() + 4, whole.end()}, batches(set, ranks, 5, 4, saved));
}

TEST_F(LoaderTest, RefusesTheStateOfOtherData) {
  const auto set = make(5);
  const nlohmann::json state = DataLoader(set, 42, true).state();
  const auto error = [](DataLoader loader, const nlohmann::json& given, ErrorKind kind) -> std::string {
    try {
      loader.load_state(given);
    } catch (const Error& raised) {
      EXPECT_EQ(raised.kind(), kind);
      return raised.what();
    }
    ADD_FAILURE() << "no error for " << given;
    return "";
  };
  EXPECT_THAT(error(DataLoader(make(6), 42, true), state, ErrorKind::kConfig),
              HasSubstr("differ from the data of the checkpoint"));
  EXPECT_THAT(error(DataLoader(make(5, 9), 42, true), state, ErrorKind::kConfig),
              HasSubstr("differ from the data of the checkpoint"));
  EXPECT_THAT(error(DataLoader(set, 43, true), state, ErrorKind::kConfig), HasSubstr("seed"));
  EXPECT_THAT(error(DataLoader(set, 42, false), state, ErrorKind::kConfig), HasSubstr("shuffle"));
  nlohmann::json damaged = state;
  damaged["next_sample"] = -4;
  EXPECT_THAT(error(DataLoader(set, 42, true), damaged, ErrorKind::kFormat), HasSubstr("-4"));
  for (const char* text : {"{}", "[]", "5", R"({"next_sample": "x"})"}) {
    EXPECT_THAT(error(DataLoader(set, 42, true), nlohmann::json::parse(text), ErrorKind::kFormat),
                HasSubstr("damaged"));
  }
}

TEST_F(LoaderTest, RefusesASliceOutsideOfTheBatch) {
  DataLoader loader(make(5), 42, true);
  EXPECT_THROW(loader.next_global_slice(4, 2, 3), Error);
  EXPECT_THROW(loader.next_global_slice(4, -1, 2), Error);
  EXPECT_THROW(loader.next_global_slice(4, 0, 0), Error);
  EXPECT_EQ(loader.next_sample(), 0);
}

}  // namespace
}  // namespace tessera::data
