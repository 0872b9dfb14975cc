// Tests how context parallelism splits a sequence into chunks for the ranks, and the attention of a rank into pieces,
// against the mask of the whole sequence.
#include "tessera/nn/attention/context_pieces.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"

namespace tessera::nn {
namespace {

struct SequenceCase {
  std::vector<TokenRange> documents;
  int64_t tokens, window;
  bool causal = true;
};

std::vector<SequenceCase> sequence_cases() {
  std::vector<SequenceCase> cases;
  for (const int64_t tokens : {1, 2, 7, 16, 29, 200}) {
    const int64_t third = tokens / 3, half = tokens / 2;
    const std::vector<std::vector<TokenRange>> all = {
        {{0, tokens}}, {{0, third}, {third, half}, {half, tokens}}, {{third, half}}, {{1, third}, {half, tokens - 1}}};
    for (auto documents : all) {
      std::erase_if(documents, [](const TokenRange& each) { return each.empty(); });
      for (const int64_t window : {0, 1, 3, 130, 199, 400}) cases.push_back({documents, tokens, window});
      cases.push_back({documents, tokens, 0, false});
    }
  }
  return cases;
}

// Returns the mask of the whole sequence: whether a query attends to a key.
at::Tensor wanted_mask(const SequenceCase& which) {
  const auto documents = at::full({which.tokens}, -1, at::kLong);
  for (size_t i = 0; i < which.documents.size(); ++i) {
    const auto& each = which.documents[i];
    documents.narrow(0, each.begin, each.end - each.begin).fill_(static_cast<int64_t>(i));
  }
  auto seen = documents.unsqueeze(1).eq(documents.unsqueeze(0)).logical_and(documents.ge(0).unsqueeze(1));
  const auto at = at::arange(which.tokens, at::kLong);
  const auto query = at.unsqueeze(1), key = at.unsqueeze(0);
  if (which.causal) seen = seen.logical_and(key.le(query));
  return which.window > 0 ? seen.logical_and(key.gt(query - which.window)) : seen;
}

// Adds to `counts` how often the piece has each pair of a query and a key. If the piece has mask entries, only their
// pairs count.
void add_piece(const at::Tensor& counts, const ContextPiece& piece, int64_t window) {
  auto block = counts.narrow(0, piece.query, piece.queries).narrow(1, piece.key, piece.keys);
  auto seen = at::ones_like(block);
  if (piece.kind == ContextPiece::Kind::kCausal) {
    EXPECT_EQ(piece.queries, piece.keys);
    seen = seen.tril();
  }
  if (piece.kind == ContextPiece::Kind::kMasked) {
    EXPECT_LE(piece.queries, masked_queries(window));
    const auto query = at::arange(piece.queries, at::kLong).unsqueeze(1);
    const auto key = at::arange(-piece.distance, piece.keys - piece.distance, at::kLong).unsqueeze(0);
    seen = key.le(query).logical_and(key.gt(query - window)).to(at::kInt);
  }
  EXPECT_GT(seen.sum(1).min().item<int64_t>(), 0) << "a query sees nothing";
  block.add_(seen);
}

at::Tensor positions_of(const std::vector<kernels::ContextChunk>& chunks, int64_t tokens) {
  const auto out = at::empty({tokens}, at::kLong);
  for (const auto& each : chunks) {
    out.narrow(0, each.local, each.tokens).copy_(at::arange(each.begin, each.end(), at::kLong));
  }
  return out;
}

TEST(ContextPieces, CoverExactlyThePairsOfTheMask) {
  int64_t masked = 0;
  for (const auto& which : sequence_cases()) {
    const auto mask = wanted_mask(which);
    const std::vector<RowDocuments> rows = {{.documents = which.documents}};
    for (const int64_t ranks : {1, 2, 3}) {
      const kernels::ContextLayout layout(which.tokens, ranks);
      for (int64_t reader = 0; reader < ranks; ++reader) {
        for (int64_t holder = 0; holder < ranks; ++holder) {
          const auto queries = layout.chunks_of(reader), keys = layout.chunks_of(holder);
          const auto counts = at::zeros({layout.tokens_of(reader), layout.tokens_of(holder)}, at::kInt);
          for (const auto& piece :
               context_pieces(rows, queries, keys, {.sliding_window = which.window, .causal = which.causal})) {
            add_piece(counts, piece, which.window);
            masked += piece.kind == ContextPiece::Kind::kMasked;
          }
          const auto wanted = mask.index_select(0, positions_of(queries, counts.size(0)))
                                  .index_select(1, positions_of(keys, counts.size(1)));
          ASSERT_TRUE(counts.equal(wanted.to(at::kInt)))
              << which.tokens << " tokens, window " << which.window << ", rank " << reader << " of " << ranks
              << ", keys of " << holder;
        }
      }
    }
  }
  EXPECT_GT(masked, 100);
}

// The pieces are the products that the ranks of a ring compute: one product at each step, as in PyTorch and NeMo.
TEST(ContextPieces, BalancedChunksGiveOnePiecePerRingStep) {
  for (const int64_t ranks : {2, 3, 4}) {
    const kernels::ContextLayout layout(ranks * 16, ranks);
    for (int64_t rank = 0; rank < ranks; ++rank) {
      for (int64_t holder = 0; holder < ranks; ++holder) {
        std::vector<kernels::ContextChunk> keys;  // the received chunks, packed
        int64_t local = 0;
        for (auto chunk : layout.chunks_of(holder)) {
          if (tokens_seen({{.documents = {{0, ranks * 16}}}}, layout.chunks_of(rank), chunk, {}).empty()) continue;
          chunk.local = local;
          local += chunk.tokens;
          keys.push_back(chunk);
        }
        const auto pieces = context_pieces({{.documents = {{0, ranks * 16}}}}, layout.chunks_of(rank), keys, {});
        ASSERT_EQ(pieces.size(), 1U) << rank << " of " << ranks << ", keys of " << holder;
        const auto kind = rank == holder ? ContextPiece::Kind::kCausal : ContextPiece::Kind::kFull;
        EXPECT_EQ(pieces[0].kind, kind);
        EXPECT_EQ(pieces[0].queries * pieces[0].keys, rank == holder ? 16 * 16 : 16 * 8);
      }
    }
  }
}

TEST(ContextPieces, TokensSeenIsTheSmallestVisibleRange) {
  for (const auto& which : sequence_cases()) {
    const auto mask = wanted_mask(which);
    const kernels::ContextLayout layout(which.tokens, 3);
    for (int64_t reader = 0; reader < 3; ++reader) {
      const auto queries = layout.chunks_of(reader);
      const auto seen_by_any = mask.index_select(0, layout.positions(reader)).any(0);
      for (const auto& chunk : layout.chunks_of((reader + 1) % 3)) {
        const auto at = seen_by_any.narrow(0, chunk.begin, chunk.tokens).nonzero().flatten() + chunk.begin;
        const auto wanted =
            at.numel() == 0 ? TokenRange{} : TokenRange{at.min().item<int64_t>(), at.max().item<int64_t>() + 1};
        const auto found = tokens_seen({{.documents = which.documents}}, queries, chunk,
                                       {.sliding_window = which.window, .causal = which.causal});
        ASSERT_EQ(found, wanted) << which.tokens << " tokens, window " << which.window << ", from " << chunk.begin;
      }
    }
  }
}

// With 32 documents of 1024 tokens, the area of the pieces is the sum of the documents' areas, not the area of the row.
TEST(ContextPieces, AreaScalesWithDocumentsAndWindowsNotWithTheRow) {
  const auto area = [](const std::vector<TokenRange>& documents, int64_t tokens, int64_t window) {
    const std::vector<kernels::ContextChunk> all = {{.begin = 0, .tokens = tokens}};
    int64_t sum = 0;
    for (const auto& piece : context_pieces({{.documents = documents}}, all, all, {.sliding_window = window})) {
      sum += piece.queries * piece.keys;
    }
    return sum;
  };
  std::vector<TokenRange> documents;
  for (int64_t begin = 0; begin < 32768; begin += 1024) documents.push_back({begin, begin + 1024});
  EXPECT_EQ(area(documents, 32768, 0), 32 * 1024 * 1024);
  EXPECT_LE(area({{0, 32768}}, 32768, 1024), 32768 * 2048);
  EXPECT_EQ(area({{0, 32768}}, 32768, 0), int64_t{32768} * 32768);
}

TEST(ContextLayout, BalancedRanksGetEqualChunksFromBothEnds) {
  const auto positions = [](int64_t tokens, int64_t ranks, int64_t rank, kernels::ContextLayout::Order order) {
    const auto found = kernels::ContextLayout(tokens, ranks, order).positions(rank);
    return std::vector<int64_t>(found.const_data_ptr<int64_t>(), found.const_data_ptr<int64_t>() + found.numel());
  };
  constexpr auto kBalanced = kernels::ContextLayout::Order::kBalanced,
                 kContiguous = kernels::ContextLayout::Order::kContiguous;
  EXPECT_EQ(positions(8, 2, 0, kBalanced), (std::vector<int64_t>{0, 1, 6, 7}));
  EXPECT_EQ(positions(8, 2, 1, kBalanced), (std::vector<int64_t>{2, 3, 4, 5}));
  EXPECT_EQ(positions(10, 2, 0, kBalanced), (std::vector<int64_t>{0, 1, 2, 8, 9}));
  EXPECT_EQ(positions(3, 2, 0, kBalanced), (std::vector<int64_t>{0}));
  EXPECT_EQ(positions(3, 2, 1, kBalanced), (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(positions(5, 2, 0, kContiguous), (std::vector<int64_t>{0, 1, 2}));
  EXPECT_EQ(positions(0, 2, 0, kBalanced), (std::vector<int64_t>{}));
  EXPECT_EQ(kernels::ContextLayout::of_pytorch(8, 2).order(), kBalanced);
  EXPECT_EQ(kernels::ContextLayout::of_pytorch(6, 2).order(), kContiguous);
  for (int64_t tokens = 0; tokens < 40; ++tokens) {
    for (int64_t ranks = 1; ranks < 6; ++ranks) {
      const kernels::ContextLayout layout(tokens, ranks);
      std::vector<at::Tensor> all;
      const auto whole = at::arange(3 * tokens, at::kLong).view({3, tokens});
      for (int64_t rank = 0; rank < ranks; ++rank) {
        all.push_back(layout.positions(rank));
        EXPECT_EQ(all.back().numel(), layout.tokens_of(rank));
        EXPECT_LE(layout.longest_shard_tokens() - layout.tokens_of(rank), 1);
        EXPECT_TRUE(layout.shard(whole, 1, rank).equal(whole.index_select(1, all.back())));
      }
      EXPECT_TRUE(std::get<0>(at::cat(all).sort()).equal(at::arange(tokens, at::kLong)));
    }
  }
}

TEST(ContextLayout, InvalidArgumentsAreErrors) {
  EXPECT_THROW(kernels::ContextLayout(4, 0), Error);
  EXPECT_THROW(kernels::ContextLayout(-1, 2), Error);
  EXPECT_THROW(kernels::ContextLayout(4, 2).chunks_of(2), Error);
  EXPECT_THROW(kernels::ContextLayout(4, 2).shard(at::zeros({2, 5}), 1, 0), Error);
  EXPECT_THROW(kernels::ContextLayout(4, 2).shard(at::zeros({2, 4}), 2, 0), Error);
}

}  // namespace
}  // namespace tessera::nn
