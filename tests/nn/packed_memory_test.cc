// Tests that attention over packed rows needs memory in proportion to their tokens.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/nn/attention/attention_pattern.h"
#include "tests/support/peak_memory.h"

namespace tessera::nn {
namespace {

constexpr int64_t kHeads = 2, kHeadSize = 8;

// Returns the peak of bytes in forward and backward of attention over documents of 256 tokens.
int64_t packed_peak(int64_t tokens, int64_t window, const AttentionScoreOptions& scores) {
  const auto ids = at::arange(tokens, at::kLong).floor_divide_(256).unsqueeze(0);
  const auto x = at::randn({1, tokens, kHeads, kHeadSize}).transpose(1, 2).set_requires_grad(true);
  return testing::peak_bytes_of([&] {
    const auto pattern =
        attention_pattern({.tokens = tokens, .document_ids = ids, .sliding_window = window}, x.options());
    attend(x, x, x, pattern, scores).sum().backward();
  });
}

TEST(PackedMemory, GrowsLinearlyFrom16kTo32kTokens) {
  for (const int64_t window : {0, 100}) {
    const int64_t half = packed_peak(16384, window, {}), all = packed_peak(32768, window, {});
    EXPECT_GE(half, 16384 * kHeads * kHeadSize * 4) << "the recorder sees nothing";
    EXPECT_LE(all, 2.2 * static_cast<double>(half)) << "window " << window;
    EXPECT_LE(all, int64_t{32768} * 32768 / 8) << "far from a number a pair";
  }
}

// Returns the number of pairs of a query and a key whose score attention computes.
int64_t pairs_of(const AttentionPattern& pattern) {
  int64_t sum = 0;
  for (const auto& piece : pattern.pieces) {
    if (piece.kind == AttentionPattern::Kind::kPadding) continue;
    sum += piece.tokens * (piece.tokens + piece.earlier * pattern.window_piece);
  }
  return sum;
}

TEST(PackedMemory, ScoresAreComputedOnlyInsideDocumentsAndWindows) {
  constexpr int64_t kTokens = 32768;
  const auto documents = at::arange(kTokens, at::kLong).floor_divide_(512).unsqueeze(0);
  auto padded = documents.clone();
  padded.narrow(1, kTokens / 2, kTokens / 2).fill_(-1);
  const auto pairs = [](const at::Tensor& ids, int64_t window) {
    return pairs_of(attention_pattern({.tokens = kTokens, .document_ids = ids, .sliding_window = window}, at::kFloat));
  };
  EXPECT_EQ(pairs(documents, 0), 64 * 512 * 512);
  EXPECT_EQ(pairs(padded, 0), 32 * 512 * 512);
  EXPECT_LE(pairs(documents, 128), kTokens * 2 * 128);
  EXPECT_LE(pairs({}, 1024), kTokens * 2 * 1024);
}

}  // namespace
}  // namespace tessera::nn
