// Tests of the scope in which plain attention runs over ranks.
#include <gmock/gmock.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/kernels/attention/context_layout.h"
#include "tessera/nn/attention/attention_pattern.h"
#include "tessera/parallel/context_parallel/context_parallel.h"
#include "tests/parallel/parallel_families.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

at::Tensor scope_values(std::vector<int64_t> sizes, uint64_t seed) {
  return here(at::randn(sizes, at::detail::createCPUGenerator(seed), at::TensorOptions(at::kDouble)));
}

MeshPtr context_line(const WorldPtr& world) {
  return init_device_mesh(world, test_device_type(), {world->size()}, {"cp"});
}

TEST(ContextParallelScope, AttentionEqualsTheFullSequenceAndBuffersAreRestored) {
  for (const int ranks : {2, 3}) {
    on_threads(ranks, [ranks](const WorldPtr& world) {
      const auto mesh = context_line(world);
      for (const std::string method : {"allgather", "alltoall"}) {
        set_rotate_method(method);
        for (const int64_t tokens : {12, 3 * ranks, 11}) {
          std::vector<at::Tensor> whole, parts;
          for (const uint64_t seed : {1, 2, 3}) whole.push_back(scope_values({2, 4, tokens, 8}, seed));
          for (auto& each : whole) each.set_requires_grad(true);
          const auto wanted = at::scaled_dot_product_attention(whole[0], whole[1], whole[2], {}, 0.0, true);
          const auto wanted_grads = torch::autograd::grad({wanted.square().sum()}, {whole[0], whole[1], whole[2]});
          for (const auto& each : whole) parts.push_back(each.detach().clone());
          const auto positions = here(at::arange(tokens, at::kLong)).unsqueeze(0), gone = positions.clone();
          const auto layout = kernels::ContextLayout::of_pytorch(tokens, ranks);
          {
            const ContextParallel scope(mesh, {.buffers = {parts[0], parts[1], parts[2], positions, gone},
                                               .buffer_seq_dims = {2, 2, -2, 1, 1},
                                               .no_restore_buffers = {gone}});
            EXPECT_TRUE(positions.equal(here(layout.positions(world->rank())).unsqueeze(0)));
            std::vector<at::Tensor> leaves;
            for (const auto& each : parts) leaves.push_back(each.clone().set_requires_grad(true));
            const auto own = scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], {.is_causal = true});
            const auto same = nn::attend(leaves[0], leaves[1], leaves[2], {});
            EXPECT_TRUE(own.equal(same));
            const auto grads = torch::autograd::grad({own.square().sum()}, {leaves[0], leaves[1], leaves[2]});
            const auto all = context_parallel_unshard(mesh, {own, grads[0], grads[1], grads[2]}, {2, 2, 2, 2});
            EXPECT_TRUE(at::allclose(all[0], wanted, 1e-12, 1e-12)) << method << ", " << tokens;
            for (size_t i = 0; i < 3; ++i) {
              EXPECT_TRUE(at::allclose(all[i + 1], wanted_grads[i], 1e-11, 1e-12)) << method << ", " << tokens;
            }
          }
          EXPECT_TRUE(positions.equal(here(at::arange(tokens, at::kLong)).unsqueeze(0)));
          EXPECT_TRUE(gone.equal(here(layout.positions(world->rank())).unsqueeze(0)));
          for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(parts[i].equal(whole[i]));
          const auto outside = scaled_dot_product_attention(parts[0], parts[1], parts[2], {.is_causal = true});
          EXPECT_TRUE(at::allclose(outside, wanted, 1e-12, 1e-12)) << "plain again";
        }
      }
    });
  }
}

TEST(ContextParallelScope, NonCausalAttentionRequiresContiguousShards) {
  on_threads(2, [](const WorldPtr& world) {
    const auto mesh = context_line(world);
    const auto attend_all = [&](int64_t tokens) {
      const auto whole = scope_values({1, 2, tokens, 4}, 5), part = whole.clone();
      const ContextParallel scope(mesh, {.buffers = {part}, .buffer_seq_dims = {2}});
      const auto all = context_parallel_unshard(
          mesh, {scaled_dot_product_attention(part, part, part, ScaledDotProductAttentionOptions{})}, {2})[0];
      EXPECT_TRUE(at::allclose(all, at::scaled_dot_product_attention(whole, whole, whole), 1e-12, 1e-12));
    };
    attend_all(6);
    EXPECT_THAT(error_of([&] { attend_all(8); }), HasSubstr("Load balancing requires `is_causal=True`."));
  });
}

// Some layers have windows. Positions are not passed; the model uses the positions of the whole sequence.
TEST(ContextParallelScope, ModelLogitsEqualOneRank) {
  const auto tokens = here(at::arange(24, at::kLong)).mul_(7).remainder_(37).view({2, 12});
  for (const auto& family : {all_families(4, 2)[0], all_families(4, 2)[4]}) {
    const auto wanted = random_model(config_of(family))->logits({.tokens = tokens}).detach();
    on_threads(2, [&](const WorldPtr& world) {
      const auto mesh = context_line(world);
      const auto model = random_model(config_of(family));
      const auto own = here(tokens).clone();
      const c10::NoGradGuard no_grad;
      const ContextParallel scope(mesh, {.buffers = {own}, .buffer_seq_dims = {1}});
      const auto found = context_parallel_unshard(mesh, {model->logits({.tokens = own})}, {1})[0];
      EXPECT_TRUE(at::allclose(found, here(wanted), 1e-4, 1e-5)) << family.architecture;
    });
  }
}

// Layers are recomputed after the scope has ended. Their attention must still run over the ranks.
TEST(ContextParallelScope, BackwardOfACheckpointedModelWorksAfterTheScope) {
  const auto family = all_families(4, 2)[4];
  const auto tokens = here(at::arange(24, at::kLong)).mul_(7).remainder_(37).view({2, 12}),
             labels = tokens.add(3).fmod(37);
  const auto plain = random_model(config_of(family));
  plain->loss_sum({.tokens = tokens}, labels).backward();
  on_threads(2, [&](const WorldPtr& world) {
    const auto mesh = context_line(world);
    const auto model = random_model(config_of(family));
    std::vector<nn::Module*> layers;
    for (const auto& block : model->blocks()) layers.push_back(block.get());
    checkpoint_layers(layers, ActivationCheckpointing::kFull);
    at::Tensor loss;
    {
      const auto own = here(tokens).clone(), own_labels = here(labels).clone();
      const ContextParallel scope(
          mesh, {.buffers = {own, own_labels}, .buffer_seq_dims = {1, 1}, .no_restore_buffers = {own, own_labels}});
      loss = model->loss_sum({.tokens = own}, own_labels);
    }
    loss.backward();
    const auto wanted = plain->parameters(), found = model->parameters();
    for (size_t i = 0; i < wanted.size(); ++i) {
      auto sum = found[i].grad().clone();
      comm::all_reduce(*mesh->group(0), sum).wait();
      sum = sum.cpu();
      EXPECT_LE((sum - wanted[i].grad()).abs().max().item<double>(), 1e-4 * wanted[i].grad().abs().max().item<double>())
          << i;
    }
  });
}

TEST(ContextParallelScope, BackwardDetectsThatASavedBufferWasRestored) {
  on_threads(2, [](const WorldPtr& world) {
    const auto mesh = context_line(world);
    const auto buffer = here(at::arange(8.0)), x = here(at::ones({4})).set_requires_grad(true);
    at::Tensor y;
    {
      const ContextParallel scope(mesh, {.buffers = {buffer}, .buffer_seq_dims = {0}});
      y = (x * buffer).sum();
    }
    EXPECT_THROW(y.backward(), c10::Error);
  });
}

TEST(ContextParallelScope, InvalidArgumentsAreErrorsBeforeBuffersChange) {
  on_threads(2, [](const WorldPtr& world) {
    const auto mesh = context_line(world);
    const auto tokens = here(at::arange(8)).view({1, 8}), other = here(at::zeros({1, 8}));
    const auto refusal = [&](const MeshPtr& over, const ContextParallelOptions& options) {
      const auto text = error_of([&] { const ContextParallel scope(over, options); });
      EXPECT_EQ(tokens.size(1), 8);
      return text;
    };
    EXPECT_THAT(refusal(mesh, {.buffers = {tokens}}),
                HasSubstr("`seq_dims` must have the same number of elements as `buffers`."));
    EXPECT_THAT(refusal(mesh, {.buffers = {tokens}, .buffer_seq_dims = {1}, .no_restore_buffers = {other}}),
                HasSubstr("`no_restore_buffers` must be a subset of `buffers`."));
    EXPECT_THAT(refusal(mesh, {}), HasSubstr("no buffers"));
    EXPECT_THAT(refusal(mesh, {.buffers = {tokens, here(at::zeros({6}))}, .buffer_seq_dims = {1, 0}}),
                HasSubstr("buffer 1: found sequence dim 0 of [6]"));
    EXPECT_THAT(
        refusal(mesh, {.buffers = {tokens, here(at::zeros({8})).set_requires_grad(true)}, .buffer_seq_dims = {1, 0}}),
        HasSubstr("needs a gradient"));
    EXPECT_THAT(
        refusal(init_device_mesh(world, test_device_type(), {2, 1}), {.buffers = {tokens}, .buffer_seq_dims = {1}}),
        HasSubstr("wanted a 1-d mesh"));
    EXPECT_THAT(error_of([&] { set_rotate_method("ring"); }), HasSubstr("does not support using 'ring'"));
    EXPECT_THAT(error_of([&] { context_parallel_unshard(mesh, {tokens}, {}); }), HasSubstr("`seq_dims`"));
    const auto packed = nn::attention_pattern(
        {.tokens = 4, .document_ids = here(at::tensor({0, 0, 1, 1}, at::kLong)).unsqueeze(0)}, at::kFloat);
    const ContextParallel scope(mesh, {.buffers = {tokens}, .buffer_seq_dims = {1}});
    const auto x = here(at::zeros({1, 2, 8, 4}));
    EXPECT_THAT(error_of([&] { scaled_dot_product_attention(x, x, x, {.is_causal = true}); }),
                HasSubstr("this rank's tokens"));
    const auto documents = here(at::tensor({0, 0, 1, 1}, at::kLong)).unsqueeze(0);
    EXPECT_THAT(error_of([&] { nn::attention_pattern({.tokens = 4, .document_ids = documents}, at::kFloat); }),
                HasSubstr("inside a context_parallel scope, which supports one"));
    const auto own = here(at::zeros({1, 2, 4, 4}));
    EXPECT_THAT(error_of([&] { nn::attend(own, own, own, packed); }), HasSubstr("an attention pattern of 2 pieces"));
  });
}

}  // namespace
}  // namespace tessera::testing
