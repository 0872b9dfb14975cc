// Tests attention over sequences that are sharded over ranks (context parallelism) against attention on one rank.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/comm/group/observer.h"
#include "tessera/comm/rendezvous/thread_ranks.h"
#include "tessera/kernels/autograd/activation_checkpoint_cache.h"
#include "tessera/nn/attention/attention_pattern.h"
#include "tessera/nn/attention/context_attention.h"
#include "tests/dtensor/support.h"
#include "tests/support/largest_allocation.h"

namespace tessera::nn {
namespace {

using testing::on_ranks;

struct RowsCase {
  std::string name;
  int64_t tokens;
  at::Tensor ids;  // [2, tokens] or undefined
  int64_t window = 0;
};

at::Tensor packed_ids(int64_t tokens) {
  const auto ids = at::zeros({2, tokens}, at::kLong);
  const int64_t third = tokens / 3;
  ids[0].narrow(0, third, third).fill_(4);
  ids[0].narrow(0, 2 * third, tokens - 2 * third).fill_(7);
  ids[1].narrow(0, tokens - third, third).fill_(-1);
  ids[1].narrow(0, 1, 2).fill_(-1);
  ids[1].narrow(0, 3, tokens - third - 3).fill_(2);
  return ids;
}

// Lengths that 2, 3 and 4 ranks divide, and lengths that they do not divide.
std::vector<RowsCase> rows_cases() {
  const at::Tensor none;
  return {{"causal", 48, none},
          {"uneven", 37, none},
          {"few", 5, none},
          {"packed", 48, packed_ids(48)},
          {"packed, uneven", 41, packed_ids(41)},
          {"window", 48, none, 7},
          {"window, uneven", 301, none, 130},
          {"packed window", 50, packed_ids(50), 4},
          {"wide window", 48, packed_ids(48), 400}};
}

struct Attended {
  at::Tensor out, q, k, v;  // the result and the gradients
};

at::Tensor drawn(std::vector<int64_t> sizes, uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  return at::randn(sizes, generator, at::kDouble);
}

struct Operands {
  at::Tensor q, k, v, weight;
};

// Heads are before tokens, as views of tensors with tokens before heads. The weight of padding in the loss is zero,
// because results of padding are not used.
Operands operands(const RowsCase& rows, int64_t heads, int64_t groups, at::ScalarType dtype) {
  const auto made = [&](int64_t count, uint64_t seed) { return drawn({2, rows.tokens, count, 8}, seed).to(dtype); };
  Operands out{made(heads, 1), made(groups, 2), made(groups, 3), made(heads, 4)};
  if (rows.ids.defined()) out.weight = out.weight * rows.ids.ge(0).view({2, rows.tokens, 1, 1});
  return out;
}

Attended attended(const Operands& given, const AttentionPattern& pattern, const AttentionScoreOptions& scores) {
  std::vector<at::Tensor> leaves;
  for (const auto& each : {given.q, given.k, given.v}) leaves.push_back(each.detach().clone().set_requires_grad(true));
  const auto first = [](const at::Tensor& tensor) { return tensor.transpose(1, 2); };
  const auto out = attend(first(leaves[0]), first(leaves[1]), first(leaves[2]), pattern, scores).transpose(1, 2);
  const auto grads = torch::autograd::grad({(out * given.weight).sum()}, {leaves[0], leaves[1], leaves[2]});
  return {out.detach(), grads[0], grads[1], grads[2]};
}

void expect_close(const at::Tensor& found, const at::Tensor& wanted, double tolerance, const std::string& what) {
  ASSERT_EQ(found.sizes(), wanted.sizes()) << what;
  if (wanted.numel() == 0) return;
  const double most = std::max(1.0, wanted.abs().max().item<double>());
  EXPECT_LE((found.to(at::kDouble) - wanted.to(at::kDouble)).abs().max().item<double>(), tolerance * most) << what;
}

void expect_equals_one_rank(const MeshPtr& mesh, RotateMethod rotate, const RowsCase& rows, int64_t groups,
                            at::ScalarType dtype, double tolerance, const AttentionScoreOptions& scores = {}) {
  const int64_t ranks = mesh->size(), rank = mesh->local_rank(0);
  const auto whole = operands(rows, /*heads=*/4, groups, dtype);
  const auto wanted = attended(
      {whole.q.to(at::kDouble), whole.k.to(at::kDouble), whole.v.to(at::kDouble), whole.weight.to(at::kDouble)},
      attention_pattern({.rows = 2, .tokens = rows.tokens, .document_ids = rows.ids, .sliding_window = rows.window},
                        at::kDouble),
      scores);
  const kernels::ContextLayout layout(rows.tokens, ranks);
  const auto part = [&](const at::Tensor& tensor) { return layout.shard(tensor, 1, rank); };
  const auto sequence = context_sequence({.group = mesh->group(0), .rotate = rotate},
                                         {.rows = 2,
                                          .tokens = layout.tokens_of(rank),
                                          .document_ids = rows.ids.defined() ? part(rows.ids) : at::Tensor()});
  const auto pattern = attention_pattern(
      {.rows = 2, .tokens = layout.tokens_of(rank), .sliding_window = rows.window, .context = sequence},
      at::TensorOptions(dtype));
  const auto found = attended({part(whole.q), part(whole.k), part(whole.v), part(whole.weight)}, pattern, scores);
  const auto what = fmt::format("{} over {} ranks, {} groups, rank {}, {}", rows.name, ranks, groups, rank,
                                rotate == RotateMethod::kAllToAll ? "ring" : "all-gather");
  const auto read =
      rows.ids.defined() ? rows.ids.ge(0).view({2, rows.tokens, 1, 1}) : at::ones({2, rows.tokens, 1, 1}, at::kBool);
  expect_close(found.out * part(read), part(wanted.out * read), tolerance, what + ", result");
  expect_close(found.q, part(wanted.q), tolerance, what + ", dq");
  expect_close(found.k, part(wanted.k), tolerance, what + ", dk");
  expect_close(found.v, part(wanted.v), tolerance, what + ", dv");
  EXPECT_EQ(found.out.scalar_type(), dtype);
}

constexpr RotateMethod kMethods[] = {RotateMethod::kAllGather, RotateMethod::kAllToAll};

TEST(ContextAttention, EqualsOneRankWithGradients) {
  for (const int ranks : {2, 3, 4}) {
    on_ranks(ranks, {ranks}, [](const MeshPtr& mesh) {
      for (const auto rotate : kMethods) {
        for (const auto& rows : rows_cases()) {
          expect_equals_one_rank(mesh, rotate, rows, /*groups=*/2, at::kDouble, 1e-12);
          if (rows.tokens < 100) expect_equals_one_rank(mesh, rotate, rows, /*groups=*/4, at::kFloat, 1e-5);
        }
      }
    });
  }
}

TEST(ContextAttention, EqualsOneRankOverGloo) {
  comm::run_thread_ranks(3,
                         [](const std::shared_ptr<comm::World>& world) {
                           const auto mesh = init_device_mesh(world, "cpu", {3}, {"cp"});
                           for (const auto rotate : kMethods) {
                             for (const auto& rows : rows_cases()) {
                               expect_equals_one_rank(mesh, rotate, rows, 2, at::kDouble, 1e-12);
                             }
                           }
                         },
                         {.backend = "gloo"});
}

TEST(ContextAttention, SupportsHeadsShardedOverTensorParallelRanks) {
  on_ranks(4, {2, 2}, [](const MeshPtr& both) {
    const auto mesh = init_device_mesh(both->world(), "cpu", {2, 2}, {"cp", "tp"});
    const auto cp = mesh->slice({"cp"}), tp = mesh->slice({"tp"});
    const RowsCase rows{"heads", 13, packed_ids(13), 4};
    const kernels::ContextLayout layout(13, 2);
    const auto part = [&](const at::Tensor& tensor) { return layout.shard(tensor, 1, cp->local_rank(0)); };
    const auto whole = operands(rows, 4, 2, at::kDouble);
    const Operands own{part(whole.q), part(whole.k), part(whole.v), part(whole.weight)};
    const auto sequence =
        context_sequence({.group = cp->group(0), .rotate = RotateMethod::kAllToAll},
                         {.rows = 2, .tokens = layout.tokens_of(cp->local_rank(0)), .document_ids = part(rows.ids)});
    const auto pattern = attention_pattern(
        {.rows = 2, .tokens = layout.tokens_of(cp->local_rank(0)), .sliding_window = 4, .context = sequence},
        at::kDouble);
    const auto wanted = attended(own, pattern, {});
    const auto cut = [&](const at::Tensor& tensor) { return distribute_tensor(tensor, tp, {Shard(2)}, std::nullopt); };
    std::vector<at::Tensor> leaves;
    for (const auto& each : {own.q, own.k, own.v}) leaves.push_back(cut(each).detach().set_requires_grad(true));
    const auto first = [](const at::Tensor& tensor) { return tensor.transpose(1, 2); };
    const auto found = attend(first(leaves[0]), first(leaves[1]), first(leaves[2]), pattern).transpose(1, 2);
    EXPECT_EQ(placements(found), Placements{Shard(2)});
    EXPECT_TRUE(at::allclose(full_tensor(found), wanted.out, 1e-12, 1e-12));
    const auto grads = torch::autograd::grad({(found * cut(own.weight)).sum()}, {leaves[0], leaves[1], leaves[2]});
    EXPECT_TRUE(at::allclose(full_tensor(grads[0]), wanted.q, 1e-12, 1e-12));
    EXPECT_TRUE(at::allclose(full_tensor(grads[1]), wanted.k, 1e-12, 1e-12));
    EXPECT_TRUE(at::allclose(full_tensor(grads[2]), wanted.v, 1e-12, 1e-12));
    EXPECT_NE(testing::error_of([&] {
                const auto tokens = distribute_tensor(first(own.q), tp, {Shard(2)}, std::nullopt);
                attend(tokens, tokens, tokens, pattern);
              }).find("sharded over tokens"),
              std::string::npos);
  });
}

TEST(ContextAttention, EqualsOneRankInHalfPrecision) {
  on_ranks(3, {3}, [](const MeshPtr& mesh) {
    for (const auto rotate : kMethods) {
      for (const auto& rows : rows_cases()) {
        expect_equals_one_rank(mesh, rotate, rows, /*groups=*/2, at::kBFloat16, 2e-2);
      }
    }
  });
}

TEST(ContextAttention, SupportsScaleAndSoftcap) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    for (const auto rotate : kMethods) {
      for (const auto& rows : rows_cases()) {
        expect_equals_one_rank(mesh, rotate, rows, 2, at::kDouble, 1e-12, {.scale = 0.11});
        expect_equals_one_rank(mesh, rotate, rows, 1, at::kDouble, 1e-12, {.scale = 0.9, .softcap = 0.7});
      }
    }
  });
}

// Counts the bytes that a rank receives.
struct ReceivedBytes final : comm::CollectiveObserver {
  void on_collective(comm::Op op, int64_t bytes, const comm::Group&) override {
    if (op == comm::Op::kRecv) total += bytes;
  }
  int64_t total = 0;
};

TEST(ContextAttention, RingCommunicatesOnlyVisibleTokens) {
  on_ranks(4, {4}, [](const MeshPtr& mesh) {
    constexpr int64_t kTokens = 64, kOwn = kTokens / 4, kBytes = 2 * 8 * 8;  // bytes of one token's keys and values
    const kernels::ContextLayout layout(kTokens, 4);
    const int64_t rank = mesh->local_rank(0);
    const auto received = [&](const at::Tensor& ids, int64_t window) {
      const auto sequence =
          context_sequence({.group = mesh->group(0), .rotate = RotateMethod::kAllToAll},
                           {.tokens = kOwn, .document_ids = ids.defined() ? layout.shard(ids, 1, rank) : at::Tensor()});
      const auto pattern =
          attention_pattern({.tokens = kOwn, .sliding_window = window, .context = sequence}, at::kDouble);
      const ReceivedBytes bytes;
      const auto x = at::randn({1, 1, kOwn, 8}, at::kDouble);
      attend(x, x, x, pattern);
      return bytes.total / kBytes;
    };
    // A rank receives the other ranks' first chunks, and those of their last chunks that come before this rank's last
    // chunk.
    EXPECT_EQ(received({}, 0), 3 * 8 + 8 * (3 - rank));
    // A window of 3 reaches two tokens back into the chunk before each chunk. The two middle chunks are on the same
    // rank.
    EXPECT_EQ(received({}, 3), rank == 0 || rank == 3 ? 2 : 4);
    // Each chunk is one document.
    EXPECT_EQ(received(at::arange(kTokens, at::kLong).floor_divide_(8).unsqueeze(0), 0), 0);
  });
}

TEST(ContextAttention, ResultsAreReusedInTheRecomputationOfACheckpoint) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const RowsCase rows{"kept", 12, packed_ids(12)};
    const kernels::ContextLayout layout(12, 2);
    const auto part = [&](const at::Tensor& tensor) { return layout.shard(tensor, 1, mesh->local_rank(0)); };
    const auto whole = operands(rows, 4, 2, at::kDouble);
    const Operands own{part(whole.q), part(whole.k), part(whole.v), part(whole.weight)};
    for (const auto rotate : kMethods) {
      const auto sequence = context_sequence({.group = mesh->group(0), .rotate = rotate},
                                             {.rows = 2, .tokens = 6, .document_ids = part(rows.ids)});
      const auto pattern = attention_pattern({.rows = 2, .tokens = 6, .context = sequence}, at::kDouble);
      const auto wanted = attended(own, pattern, {});
      const auto kept = std::make_shared<kernels::ActivationCheckpointCache>();
      using Mode = kernels::ActivationCheckpointCache::Mode;
      {
        const kernels::ActivationCheckpointCache::Scope record(kept, Mode::kRecord);
        const c10::NoGradGuard no_grad;
        attend(own.q.transpose(1, 2), own.k.transpose(1, 2), own.v.transpose(1, 2), pattern);
      }
      const kernels::ActivationCheckpointCache::Scope replay(kept, Mode::kReplay);
      const auto found = attended(own, pattern, {});
      EXPECT_TRUE(found.out.equal(wanted.out) && found.q.equal(wanted.q) && found.k.equal(wanted.k));
    }
  });
}

TEST(ContextAttention, InvalidInputsAreErrorsOnAllRanks) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const int64_t rank = mesh->local_rank(0);
    const ContextParallelGroup how{.group = mesh->group(0)};
    const auto says = [](const std::string& text, const char* part) {
      EXPECT_NE(text.find(part), std::string::npos) << text;
    };
    says(testing::error_of([&] { context_sequence(how, {.tokens = rank == 0 ? 5 : 2}); }), "wanted 3 of the 7");
    says(testing::error_of([&] { context_sequence(how, {.rows = 1 + rank, .tokens = 4}); }), "the same rows");
    const auto ids = at::zeros({1, 4}, at::kLong);
    says(testing::error_of(
             [&] { context_sequence(how, {.tokens = 4, .document_ids = rank == 0 ? ids : at::Tensor()}); }),
         "the same rows");
    const auto torn = rank == 0 ? ids : at::ones({1, 4}, at::kLong);
    says(testing::error_of([&] { context_sequence(how, {.tokens = 4, .document_ids = torn}); }), "is in two pieces");
    const auto narrow = rank == 1 ? ids.to(at::kInt) : ids;  // on rank 1 only
    says(testing::error_of([&] { context_sequence(how, {.tokens = 4, .document_ids = narrow}); }),
         "on its rank 1, wanted int64");
    const auto sequence = context_sequence(how, {.tokens = 4});
    says(testing::error_of([&] { attention_pattern({.tokens = 4, .cached = 2, .context = sequence}, at::kFloat); }),
         "a KV cache is on one rank");
    const auto pattern = attention_pattern({.tokens = 4, .context = sequence}, at::kFloat);
    const auto x = at::zeros({1, 2, 4, 8}), longer = at::zeros({1, 2, 6, 8});
    says(testing::error_of([&] { attend(x, longer, longer, pattern); }), "Cached keys cannot be sharded over ranks");
    says(testing::error_of([&] { attend(longer, longer, longer, pattern); }), "this rank's tokens of the pattern");
  });
}

// 4 ranks have 4 times the tokens of one rank. The largest tensor of each rank must not be larger than on one rank.
TEST(ContextAttention, FourRanksHaveFourTimesTheTokensInTheSameMemory) {
  constexpr int64_t kTokens = 2048;
  const auto largest = [&](int ranks) {
    std::vector<int64_t> found(static_cast<size_t>(ranks));
    on_ranks(ranks, {ranks}, [&](const MeshPtr& mesh) {
      const auto sequence =
          context_sequence({.group = mesh->group(0), .rotate = RotateMethod::kAllToAll}, {.tokens = kTokens});
      const auto record = std::make_shared<testing::LargestAllocation>();
      const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, record);
      const auto x = at::randn({1, kTokens, 2, 16}).transpose(1, 2).set_requires_grad(true);
      const auto pattern = attention_pattern({.tokens = kTokens, .context = sequence}, x.options());
      attend(x, x, x, pattern).sum().backward();
      found[static_cast<size_t>(mesh->local_rank(0))] = record->largest;
    });
    return *std::ranges::max_element(found);
  };
  EXPECT_GE(largest(1), kTokens * 2 * 16 * 4) << "the recorder sees nothing";
  EXPECT_LE(largest(4), largest(1));
}

}  // namespace
}  // namespace tessera::nn
