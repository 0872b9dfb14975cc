// Tests attention by lengths on the pretend device through the kernels of accelerators: flash attention in 16 bits and
// memory-efficient attention in float32. The pretend device's kernels have the requirements of CUDA's. The reference is
// the CPU's attention in float32, which tests/nn compares with masked scores.
#include <fmt/format.h>

#include <array>

#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/kernels/attention/flash_attention.h"
#include "tessera/kernels/attention/partial_attention.h"
#include "tessera/kernels/autograd/activation_checkpoint_cache.h"
#include "tessera/nn/attention/attention_pattern.h"
#include "tests/devices/pretend.h"
#include "tests/parallel/small_model.h"
#include "tests/support/peak_memory.h"

namespace tessera::testing {
namespace {

using ::testing::AnyOf;
using ::testing::Contains;
using ::testing::IsEmpty;
using ::testing::Not;
using FlashOnDevice = OnPretendDevice;

constexpr int64_t kTokens = 60;

struct RowsOfDocuments {
  std::string name;
  at::Tensor ids;  // [2, kTokens], or undefined
  int64_t window = 0;
};

// Documents of several lengths; padding at the end, in the middle and at the start; a row without documents; windows.
std::vector<RowsOfDocuments> rows_of_documents() {
  const auto packed = at::zeros({2, kTokens}, at::kLong);
  packed[0].narrow(0, 20, 7).fill_(3);
  packed[0].narrow(0, 27, 33).fill_(4);
  packed[1].narrow(0, 0, 4).fill_(-1);
  packed[1].narrow(0, 30, 5).fill_(-1);
  packed[1].narrow(0, 35, 20).fill_(1);
  packed[1].narrow(0, 55, 5).fill_(-1);
  auto nothing = packed.clone();
  nothing[1].fill_(-1);
  const auto whole = at::zeros({2, kTokens}, at::kLong);
  whole[0].narrow(0, 30, 30).fill_(1);
  return {{"packed", packed},
          {"a row of padding", nothing},
          {"no padding", whole},
          {"packed, window", packed, 6},
          {"rows longer than a window", {}, 9}};
}

at::Tensor drawn_heads(int64_t heads, int64_t d, uint64_t seed) {
  return at::randn({2, kTokens, heads, d}, at::detail::createCPUGenerator(seed), at::kFloat).to(at::kBFloat16);
}

struct Attended {
  at::Tensor out, q, k, v;
};

struct Operands {
  at::Tensor q, k, v, weight;
  Operands on(c10::Device device, at::ScalarType type) const {
    const auto there = [&](const at::Tensor& each) { return each.to(device, type); };
    return {there(q), there(k), there(v), there(weight)};
  }
};

Operands operands(const at::Tensor& ids, int64_t groups, int64_t d) {
  Operands out{drawn_heads(4, d, 1), drawn_heads(groups, d, 2), drawn_heads(groups, d, 3), drawn_heads(4, d, 4)};
  if (ids.defined()) out.weight = out.weight * ids.ge(0).view({2, kTokens, 1, 1});  // padding has no loss
  return out;
}

Attended attended(const Operands& of, const nn::AttentionPattern& pattern,
                  const nn::AttentionScoreOptions& scores = {}) {
  const auto leaf = [](const at::Tensor& each) { return each.detach().clone().set_requires_grad(true); };
  const auto q = leaf(of.q), k = leaf(of.k), v = leaf(of.v);
  const auto out = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), pattern, scores).transpose(1, 2);
  (out * of.weight).sum().backward();
  return {out.detach(), q.grad(), k.grad(), v.grad()};
}

void expect_close(const Attended& found, const Attended& wanted, const std::string& what) {
  const double within = found.out.scalar_type() == at::kFloat ? 1e-5 : 2e-2;
  const auto expect_near = [&](const at::Tensor& ours, const at::Tensor& theirs, const char* which) {
    const double most = std::max(1.0, theirs.abs().max().item<double>());
    EXPECT_LE((ours.cpu().to(at::kFloat) - theirs).abs().max().item<double>(), within * most) << what << ", " << which;
  };
  expect_near(found.out, wanted.out, "result");
  expect_near(found.q, wanted.q, "dq");
  expect_near(found.k, wanted.k, "dk");
  expect_near(found.v, wanted.v, "dv");
}

nn::AttentionPattern pattern_of(const RowsOfDocuments& rows, const at::TensorOptions& options) {
  return nn::attention_pattern({.rows = 2, .tokens = kTokens, .document_ids = rows.ids, .sliding_window = rows.window},
                               options);
}

constexpr std::array kTypes = {at::kBFloat16, at::kFloat};

std::string kernel_of(at::ScalarType type, bool backward = false) {
  return fmt::format("aten::_{}_attention_{}", type == at::kFloat ? "efficient" : "flash",
                     backward ? "backward" : "forward");
}

auto launches_either() { return AnyOf(kernel_of(at::kFloat), kernel_of(at::kBFloat16)); }

std::vector<std::string> launches_of(const std::function<void()>& body) {
  for (const auto type : kTypes) kernels::has_flash_attention(pretend_device(), type);  // one trial per process
  pretend::keep_names(true);
  pretend::take_launches(0);
  body();
  pretend::keep_names(false);
  std::vector<std::string> names;
  for (const auto& launch : pretend::take_launches(0)) names.push_back(launch.name);
  return names;
}

std::vector<std::pair<int64_t, at::ScalarType>> groups_and_types() {
  std::vector<std::pair<int64_t, at::ScalarType>> out;
  for (const auto type : kTypes) {
    for (const int64_t groups : {4, 2, 1}) out.emplace_back(groups, type);
  }
  return out;
}

TEST_F(FlashOnDevice, DocumentsAndWindowsEqualTheCpuWithOneKernel) {
  for (const auto& rows : rows_of_documents()) {
    for (const auto& [groups, type] : groups_and_types()) {
      ASSERT_TRUE(kernels::has_flash_attention(pretend_device(), type));
      const auto host = operands(rows.ids, groups, 16);
      const auto there = host.on(pretend_device(), type);
      const nn::AttentionScoreOptions scores{.scale = groups == 2 ? 0.3 : 0.0};
      const auto wanted = attended(host.on(c10::kCPU, at::kFloat), pattern_of(rows, at::kFloat), scores);
      Attended found;
      const auto before = pretend::counters(0);
      const auto names = launches_of([&] { found = attended(there, pattern_of(rows, there.q.options()), scores); });
      const auto cost = pretend::counters(0) - before;
      EXPECT_EQ(cost.host_syncs, 0) << rows.name;
      EXPECT_EQ(cost.pageable_copies, 0) << rows.name;
      EXPECT_EQ(std::ranges::count(names, kernel_of(type)), 1) << rows.name;
      EXPECT_EQ(std::ranges::count(names, kernel_of(type, true)), 1) << rows.name;
      EXPECT_THAT(names, Not(Contains("aten::softmax")));
      expect_close(found, wanted, fmt::format("{}, {} groups, {}", rows.name, groups, c10::toString(type)));
      if (rows.ids.defined()) {
        const auto padding = rows.ids.lt(0).view({2, kTokens, 1, 1});
        EXPECT_EQ(found.out.cpu().mul(padding).abs().max().item<float>(), 0) << rows.name;
      }
    }
  }
}

// Calls that the kernels do not support are computed separately for each piece of the attention pattern.
TEST_F(FlashOnDevice, UnsupportedHeadSizesDtypesAndSoftcapsFallBack) {
  const auto rows = rows_of_documents().front();
  for (const auto& [d, type, softcap] : {std::tuple<int64_t, at::ScalarType, double>{12, at::kBFloat16, 0},
                                         {12, at::kFloat, 0},
                                         {16, at::kDouble, 0},
                                         {16, at::kFloat, 2},
                                         {16, at::kBFloat16, 2}}) {
    const auto host = operands(rows.ids, 2, d);
    const auto there = host.on(pretend_device(), type);
    const nn::AttentionScoreOptions scores{.softcap = softcap};
    const auto wanted = attended(host.on(c10::kCPU, at::kFloat), pattern_of(rows, at::kFloat), scores);
    Attended found;
    const auto names = launches_of([&] { found = attended(there, pattern_of(rows, there.q.options()), scores); });
    EXPECT_THAT(names, Not(Contains(launches_either())));
    expect_close(found, wanted, fmt::format("heads of {}", d));
  }
  for (const auto type : kTypes) EXPECT_FALSE(kernels::has_flash_attention(c10::kCPU, type));
  EXPECT_FALSE(kernels::has_flash_attention(pretend_device(), at::kDouble));
}

TEST_F(FlashOnDevice, UsesTheResultSavedBySelectiveCheckpointing) {
  const auto rows = rows_of_documents().front();
  for (const auto type : kTypes) {
    const auto there = operands(rows.ids, 2, 16).on(pretend_device(), type);
    const auto pattern = pattern_of(rows, there.q.options());
    const auto wanted = attended(there, pattern);
    const auto kept = std::make_shared<kernels::ActivationCheckpointCache>();
    {
      const kernels::ActivationCheckpointCache::Scope record(kept, kernels::ActivationCheckpointCache::Mode::kRecord);
      const at::NoGradGuard no_grad;
      attend(there.q.transpose(1, 2), there.k.transpose(1, 2), there.v.transpose(1, 2), pattern);
    }
    Attended found;
    const auto names = launches_of([&] {
      const kernels::ActivationCheckpointCache::Scope replay(kept, kernels::ActivationCheckpointCache::Mode::kReplay);
      found = attended(there, pattern);
    });
    EXPECT_THAT(names, Not(Contains(launches_either())));
    EXPECT_TRUE(at::equal(found.out.cpu(), wanted.out.cpu()));
    EXPECT_TRUE(at::equal(found.k.cpu(), wanted.k.cpu()));
  }
}

// The ranks of a context-parallel group compute attention to parts of the keys.
TEST_F(FlashOnDevice, PartialAttentionsMergeToFullAttention) {
  const auto host = operands({}, 2, 16);
  for (const auto type : kTypes) {
    const auto there = host.on(pretend_device(), type);
    const auto first = [](const at::Tensor& tensor) { return tensor.transpose(1, 2); };
    const auto q = first(there.q), k = first(there.k), v = first(there.v), gradient = first(there.weight);
    const int64_t half = kTokens / 2;
    const auto late = [&](const at::Tensor& of) { return of.narrow(2, half, half); };
    const auto early = [&](const at::Tensor& of) { return of.narrow(2, 0, half); };
    kernels::PartialAttentionMerger sums(late(q));
    const auto names = launches_of([&] {
      sums.add(kernels::partial_attention_forward(late(q), early(k), early(v), {}), 0, 0);
      sums.add(kernels::partial_attention_forward(late(q), late(k), late(v), {.causal = true}), 0, 0);
    });
    EXPECT_EQ(std::ranges::count(names, kernel_of(type)), 2);
    const auto joined = sums.merged();
    const kernels::PartialAttention whole{joined.out.to(type), joined.log_sums};
    const auto of_early = kernels::partial_attention_backward(late(gradient), late(q), early(k), early(v), whole, {}),
               of_late = kernels::partial_attention_backward(late(gradient), late(q), late(k), late(v), whole,
                                                             {.causal = true});
    const auto plain = host.on(c10::kCPU, at::kFloat);
    const auto wanted = attended({plain.q, plain.k, plain.v,
                                  [&] {
                                    auto weight = plain.weight.clone();
                                    weight.narrow(1, 0, half).zero_();
                                    return weight;
                                  }()},
                                 {});
    const auto back = [](const at::Tensor& tensor) { return tensor.transpose(1, 2); };
    expect_close({back(whole.out), back(of_early.q.to(at::kFloat) + of_late.q),
                  back(at::cat({of_early.k, of_late.k}, 2)), back(at::cat({of_early.v, of_late.v}, 2))},
                 {wanted.out.narrow(1, half, half), wanted.q.narrow(1, half, half), wanted.k, wanted.v}, "two parts");
  }
}

TEST(FlashOnDevices, HeadsShardedOverRanksEqualTheCpu) {
  pretend::take_faults();
  on_threads(2, [](const WorldPtr& world) {
    const auto mesh = init_device_mesh(world, "pretend", {2});
    for (const auto& rows : rows_of_documents()) {
      for (const auto type : kTypes) {
        const auto host = operands(rows.ids, 2, 16);
        const auto there = host.on(mesh->device(), type);
        const auto wanted = attended(host.on(c10::kCPU, at::kFloat), pattern_of(rows, at::kFloat));
        const auto cut = [&](const at::Tensor& each) {
          return distribute_tensor(each, mesh, {Shard(2)}, std::nullopt);
        };
        const auto found = attended({cut(there.q), cut(there.k), cut(there.v), cut(there.weight)},
                                    pattern_of(rows, there.q.options()));
        expect_close({full_tensor(found.out), full_tensor(found.q), full_tensor(found.k), full_tensor(found.v)}, wanted,
                     rows.name);
      }
    }
  });
  EXPECT_THAT(pretend::take_faults(), IsEmpty());
}

// The memory is proportional to the tokens, not to the pairs of tokens.
TEST_F(FlashOnDevice, ARowOf32kTokensNeedsTwiceTheMemoryOf16k) {
  constexpr int64_t kHeads = 2, kHeadSize = 8;
  const auto peak = [](int64_t tokens, int64_t window, at::ScalarType type) {
    const auto ids = at::arange(tokens, at::kLong).floor_divide_(64).unsqueeze(0);
    const auto x = at::randn({1, tokens, kHeads, kHeadSize}).to(pretend_device(), type);
    const auto heads = x.transpose(1, 2).requires_grad_();
    return peak_bytes_of(pretend_device(), [&] {
      const auto pattern =
          nn::attention_pattern({.tokens = tokens, .document_ids = ids, .sliding_window = window}, x.options());
      attend(heads, heads, heads, pattern).sum().backward();
    });
  };
  for (const auto& [window, type] :
       {std::pair<int64_t, at::ScalarType>{0, at::kBFloat16}, {30, at::kBFloat16}, {0, at::kFloat}}) {
    const int64_t half = peak(16384, window, type), all = peak(32768, window, type);
    EXPECT_LE(all, 2.2 * static_cast<double>(half)) << "window " << window;
    EXPECT_LE(all, int64_t{32768} * 32768 / 8);
  }
}

}  // namespace
}  // namespace tessera::testing
