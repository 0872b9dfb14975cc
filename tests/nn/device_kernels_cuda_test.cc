// Tests the layers for which CUDA has kernels of its own against the CPU's values: attention by lengths, float8
// products, packed weights. tests/devices has the same tests on the pretend device, with more cases.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/kernels/attention/flash_attention.h"
#include "tessera/kernels/attention/partial_attention.h"
#include "tessera/kernels/linear/float8.h"
#include "tessera/kernels/linear/quantized_weight.h"
#include "tessera/nn/attention/attention_pattern.h"

namespace tessera::nn {
namespace {

void expect_close(const at::Tensor& found, const at::Tensor& wanted, double tolerance, const std::string& what) {
  const auto there = found.cpu().to(at::kFloat);
  const double most = std::max(1.0, wanted.abs().max().item<double>());
  EXPECT_LE((there - wanted).abs().max().item<double>(), tolerance * most) << what;
}

// Returns the result and the gradients of q, k and v, with tokens before heads.
std::vector<at::Tensor> attended_on(c10::Device device, at::ScalarType type, const at::Tensor& ids, int64_t window) {
  const int64_t rows = ids.size(0), tokens = ids.size(1);
  const auto drawn = [&](int64_t heads, uint64_t seed) {
    const auto generator = at::detail::createCPUGenerator(seed);
    return at::randn({rows, tokens, heads, 64}, generator, at::kFloat).to(at::kBFloat16).to(device, type);
  };
  const auto weight = drawn(4, 4) * ids.ge(0).view({rows, tokens, 1, 1}).to(device);
  std::vector<at::Tensor> leaves = {drawn(4, 1), drawn(2, 2), drawn(2, 3)};
  for (auto& leaf : leaves) leaf.requires_grad_();
  const auto pattern = attention_pattern(
      {.rows = rows, .tokens = tokens, .document_ids = ids, .sliding_window = window}, leaves[0].options());
  const auto out =
      attend(leaves[0].transpose(1, 2), leaves[1].transpose(1, 2), leaves[2].transpose(1, 2), pattern).transpose(1, 2);
  (out * weight).sum().backward();
  return {out.detach(), leaves[0].grad(), leaves[1].grad(), leaves[2].grad()};
}

TEST(FlashAttentionCuda, DocumentsAndWindowsEqualTheCpu) {
  if (!at::hasCUDA()) {
    GTEST_SKIP() << "no CUDA device";
  }
  const c10::Device device(c10::kCUDA, 0);
  const auto ids = at::arange(600).floor_divide(170).view({1, 600}).repeat({2, 1});
  ids[1].narrow(0, 500, 100).fill_(-1);
  ids[1].narrow(0, 40, 7).fill_(-1);
  ids[1].narrow(0, 47, 123).fill_(9);
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    ASSERT_TRUE(kernels::has_flash_attention(device, type)) << "in 16 bits compute capability 8.0 or later has it";
    for (const int64_t window : {0, 33}) {
      const auto wanted = attended_on(c10::kCPU, at::kFloat, ids, window);
      const auto found = attended_on(device, type, ids, window);
      for (size_t i = 0; i < wanted.size(); ++i) {
        expect_close(
            found[i], wanted[i], type == at::kFloat ? 1e-4 : 2e-2,
            std::string(c10::toString(type)) + ", window " + std::to_string(window) + ", " + std::to_string(i));
      }
    }
  }
}

// The ranks of a context-parallel group compute attention to parts of the keys. The parts are joined to the whole
// result, forward and backward.
TEST(FlashAttentionCuda, KeyShardsMergeToTheFullResult) {
  if (!at::hasCUDA()) {
    GTEST_SKIP() << "no CUDA device";
  }
  constexpr int64_t kTokens = 90, kHalf = 45;  // the lengths are not a multiple of a block of 32
  const auto part_of = [](const at::Tensor& heads, int64_t begin) { return heads.narrow(2, begin, kHalf); };
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    std::vector<at::Tensor> of;  // q, k, v and the gradient of the result, [B, H, T, d]
    for (uint64_t seed = 1; seed <= 4; ++seed) {
      const auto generator = at::detail::createCPUGenerator(seed);
      const int64_t heads = seed == 2 || seed == 3 ? 2 : 4;
      of.push_back(at::randn({2, kTokens, heads, 64}, generator, at::kFloat).to(type).transpose(1, 2));
    }
    const auto results = [&](c10::Device device) {
      const auto q = of[0].to(device), k = of[1].to(device), v = of[2].to(device), gradient = of[3].to(device);
      const auto late = part_of(q, kHalf);
      kernels::PartialAttentionMerger sums(late);
      sums.add(kernels::partial_attention_forward(late, part_of(k, 0), part_of(v, 0), {}), 0, 0);
      sums.add(kernels::partial_attention_forward(late, part_of(k, kHalf), part_of(v, kHalf), {.causal = true}), 0, 0);
      const auto joined = sums.merged();
      const kernels::PartialAttention whole{joined.out.to(type), joined.log_sums};
      std::vector<at::Tensor> out = {whole.out, whole.log_sums};
      for (const bool causal : {false, true}) {
        const int64_t begin = causal ? kHalf : 0;
        const auto gradients = kernels::partial_attention_backward(part_of(gradient, kHalf), late, part_of(k, begin),
                                                                   part_of(v, begin), whole, {.causal = causal});
        for (const auto& each : {gradients.q, gradients.k, gradients.v}) out.push_back(each.to(at::kFloat));
      }
      return out;
    };
    const auto wanted = results(c10::kCPU), found = results(c10::Device(c10::kCUDA, 0));
    for (size_t i = 0; i < wanted.size(); ++i) {
      expect_close(found[i], wanted[i].to(at::kFloat), type == at::kFloat ? 1e-4 : 3e-2,
                   std::string(c10::toString(type)) + ", " + std::to_string(i));
    }
  }
}

TEST(Float8Cuda, ProductsEqualThoseOfTheDequantizedValues) {
  if (!at::hasCUDA()) {
    GTEST_SKIP() << "no CUDA device";
  }
  const c10::Device device(c10::kCUDA, 0);
  if (!kernels::has_float8_products(device)) {
    GTEST_SKIP() << "compute capability 8.9 or later has them";
  }
  for (const auto type : {at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
    const auto a = kernels::to_float8(at::randn({37, 50}), type),
               b = kernels::to_float8(at::randn({19, 50}), at::kFloat8_e4m3fn);
    const auto there = [&](const kernels::Float8Tensor& of) {
      return kernels::Float8Tensor{of.data.to(device), of.scale.to(device)};
    };
    for (const auto out : {at::kFloat, at::kBFloat16}) {
      expect_close(kernels::float8_product(there(a), there(b), out), kernels::float8_product(a, b, at::kFloat),
                   out == at::kFloat ? 1e-4 : 1e-2, c10::toString(out));
    }
  }
}

TEST(PackedWeightCuda, DequantizedValuesAreBitwiseEqualToTheCpu) {
  if (!at::hasCUDA()) {
    GTEST_SKIP() << "no CUDA device";
  }
  for (const bool twice : {false, true}) {
    const auto weight = kernels::QuantizedWeight::nf4(at::randn({300, 190}), {.double_quant = twice});
    EXPECT_TRUE(
        weight.to(c10::Device(c10::kCUDA, 0)).part(0, 1, 290).values().cpu().equal(weight.part(0, 1, 290).values()));
  }
}

}  // namespace
}  // namespace tessera::nn
