// Tests log-probs of sequences that are sharded over ranks (context parallelism) against the log-probs of one rank.
// Tests NeMo's helper functions for these log-probs.
#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/base/ignored_label.h"
#include "tessera/kernels/attention/context_layout.h"
#include "tessera/kernels/logprobs/context.h"
#include "tessera/kernels/logprobs/next_token.h"
#include "tests/dtensor/support.h"

namespace tessera {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::on_ranks;

constexpr int64_t kVocabulary = 11;

at::Tensor logits_of_context(int64_t rows, int64_t tokens) {
  return at::randn({rows, tokens, kVocabulary}, at::detail::createCPUGenerator(3), at::TensorOptions(at::kDouble));
}
at::Tensor ids_of_context(int64_t rows, int64_t tokens) {
  auto ids =
      at::randint(0, kVocabulary, {rows, tokens}, at::detail::createCPUGenerator(4), at::TensorOptions(at::kLong));
  if (tokens > 2) ids[0][2].fill_(kIgnoredLabel);
  return ids;
}

MeshPtr context_mesh(const MeshPtr& mesh, int64_t cp, int64_t tp) {
  return init_device_mesh(mesh->world(), "cpu", {cp, tp}, {"cp", "tp"});
}

kernels::VocabShard part_of_tp(const MeshPtr& mesh) { return kernels::vocab_shard_of(*mesh, 1, kVocabulary); }

at::Tensor columns(const at::Tensor& logits, const kernels::VocabShard& part) {
  return logits.narrow(2, part.start, part.end - part.start);
}

TEST(ContextLogprobs, VocabShardsGiveFullLogprobsOnEveryRankWithGradients) {
  on_ranks(4, {4}, [](const MeshPtr& line) {
    for (const auto& [cp, tp] : {std::pair<int64_t, int64_t>{4, 1}, {2, 2}}) {
      const auto mesh = context_mesh(line, cp, tp);
      const auto group = mesh->group("cp");
      for (const int64_t tokens : {8, 16, 13}) {
        for (const bool padded : {false, true}) {
          const int64_t all = padded ? (tokens / (2 * cp) + 1) * 2 * cp : tokens;
          const auto whole = logits_of_context(2, all).set_requires_grad(true);
          const auto ids = ids_of_context(2, tokens),
                     weight = at::arange(2 * (tokens - 1), at::kDouble).sin().view({2, tokens - 1});
          const auto wanted = kernels::from_parallel_logits_to_logprobs(whole.narrow(1, 0, tokens), ids,
                                                                        {.start = 0, .end = kVocabulary});
          const auto wanted_grad = torch::autograd::grad({(wanted * weight).sum()}, {whole})[0];
          const kernels::ContextLayout layout(all, cp);
          const auto part = part_of_tp(mesh);
          const auto own =
              columns(layout.shard(whole.detach(), 1, group->rank()), part).clone().set_requires_grad(true);
          const auto found =
              kernels::from_parallel_logits_to_logprobs(own, ids, part, {.chunk_size = 2, .cp_group = group});
          EXPECT_TRUE(at::allclose(found, wanted, 1e-12, 1e-12)) << tokens << " tokens over " << cp;
          const auto grad = torch::autograd::grad({(found * weight).sum()}, {own})[0];
          const auto expected = columns(layout.shard(wanted_grad, 1, group->rank()), part) * static_cast<double>(cp);
          EXPECT_TRUE(at::allclose(grad, expected, 1e-11, 1e-12)) << "every rank has the same loss";
        }
      }
    }
  });
}

// The backward pass communicates. The caller may have dropped its reference to the group before.
TEST(ContextLogprobs, KeepTheGroupAliveUntilBackward) {
  on_ranks(2, {2}, [](const MeshPtr& line) {
    const kernels::VocabShard all{.start = 0, .end = kVocabulary};
    auto group = line->world()->new_group({0, 1}, "cp of a caller");
    const std::weak_ptr<comm::Group> seen = group;
    const auto whole = logits_of_context(1, 8).set_requires_grad(true);
    const auto ids = ids_of_context(1, 8);
    const auto wanted =
        torch::autograd::grad({kernels::from_parallel_logits_to_logprobs(whole, ids, all).square().sum()}, {whole})[0];
    const kernels::ContextLayout layout(8, 2);
    const int64_t rank = group->rank();
    const auto own = layout.shard(whole.detach(), 1, rank).set_requires_grad(true);
    auto loss = kernels::from_parallel_logits_to_logprobs(own, ids, all, {.cp_group = group}).square().sum();
    group.reset();
    EXPECT_FALSE(seen.expired());
    const auto grad = torch::autograd::grad({loss}, {own})[0];
    EXPECT_TRUE(at::allclose(grad, layout.shard(wanted, 1, rank) * 2.0, 1e-11, 1e-12));
    loss.reset();
    EXPECT_TRUE(seen.expired());
  });
}

TEST(ContextLogprobs, DTensorsFollowSeqIndex) {
  on_ranks(4, {4}, [](const MeshPtr& line) {
    const auto mesh = context_mesh(line, 2, 2);
    constexpr int64_t kTokens = 12;
    const kernels::ContextLayout layout(kTokens, 2);
    const auto order = at::cat({layout.positions(0), layout.positions(1)});
    const auto whole = logits_of_context(3, kTokens).set_requires_grad(true);
    const auto ids = ids_of_context(3, kTokens);
    const auto wanted = kernels::get_logprobs_from_vocab_parallel_logits(whole, ids);
    const auto wanted_grad = torch::autograd::grad({wanted.square().sum()}, {whole})[0];
    const auto lying =
        distribute_tensor(whole.detach().index_select(1, order), mesh, {Shard(1), Shard(2)}, std::nullopt)
            .set_requires_grad(true);
    const auto lying_ids = distribute_tensor(ids.index_select(1, order), mesh, {Shard(1), Replicate()}, std::nullopt);
    const auto lying_order = distribute_tensor(order, mesh, {Shard(0), Replicate()}, std::nullopt);
    for (const auto& [given, index] : {std::pair{ids, order}, std::pair{lying_ids, lying_order}}) {
      const auto found = kernels::get_logprobs_from_vocab_parallel_logits(lying, given, {.seq_index = index});
      EXPECT_FALSE(is_dtensor(found));
      EXPECT_TRUE(at::allclose(found, wanted, 1e-12, 1e-12));
      const auto grad = full_tensor(torch::autograd::grad({found.square().sum()}, {lying})[0]);
      EXPECT_TRUE(at::allclose(grad.index_select(1, order.argsort()), wanted_grad, 1e-11, 1e-12));
    }
    EXPECT_THAT(error_of([&] {
                  kernels::get_logprobs_from_vocab_parallel_logits(lying, ids,
                                                                   {.seq_index = at::zeros({kTokens}, at::kLong)});
                }),
                HasSubstr("a permutation of the positions of 12 tokens"));
    const auto nameless = init_device_mesh(line->world(), "cpu", {2, 2}, {"dp", "tp"});
    const auto elsewhere = distribute_tensor(whole.detach(), nameless, {Shard(1), Shard(2)}, std::nullopt);
    EXPECT_THAT(
        error_of([&] { kernels::get_logprobs_from_vocab_parallel_logits(elsewhere, ids, {.seq_index = order}); }),
        HasSubstr("no dim cp"));
    EXPECT_THAT(error_of([&] {
                  kernels::get_logprobs_from_vocab_parallel_logits(lying, ids, {.cp_group = mesh->group("cp")});
                }),
                HasSubstr("found cp_group with DTensor logits"));
    EXPECT_THAT(error_of([&] {
                  kernels::from_parallel_logits_to_logprobs(whole, ids, {.start = 0, .end = kVocabulary},
                                                            {.seq_index = order});
                }),
                HasSubstr("found seq_index with plain logits"));
  });
}

TEST(ContextLogprobs, PackedSequencesAreShardedSeparately) {
  on_ranks(4, {4}, [](const MeshPtr& line) {
    for (const auto& [cp, tp] : {std::pair<int64_t, int64_t>{2, 2}, {4, 1}}) {
      const auto mesh = context_mesh(line, cp, tp);
      const auto group = mesh->group("cp");
      const auto bounds = at::tensor(std::vector<int64_t>{0, 8, 8, 24, 40}, at::kInt);
      const auto whole = logits_of_context(1, 40).set_requires_grad(true);
      const auto ids = ids_of_context(1, 40);
      const kernels::VocabShard all{.start = 0, .end = kVocabulary};
      const auto wanted = kernels::from_parallel_logits_to_logprobs_packed_sequences(whole, ids, bounds, 12, all);
      const auto wanted_grad = torch::autograd::grad({wanted.square().sum()}, {whole})[0];
      std::vector<at::Tensor> places;
      for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 8}, {8, 24}, {24, 40}}) {
        places.push_back(kernels::ContextLayout(end - begin, cp).positions(group->rank()) + begin);
      }
      const auto own_places = at::cat(places);
      const auto part = part_of_tp(mesh);
      const auto own = columns(whole.detach().index_select(1, own_places), part).clone().set_requires_grad(true);
      const auto rolled = at::cat({ids.narrow(1, 1, 39), ids.narrow(1, 0, 1)}, 1).index_select(1, own_places);
      for (const bool pre_rolled : {false, true}) {
        const auto found = kernels::from_parallel_logits_to_logprobs_packed_sequences(
            own, pre_rolled ? rolled : ids, bounds, 12, part, {.target_is_pre_rolled = pre_rolled, .cp_group = group});
        EXPECT_TRUE(at::allclose(found, wanted, 1e-12, 1e-12));
        const auto grad = torch::autograd::grad({found.square().sum()}, {own})[0];
        EXPECT_TRUE(at::allclose(grad, columns(wanted_grad.index_select(1, own_places), part) * static_cast<double>(cp),
                                 1e-11, 1e-12));
      }
      EXPECT_THAT(error_of([&] {
                    kernels::from_parallel_logits_to_logprobs_packed_sequences(
                        own, ids, at::tensor(std::vector<int64_t>{0, 9, 40}), 12, part, {.cp_group = group});
                  }),
                  HasSubstr("sequence 0 has 9 tokens"));
      EXPECT_THAT(error_of([&] {
                    kernels::from_parallel_logits_to_logprobs_packed_sequences(
                        own, ids, at::tensor(std::vector<int64_t>{0, 8}), 12, part, {.cp_group = group});
                  }),
                  HasSubstr("goes from 0 to 8"));
    }
  });
}

TEST(ContextHelpers, MatchNemo) {
  EXPECT_TRUE(kernels::get_tokens_on_this_cp_rank(at::arange(8).unsqueeze(0), 0, 2)
                  .equal(at::tensor({0, 1, 6, 7}).unsqueeze(0)));
  EXPECT_TRUE(kernels::get_tokens_on_this_cp_rank(at::arange(8).unsqueeze(0), 1, 2)
                  .equal(at::tensor({2, 3, 4, 5}).unsqueeze(0)));
  on_ranks(3, {3}, [](const MeshPtr& mesh) {
    const auto group = mesh->group(0);
    const int64_t rank = group->rank();
    for (const int64_t tokens : {12, 7}) {
      const auto whole = at::arange(2 * tokens, at::kDouble).view({2, tokens});
      const auto own = kernels::get_tokens_on_this_cp_rank(whole, rank, 3).set_requires_grad(true);
      const auto found = kernels::allgather_cp_sharded_tensor(own, group);
      EXPECT_TRUE(found.equal(whole));
      const auto grad = torch::autograd::grad({(found * whole).sum()}, {own})[0];
      EXPECT_TRUE(grad.equal(3 * own)) << "the sum over the ranks";
      const auto flags = kernels::get_tokens_on_this_cp_rank(whole.gt(3), rank, 3);
      EXPECT_TRUE(kernels::allgather_cp_sharded_tensor(flags, group).equal(whole.gt(3)));
    }
    const auto whole = at::arange(24, at::kDouble).view({2, 12});
    const auto own = kernels::get_tokens_on_this_cp_rank(whole, rank, 3).set_requires_grad(true);
    const auto contiguous = kernels::cp_load_balanced_to_contiguous(own, group);
    EXPECT_TRUE(contiguous.equal(whole.narrow(1, 4 * rank, 4)));
    EXPECT_TRUE(torch::autograd::grad({(contiguous * contiguous).sum()}, {own})[0].equal(2 * own));
    const auto next = at::cat({whole.narrow(1, 1, 11), at::full({2, 1}, -7, at::kDouble)}, 1);
    EXPECT_TRUE(kernels::cp_shift_next(whole.narrow(1, 4 * rank, 4), group, -7).equal(next.narrow(1, 4 * rank, 4)));
    EXPECT_TRUE(kernels::cp_shift_next(whole, nullptr, -7).equal(next));
    const auto x = at::full({2}, static_cast<double>(rank + 1)).set_requires_grad(true);
    EXPECT_TRUE(kernels::all_reduce_sum(x, group).equal(at::full({2}, 6.0)));
    EXPECT_TRUE(torch::autograd::grad({kernels::all_reduce_sum(x, group).sum() * 5}, {x})[0].equal(at::full({2}, 5.0)));
    EXPECT_THAT(error_of([&] {
                  kernels::allgather_cp_sharded_tensor(at::zeros({2, rank == 0 ? 5 : 1}), group);
                }),
                HasSubstr("rank 0 of the context-parallel group has 5 of 7 tokens, wanted 3"));
    EXPECT_THAT(error_of([&] {
                  kernels::cp_load_balanced_to_contiguous(
                      kernels::get_tokens_on_this_cp_rank(at::zeros({1, 7}), rank, 3), group);
                }),
                HasSubstr("as many on all"));
    EXPECT_THAT(error_of([&] { kernels::cp_shift_next(own, group, 0); }), HasSubstr("that needs a gradient"));
  });
}

}  // namespace
}  // namespace tessera
