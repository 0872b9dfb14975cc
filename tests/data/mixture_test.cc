// Tests of mixtures of data sources: the order of draws, the share of each source, and resume.
#include "tessera/data/loader/mixture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "tessera/base/error.h"
#include "tessera/data/loader/loader.h"
#include "tests/data/byte_tokenizer.h"
#include "tests/support/temp_folder.h"

namespace tessera::data {
namespace {

using tessera::testing::TempFolder;
using ::testing::ElementsAre;

TEST(Mixture, DrawsFromTheSourceThatIsFurthestBehind) {
  Mixture mixture({3, 1});
  std::vector<size_t> order;
  for (int64_t g = 0; g < 8; ++g) order.push_back(mixture.at(g).source);
  EXPECT_THAT(order, ElementsAre(0, 0, 1, 0, 0, 0, 1, 0));
}

TEST(Mixture, EachSourceKeepsItsShareOfTheDraws) {
  const std::vector<double> weights = {0.5, 7, 2.25, 1e-3};
  Mixture mixture(weights);
  std::vector<int64_t> drawn(weights.size(), 0);
  for (int64_t g = 0; g < 20'000; ++g) {
    const auto draw = mixture.at(g);
    EXPECT_EQ(draw.index, drawn[draw.source]++);
    for (size_t i = 0; i < weights.size(); ++i) {
      ASSERT_LT(std::abs(static_cast<double>(drawn[i]) - weights[i] / 9.751 * static_cast<double>(g + 1)), 3) << g;
    }
  }
}

TEST(Mixture, SamplesCanBeDrawnInAnyOrder) {
  Mixture one({2, 3, 5}), other({2, 3, 5});
  std::vector<std::pair<size_t, int64_t>> order;
  for (int64_t g = 0; g < 100; ++g) order.emplace_back(one.at(g).source, one.at(g).index);
  for (const int64_t g : {99, 3, 3, 4, 50, 0}) {
    const auto draw = other.at(g);
    EXPECT_EQ(std::pair(draw.source, draw.index), order[static_cast<size_t>(g)]) << g;
  }
}

class MixtureLoaderTest : public ::testing::Test {
 protected:
  std::shared_ptr<const Dataset> make(double first, double second) {
    const auto file = [&](const char* name, char letter, int rows) {
      std::ofstream out(folder_ / name);
      for (int i = 0; i < rows; ++i) out << "{\"text\": \"" << letter << i << "\"}\n";
      return (folder_ / name).string();
    };
    return Dataset::load(
        {.sources = {{file("a.jsonl", 'a', 4), {.weight = first}}, {file("b.jsonl", 'b', 30), {.weight = second}}},
         .sequence_length = 8,
         .packing = false,
         .quiet = true},
        make_byte_tokenizer(folder_.path()), std::nullopt);
  }
  static std::string row_text(const Batch& batch, int64_t row) {
    std::string text;
    for (const auto* token = batch.tokens.const_data_ptr<int64_t>() + row * 8; *token != kEos; ++token) {
      text += static_cast<char>(*token);
    }
    return text;
  }
  TempFolder folder_;
};

TEST_F(MixtureLoaderTest, EachSourceHasItsOwnEpochsOnAnyNumberOfRanks) {
  const auto set = make(1, 1);
  EXPECT_EQ(set->rows(), 34);
  std::vector<std::string> order;
  DataLoader loader(set, 42, true);
  for (int step = 0; step < 20; ++step) {
    const auto batch = loader.next_global_slice(4, 0, 4);
    for (int64_t row = 0; row < 4; ++row) order.push_back(row_text(batch, row));
  }
  std::vector<std::string> small, large;
  for (const auto& text : order) (text[0] == 'a' ? small : large).push_back(text);
  EXPECT_EQ(small.size(), 40u);
  for (size_t epoch = 0; epoch < 10; ++epoch) {
    EXPECT_EQ(std::set<std::string>(small.begin() + static_cast<long>(epoch) * 4,
                                    small.begin() + static_cast<long>(epoch) * 4 + 4)
                  .size(),
              4u);
  }
  EXPECT_EQ(std::set<std::string>(large.begin(), large.begin() + 30).size(), 30u);
  for (const int ranks : {2, 4}) {
    std::vector<DataLoader> loaders(static_cast<size_t>(ranks), DataLoader(set, 42, true));
    const int64_t each = 4 / ranks;
    for (size_t step = 0; step < 20; ++step) {
      for (int rank = 0; rank < ranks; ++rank) {
        const auto batch = loaders[static_cast<size_t>(rank)].next_global_slice(4, rank * each, each);
        for (int64_t row = 0; row < each; ++row) {
          EXPECT_EQ(row_text(batch, row), order[step * 4 + static_cast<size_t>(rank * each + row)]);
        }
      }
    }
  }
  DataLoader resumed(set, 42, true);
  DataLoader stopped(set, 42, true);
  for (int step = 0; step < 7; ++step) stopped.advance(4);
  resumed.load_state(nlohmann::json::parse(stopped.state().dump()));
  EXPECT_EQ(row_text(resumed.next_global_slice(4, 0, 4), 2), order[7 * 4 + 2]);
}

TEST_F(MixtureLoaderTest, ResumeRefusesOtherWeights) {
  EXPECT_NE(make(1, 1)->fingerprint(), make(1, 2)->fingerprint());
  EXPECT_EQ(make(1, 2)->fingerprint(), make(1, 2)->fingerprint());
  DataLoader loader(make(1, 1), 42, true);
  EXPECT_THROW(loader.load_state(DataLoader(make(2, 1), 42, true).state()), Error);
}

}  // namespace
}  // namespace tessera::data
