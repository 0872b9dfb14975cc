// Tests every kernel on every combination of placements, with even and uneven sizes, against plain operations on whole
// tensors.
#include <gmock/gmock.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/comm/collectives/collectives.h"
#include "tessera/kernels/attention/causal_attention.h"
#include "tessera/kernels/linear/linear.h"
#include "tessera/kernels/linear/linear_choice.h"
#include "tessera/kernels/loss/linear_cross_entropy.h"
#include "tessera/kernels/rows/gated.h"
#include "tessera/kernels/rows/rms_norm.h"
#include "tessera/kernels/rows/rotary.h"
#include "tessera/kernels/simd/vector_level.h"
#include "tests/dtensor/op_cases.h"
#include "tests/support/largest_allocation.h"
#include "tests/support/ranks.h"

namespace tessera {
namespace {

using testing::check_cases;
using testing::check_cases_on;
using ::testing::HasSubstr;
using testing::on_ranks;
using testing::OpCase;
using testing::Tensors;

using Run = std::function<at::Tensor(const Tensors&)>;

// Runs the kernel on DTensors and plain operations on whole tensors.
Run against(Run plain, Run kernel) {
  return [plain = std::move(plain), kernel = std::move(kernel)](const Tensors& t) {
    return (is_dtensor(t[0]) ? kernel : plain)(t);
  };
}

at::Tensor labels_of(int64_t rows, int64_t classes) {
  auto labels = at::arange(rows, at::kLong).mul_(5).remainder_(classes);
  if (rows > 2) labels[2] = kIgnoredLabel;
  return labels;
}

// A loss over sharded hidden states. The labels are a plain tensor, or a DTensor with the same sharding.
OpCase cross_entropy_case(int64_t rows, int64_t classes, int64_t chunk_bytes, bool cut_labels, double softcap = 0) {
  const auto labels = labels_of(rows, classes);
  return {"linear_cross_entropy of " + std::to_string(rows) + " rows, " + std::to_string(classes) + " classes",
          {{rows, 3}, {classes, 3}},
          against(
              [=](const Tensors& t) {
                auto logits = at::linear(t[0], t[1]);
                if (softcap > 0) logits = (logits / softcap).tanh() * softcap;
                return at::cross_entropy_loss(logits, labels, {}, at::Reduction::Sum, kIgnoredLabel);
              },
              [=](const Tensors& t) {
                const auto& mesh = device_mesh(t[0]);
                const Placements cut(static_cast<size_t>(mesh->ndim()), Shard(0));
                const auto given = cut_labels ? distribute_tensor(labels, mesh, cut, std::nullopt) : labels;
                return kernels::linear_cross_entropy(t[0], t[1], given,
                                                     {.chunk_bytes = chunk_bytes, .softcap = softcap});
              })};
}

std::vector<OpCase> linear_cases() {
  const Run with_bias = against([](const Tensors& t) { return at::linear(t[0], t[1], t[2]); },
                                [](const Tensors& t) { return tessera::kernels::linear(t[0], t[1], t[2]); });
  const Run without = against([](const Tensors& t) { return at::linear(t[0], t[1]); },
                              [](const Tensors& t) { return tessera::kernels::linear(t[0], t[1]); });
  return {{"linear", {{4, 8}, {12, 8}, {12}}, with_bias},
          {"linear, uneven", {{3, 5}, {7, 5}, {7}}, with_bias},
          {"linear of [B, T, d]", {{2, 5, 6}, {3, 6}}, without},
          {"linear of a vector", {{6}, {5, 6}}, without}};
}

std::vector<OpCase> row_cases() {
  std::vector<OpCase> cases;
  for (const auto& shape : std::vector<std::vector<int64_t>>{{4, 8}, {3, 5, 6}, {6}}) {
    cases.push_back(
        {"rms_norm",
         {shape, {shape.back()}},
         against([](const Tensors& t) { return t[1] * (t[0] * at::rsqrt(t[0].square().mean(-1, true) + 1e-5)); },
                 [](const Tensors& t) { return kernels::rms_norm(t[0], t[1], 1e-5); })});
    cases.push_back({"swiglu",
                     {shape, shape},
                     against([](const Tensors& t) { return at::silu(t[0]) * t[1]; },
                             [](const Tensors& t) { return kernels::swiglu(t[0], t[1]); })});
    cases.push_back({"geglu",
                     {shape, shape},
                     against([](const Tensors& t) { return at::gelu(t[0], "tanh") * t[1]; },
                             [](const Tensors& t) { return kernels::geglu(t[0], t[1]); })});
    cases.push_back(
        {"rms_norm, 1 + weight",
         {shape, {shape.back()}},
         against([](const Tensors& t) { return (1 + t[1]) * t[0] * at::rsqrt(t[0].square().mean(-1, true) + 1e-5); },
                 [](const Tensors& t) { return kernels::rms_norm(t[0], t[1], 1e-5, /*one_plus=*/true); })});
  }
  return cases;
}

// cos and sin are plain tensors of one row or of all rows, or DTensors that are sharded by tokens or rows.
std::vector<OpCase> rotary_cases() {
  std::vector<OpCase> cases;
  for (const int64_t batch : {1, 3}) {
    const auto angles = at::arange(static_cast<double>(batch * 5 * 2)).to(at::kFloat).view({batch, 5, 2});
    for (const auto& cut : std::vector<std::optional<Placement>>{std::nullopt, Replicate(), Shard(0), Shard(1)}) {
      cases.push_back({"rotary",
                       {{3, 5, 2, 4}},
                       against(
                           [angles](const Tensors& t) {
                             const auto c = at::cat({angles, angles}, -1).unsqueeze(2).cos();
                             const auto s = at::cat({angles, angles}, -1).unsqueeze(2).sin();
                             const auto halves = t[0].chunk(2, -1);
                             return t[0] * c + at::cat({-halves[1], halves[0]}, -1) * s;
                           },
                           [angles, cut](const Tensors& t) {
                             const auto place = [&](const at::Tensor& whole) {
                               const auto& mesh = device_mesh(t[0]);
                               return cut ? distribute_tensor(whole, mesh, {*cut}, std::nullopt) : whole;
                             };
                             return kernels::rotary(t[0], place(angles.cos()), place(angles.sin()));
                           })});
      cases.back().tolerance = 1e-6;  // angles are fp32
    }
  }
  return cases;
}

// Numbers of heads that divide evenly over the ranks, and numbers that do not; with and without documents.
std::vector<OpCase> attention_cases() {
  std::vector<OpCase> cases;
  for (const auto& [heads, groups] : std::vector<std::pair<int64_t, int64_t>>{{4, 4}, {4, 2}, {3, 1}, {3, 3}}) {
    for (const int64_t document : {5, 2}) {
      const auto first = at::arange(5, at::kLong).div(document, "floor").mul(document).expand({3, 5}).contiguous();
      const auto place = at::arange(5, at::kLong);
      const auto seen = place.unsqueeze(0).le(place.unsqueeze(1)).logical_and(place.ge(first[0].unsqueeze(1)));
      cases.push_back(
          {"causal_attention of " + std::to_string(heads) + " heads, " + std::to_string(groups) + " of keys",
           {{3, heads, 5, 4}, {3, groups, 5, 4}, {3, groups, 5, 4}},
           against(
               [seen](const Tensors& t) {
                 return at::scaled_dot_product_attention(t[0], t[1], t[2], seen, 0.0, false, std::nullopt,
                                                         /*enable_gqa=*/true);
               },
               [first](const Tensors& t) {
                 return kernels::causal_attention(t[0], t[1], t[2], {.first_key = first});
               })});
    }
  }
  return cases;
}

TEST(CausalAttentionOnDTensors, EqualsMaskedAttentionOnEveryPlacement) { check_cases({2, 4}, attention_cases()); }

TEST(LinearOnDTensors, EqualsPlainOperationsOnEveryPlacement) { check_cases({2, 4}, linear_cases()); }

TEST(RowKernelsOnDTensors, EqualPlainOperationsOnEveryPlacement) { check_cases({2, 4}, row_cases()); }

TEST(RotaryOnDTensors, EqualsPlainOperationsOnEveryPlacement) { check_cases({2, 4}, rotary_cases()); }

TEST(LinearCrossEntropyOnDTensors, EqualsPlainOperationsOnEveryPlacement) {
  std::vector<OpCase> cases;
  for (const bool cut_labels : {false, true}) {
    for (const int64_t chunk_bytes : {1, 100, 1 << 20}) {
      cases.push_back(cross_entropy_case(7, 6, chunk_bytes, cut_labels));
    }
    cases.push_back(cross_entropy_case(3, 3, 1, cut_labels));
    cases.push_back(cross_entropy_case(8, 12, 100, cut_labels));
    cases.push_back(cross_entropy_case(7, 6, 100, cut_labels, /*softcap=*/1.5));
  }
  check_cases({2, 4}, cases);
}

TEST(KernelsOnDTensors, EqualPlainOperationsOnTwoMeshDims) {
  auto cases = linear_cases();
  for (auto& each : row_cases()) cases.push_back(each);
  cases.push_back(cross_entropy_case(7, 6, 100, false));
  cases.push_back(cross_entropy_case(5, 3, 1, true));
  check_cases_on({2, 2}, cases, 12, 3);
}

// In fp32 the shards are computed by the kernels' own loops and, where it is faster, by oneDNN.
TEST(KernelsOnDTensors, FusedLoopsOnShardsEqualTheFullComputation) {
  const auto narrow = [](const Tensors& t) {
    Tensors out;
    for (const auto& each : t) out.push_back(each.to(at::kFloat));
    return out;
  };
  std::vector<OpCase> cases = {{"linear",
                                {{2, 36, 40}, {44, 40}, {44}},
                                [&](const Tensors& t) {
                                  const auto f = narrow(t);
                                  return tessera::kernels::linear(f[0], f[1], f[2]).to(at::kDouble);
                                }},
                               {"norm and gate", {{2, 9, 5}, {5}, {2, 9, 5}}, [&](const Tensors& t) {
                                  const auto f = narrow(t);
                                  return kernels::swiglu(kernels::rms_norm(f[0], f[1], 1e-5), f[2]).to(at::kDouble);
                                }}};
  for (auto& each : cases) each.tolerance = 1e-4;
  check_cases({2}, cases);
}

at::Tensor spread(const at::Tensor& whole, const MeshPtr& mesh, const Placements& how) {
  return distribute_tensor(whole.clone().set_requires_grad(whole.is_floating_point()), mesh, how, std::nullopt);
}

// A column-parallel layer, a row-parallel layer, and the loss over sharded classes. No operand is redistributed.
TEST(KernelsOnDTensors, TensorParallelBlockCommunicatesNoWeightsAndNoLogits) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const auto x = spread(at::randn({2, 6, 8}), mesh, {Replicate()});
    const auto norm = spread(at::ones({8}), mesh, {Replicate()});
    const auto gate = spread(at::randn({10, 8}), mesh, {Shard(0)}), up = spread(at::randn({10, 8}), mesh, {Shard(0)});
    const auto down = spread(at::randn({8, 10}), mesh, {Shard(1)}), head = spread(at::randn({50, 8}), mesh, {Shard(0)});
    const auto labels = labels_of(12, 50);
    const CommDebugMode comm;
    const auto normed = kernels::rms_norm(x, norm, 1e-5);
    const auto inner = kernels::swiglu(tessera::kernels::linear(normed, gate), tessera::kernels::linear(normed, up));
    EXPECT_EQ(placements(inner), Placements{Shard(2)});
    const auto y = tessera::kernels::linear(inner, down);
    EXPECT_EQ(placements(y), Placements{Partial()});
    EXPECT_EQ(comm.total(), 0);
    const auto loss = kernels::linear_cross_entropy(y.reshape({12, 8}), head, labels);
    EXPECT_EQ(placements(loss), Placements{Replicate()});
    EXPECT_EQ(comm.total(), 4) << "the hidden states and their gradient, a maximum and a sum of the chunk";
    loss.backward();
    EXPECT_EQ(comm.total(), 4);
    EXPECT_EQ(placements(gate.grad()), Placements{Shard(0)});
    EXPECT_EQ(placements(down.grad()), Placements{Shard(1)});
    EXPECT_EQ(placements(head.grad()), Placements{Shard(0)});
  });
}

TEST(LinearCrossEntropyOnDTensors, AllocatesAtMostOneChunkOfLogits) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    constexpr int64_t kRows = 512, kClasses = 2048;
    const auto hidden = spread(at::randn({kRows, 8}), mesh, {Replicate()});
    const auto head = spread(at::randn({kClasses, 8}), mesh, {Shard(0)});
    const auto record = std::make_shared<testing::LargestAllocation>();
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, record);
    kernels::linear_cross_entropy(hidden, head, labels_of(kRows, kClasses), {.chunk_bytes = 64 << 10}).backward();
    EXPECT_GE(record->largest, kClasses / 2 * 8 * 4) << "the recorder sees nothing";
    EXPECT_LE(record->largest, 64 << 10) << "all logits are " << kRows * kClasses * 4;
  });
}

TEST(LinearCrossEntropyOnDTensors, InvalidLabelOnOneRankIsTheSameErrorOnAllRanks) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const auto hidden = spread(at::randn({6, 8}), mesh, {Shard(0)});
    const auto head = spread(at::randn({10, 8}), mesh, {Replicate()});
    auto labels = labels_of(6, 10);
    labels[4] = 10;
    const auto error =
        testing::error_of([&] { kernels::linear_cross_entropy(hidden, head, spread(labels, mesh, {Shard(0)})); });
    EXPECT_THAT(error, HasSubstr("label 4: found 10"));
  });
}

TEST(KernelsOnDTensors, MissingSecondDerivativeIsAnError) {
  const auto q = at::randn({1, 2, 16, 32}).set_requires_grad(true), k = at::randn({1, 2, 16, 32});
  const auto first = torch::autograd::grad({kernels::causal_attention(q, k, k).square().sum()}, {q}, {}, true, true)[0];
  EXPECT_ANY_THROW(first.square().sum().backward());
}

// Hosts may have different processors.
TESSERA_RANKS_TEST(VectorLevel, IsTheMinimumOverAllRanks, (2)) {
  {
    const kernels::VectorLevelGuard own(world->rank() == 0 ? kernels::max_vector_level()
                                                           : kernels::VectorLevel::kPlain);
    kernels::synchronize_kernel_choices(*world->group());
  }
  EXPECT_EQ(kernels::vector_level(), kernels::VectorLevel::kPlain);
  comm::barrier(*world->group());  // thread ranks share the choice
}

// Each host may have measured a different kernel as the fastest.
TESSERA_RANKS_TEST(LinearKernel, IsTheFirstRanksChoiceOnAllRanks, (2)) {
  if (!kernels::has_onednn()) {
    GTEST_SKIP() << "this libtorch has no oneDNN";
  }
  for (const bool onednn : {true, false}) {
    {
      const kernels::LinearKernelGuard measured((world->rank() == 0) == onednn);
      kernels::synchronize_kernel_choices(*world->group());
    }
    EXPECT_EQ(kernels::linear_kernel_name(), onednn ? "onednn" : "aten");
    comm::barrier(*world->group());  // thread ranks share the choice
  }
}

}  // namespace
}  // namespace tessera
