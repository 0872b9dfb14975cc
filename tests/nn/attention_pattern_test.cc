// Tests attention by documents, windows and padding (AttentionPattern), and scaled or capped scores, against the
// softmax of all masked scores.
#include "tessera/nn/attention/attention_pattern.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/base/error.h"
#include "tests/support/largest_allocation.h"

namespace tessera::nn {
namespace {

using Kind = AttentionPattern::Kind;

at::Tensor ids_of(const std::vector<std::vector<int64_t>>& rows) {
  std::vector<at::Tensor> tensors;
  for (const auto& row : rows) tensors.push_back(at::tensor(row, at::kLong));
  return at::stack(tensors);
}

// Returns the softmax of all scores times the values. The scores of invisible keys are minus infinity.
at::Tensor masked_form(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& ids,
                       int64_t window, const AttentionScoreOptions& how = {}) {
  const int64_t tokens = q.size(2), total = k.size(2), groups = q.size(1) / k.size(1);
  const auto query = at::arange(total - tokens, total).unsqueeze(1), key = at::arange(total).unsqueeze(0);
  auto seen = key.le(query);
  if (window > 0) seen = seen.logical_and(key.gt(query - window));
  seen = seen.view({1, 1, tokens, total});
  if (ids.defined()) seen = seen.logical_and(ids.unsqueeze(2).eq(ids.unsqueeze(1)).unsqueeze(1));
  const double scale = how.scale > 0 ? how.scale : 1 / std::sqrt(static_cast<double>(q.size(3)));
  auto scores = q.matmul(k.repeat_interleave(groups, 1).transpose(2, 3)) * scale;
  if (how.softcap > 0) scores = (scores / how.softcap).tanh() * how.softcap;
  return at::softmax(scores.masked_fill(seen.logical_not(), -1e30), -1).matmul(v.repeat_interleave(groups, 1));
}

// Rows of two documents and of one document, with padding at the end, in the middle, or none; one document is longer
// than several pieces.
std::vector<std::pair<at::Tensor, int64_t>> layouts() {
  std::vector<int64_t> three(300, 2), one(300, 7), padded(300, 0), nothing(300, -1);
  std::fill(three.begin() + 40, three.begin() + 41, 0);
  std::fill(three.begin() + 41, three.begin() + 280, 5);
  std::fill(three.begin() + 280, three.end(), -1);
  std::fill(padded.begin() + 11, padded.end(), -1);
  auto gap = three;
  std::fill(gap.begin() + 40, gap.begin() + 60, -1);
  return {{ids_of({three, one}), 0},
          {ids_of({padded, one}), 0},
          {ids_of({three, padded}), 3},
          {ids_of({gap, three}), 130},
          {ids_of({nothing, one}), 0},
          {{}, 0},
          {{}, 1},
          {{}, 299},
          {{}, 300}};
}

TEST(AttentionPattern, EqualsTheMaskedFormWithGradients) {
  for (const auto& [ids, window] : layouts()) {
    const auto read = ids.defined() ? ids.ge(0) : at::ones({2, 300}, at::kBool);
    const auto weight = at::randn({2, 4, 300, 8}, at::kDouble) * read.view({2, 1, 300, 1});
    std::vector<at::Tensor> ours, theirs;
    for (const int64_t heads : {4, 2, 2}) {
      ours.push_back(at::randn({2, 300, heads, 8}, at::kDouble).set_requires_grad(true));
      theirs.push_back(ours.back().detach().clone().set_requires_grad(true));
    }
    const auto heads_first = [](const at::Tensor& t) { return t.transpose(1, 2); };
    const auto pattern =
        attention_pattern({.rows = 2, .tokens = 300, .document_ids = ids, .sliding_window = window}, ours[0].options());
    const auto found = attend(heads_first(ours[0]), heads_first(ours[1]), heads_first(ours[2]), pattern);
    const auto wanted =
        masked_form(heads_first(theirs[0]), heads_first(theirs[1]), heads_first(theirs[2]), ids, window);
    const auto rows = read.view({2, 1, 300, 1}).expand_as(found);
    EXPECT_TRUE(at::allclose(found.masked_select(rows), wanted.masked_select(rows), 1e-9, 1e-9)) << window;
    (found * weight).sum().backward();
    (wanted * weight).sum().backward();
    for (size_t i = 0; i < ours.size(); ++i) {
      EXPECT_TRUE(at::allclose(ours[i].grad(), theirs[i].grad(), 1e-9, 1e-9)) << "window " << window << ", input " << i;
    }
  }
}

// A given scale and capped scores, in five forms: packed rows, padded rows, a window, plain rows, and rows behind a
// cache.
TEST(AttentionScoreOptions, ScaleAndSoftcapEqualTheMaskedFormWithGradients) {
  for (const AttentionScoreOptions scores :
       {AttentionScoreOptions{.scale = 0.11}, AttentionScoreOptions{.scale = 0.9, .softcap = 0.7}}) {
    const auto all = layouts();
    for (const size_t layout : {0U, 3U, 5U, 7U}) {
      const auto& [ids, window] = all[layout];
      const auto read = (ids.defined() ? ids.ge(0) : at::ones({2, 300}, at::kBool)).view({2, 1, 300, 1});
      const auto q = at::randn({2, 4, 300, 8}, at::kDouble).set_requires_grad(true);
      const auto k = at::randn({2, 2, 300, 8}, at::kDouble).set_requires_grad(true), v = at::randn_like(k);
      const auto pattern =
          attention_pattern({.rows = 2, .tokens = 300, .document_ids = ids, .sliding_window = window}, q.options());
      const auto found = attend(q, k, v, pattern, scores) * read,
                 wanted = masked_form(q, k, v, ids, window, scores) * read;
      EXPECT_TRUE(at::allclose(found, wanted, 1e-9, 1e-9)) << window;
      const auto ours = torch::autograd::grad({found.square().sum()}, {q, k});
      const auto theirs = torch::autograd::grad({wanted.square().sum()}, {q, k});
      for (size_t i = 0; i < ours.size(); ++i) EXPECT_TRUE(at::allclose(ours[i], theirs[i], 1e-9, 1e-9)) << window;
    }
    const auto k = at::randn({1, 2, 50, 8}, at::kDouble), q = at::randn({1, 4, 3, 8}, at::kDouble);
    const auto pattern = attention_pattern({.tokens = 3, .cached = 47, .sliding_window = 9}, q.options());
    EXPECT_TRUE(at::allclose(attend(q, k, k, pattern, scores), masked_form(q, k, k, {}, 9, scores), 1e-9, 1e-9));
  }
}

TEST(AttentionPattern, QueriesAfterCachedKeysEqualTheMaskedForm) {
  const auto k = at::randn({2, 2, 1500, 8}, at::kDouble), v = at::randn({2, 2, 1500, 8}, at::kDouble);
  for (const int64_t tokens : {1, 2, 1100}) {
    for (const int64_t window : {0, 1, 7, 1200, 1500}) {
      const auto q = at::randn({2, 4, tokens, 8}, at::kDouble);
      const auto pattern = attention_pattern(
          {.rows = 2, .tokens = tokens, .cached = 1500 - tokens, .sliding_window = window}, q.options());
      EXPECT_TRUE(at::allclose(attend(q, k, v, pattern), masked_form(q, k, v, {}, window), 1e-9, 1e-9))
          << tokens << " tokens, window " << window;
    }
  }
}

TEST(AttentionPattern, TrailingPaddingOfOneDocumentIsPlainCausal) {
  const auto plain = [](const at::Tensor& ids, int64_t window) {
    return attention_pattern({.rows = 2, .tokens = 4, .document_ids = ids, .sliding_window = window}, at::kFloat)
        .pieces.empty();
  };
  EXPECT_TRUE(plain(ids_of({{0, 0, 0, -1}, {0, -1, -1, -1}}), 0));
  EXPECT_TRUE(plain(ids_of({{3, 3, 3, 3}, {5, 5, 5, 5}}), 4));
  EXPECT_TRUE(plain(ids_of({{0, 0, 0, -1}, {0, -1, -1, -1}}), 3));
  EXPECT_TRUE(plain({}, 4));
  EXPECT_FALSE(plain(ids_of({{0, 0, 0, -1}, {0, -1, -1, -1}}), 2));
  EXPECT_FALSE(plain(ids_of({{0, 0, 1, 1}, {0, 0, 0, 0}}), 0));
  EXPECT_FALSE(plain({}, 3));
}

TEST(AttentionPattern, InvalidPatternsAreErrors) {
  const auto refused = [](const AttentionPatternOptions& wanted, const char* part) {
    try {
      attention_pattern(wanted, at::kFloat);
      FAIL() << part;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kShape);
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  const auto ids = ids_of({{0, 0, 1, 1}, {0, 1, 0, 0}});
  refused({.rows = 2, .tokens = 4, .document_ids = ids}, "row 1: document 0 is in two pieces");
  refused({.rows = 2, .tokens = 4, .cached = 1, .document_ids = ids}, "cached");
  refused({.rows = 2, .tokens = 5, .document_ids = ids}, "wanted int64 [2, 5]");
}

TEST(AttentionPattern, MemoryIsNotQuadraticInTheRowLength) {
  constexpr int64_t kTokens = 8192, kQuadratic = kTokens * kTokens;
  auto packed = at::arange(kTokens, at::kLong).floor_divide_(700).unsqueeze(0);
  auto padded = packed.clone().zero_();
  padded.narrow(1, 5000, kTokens - 5000).fill_(-1);
  const auto nothing = at::Tensor();
  for (const auto& [ids, window] :
       std::vector<std::pair<at::Tensor, int64_t>>{{packed, 0}, {packed, 50}, {padded, 0}, {nothing, 400}}) {
    const auto record = std::make_shared<testing::LargestAllocation>();
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, record);
    const auto x = at::randn({1, 2, kTokens, 8}).set_requires_grad(true);
    const auto pattern =
        attention_pattern({.tokens = kTokens, .document_ids = ids, .sliding_window = window}, x.options());
    attend(x, x, x, pattern).sum().backward();
    EXPECT_GE(record->largest, kTokens * 16 * 4) << "the recorder sees nothing";
    EXPECT_LT(record->largest, kQuadratic / 8) << "window " << window;
  }
}

}  // namespace
}  // namespace tessera::nn
