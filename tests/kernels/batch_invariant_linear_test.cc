// Tests batch_invariant_linear, the gate and the paged attention of row models: values against plain operations, and
// equal bits for a row whatever other rows are in the call.
#include "tessera/kernels/linear/batch_invariant_linear.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "tessera/base/error.h"
#include "tessera/formats/gguf/gguf_quants.h"
#include "tessera/kernels/attention/paged_attention.h"
#include "tessera/kernels/simd/gemv_kernels.h"

namespace tessera {
namespace {

at::Tensor numbers(std::vector<int64_t> sizes, uint64_t seed) {
  auto tensor = at::empty(sizes);
  std::mt19937 random(static_cast<unsigned>(seed));
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < tensor.numel(); ++i) tensor.data_ptr<float>()[i] = normal(random);
  return tensor;
}

TEST(BatchInvariantLinear, EqualsAtLinear) {
  for (const int64_t in : {1, 15, 16, 37, 200}) {
    for (const int64_t rows : {1, 2, 5, 6, 7, 8, 13, 16, 40}) {
      const auto x = numbers({rows, in}, 1), weight = numbers({53, in}, 2), bias = numbers({53}, 3);
      const auto expected = at::linear(x.to(at::kDouble), weight.to(at::kDouble), bias.to(at::kDouble));
      const auto found = kernels::batch_invariant_linear(
          x, kernels::InferenceWeight::of(weight, kernels::WeightFormat::kFloat32), bias);
      EXPECT_LT((found - expected).abs().max().item<double>(), 1e-4) << rows << " rows of " << in;
      const auto half = weight.to(at::kBFloat16);
      const auto of_half =
          kernels::batch_invariant_linear(x, kernels::InferenceWeight::of(half, kernels::WeightFormat::kBFloat16));
      EXPECT_LT((of_half - at::linear(x, half.to(at::kFloat))).abs().max().item<double>(), 1e-4);
    }
  }
}

// All fp16 bit patterns are tested except infinity and NaN; subnormal numbers are included.
TEST(BatchInvariantLinear, Fp16WeightsAreExactForAllBitPatterns) {
  const int64_t in = 83;
  auto bits = at::empty({1024, in}, at::kShort);
  for (int64_t i = 0; i < bits.numel(); ++i) {
    auto each = static_cast<uint16_t>(i * 40503);
    if ((each & 0x7C00) == 0x7C00) each &= 0x83FF;
    bits.data_ptr<int16_t>()[i] = static_cast<int16_t>(each);
  }
  const auto half = bits.view(at::kHalf);
  const auto weight = kernels::InferenceWeight::of(half, kernels::WeightFormat::kFloat16);
  EXPECT_EQ(weight.values().const_data_ptr(), half.const_data_ptr()) << "a copy was made";
  EXPECT_TRUE(at::equal(weight.dequantized(), half.to(at::kFloat)));
  const auto wide = kernels::InferenceWeight::of(half, kernels::WeightFormat::kFloat32);
  for (const int64_t rows : {1, 2, 4, 6, 8, 13, 16, 40}) {
    const auto x = numbers({rows, in}, 5);
    EXPECT_TRUE(at::equal(kernels::batch_invariant_linear(x, weight), kernels::batch_invariant_linear(x, wide)))
        << rows;
  }
  EXPECT_EQ(kernels::InferenceWeight::of(numbers({3, 5}, 1), kernels::WeightFormat::kFloat16).values().nbytes(), 30U);
}

TEST(BatchInvariantLinear, Int8ErrorIsWithinHalfAStep) {
  const auto weight = numbers({21, 70}, 4);
  weight[3].zero_();
  const auto packed = kernels::InferenceWeight::of(weight, kernels::WeightFormat::kInt8);
  const auto back = kernels::batch_invariant_linear(at::eye(70), packed).t();
  const auto step = weight.abs().amax(1, /*keepdim=*/true) / 127;
  EXPECT_TRUE((back - weight).abs().le(step * 0.501).all().item<bool>());
  EXPECT_EQ(packed.values().nbytes(), 21U * 70U);
}

TEST(BatchInvariantLinear, Int4ErrorIsWithinHalfAStepAndProductsUseTheDequantizedValues) {
  auto weight = numbers({53, 96}, 4);
  weight[3].zero_();
  weight[7].fill_(2.5);
  const auto packed = kernels::InferenceWeight::of(weight, kernels::WeightFormat::kInt4);
  EXPECT_EQ(packed.dtype(), kernels::WeightFormat::kInt4);
  EXPECT_EQ(packed.in(), 96);
  EXPECT_EQ(packed.values().nbytes(), 53U * 3U * 20U);
  const auto values = packed.dequantized();
  const auto blocks = weight.view({53, 3, 32});
  const auto step = (blocks.amax(2, true) - blocks.amin(2, true)) / 15;
  // The scale and the smallest value of a block are rounded to eleven bits.
  EXPECT_TRUE(
      (values.view({53, 3, 32}) - blocks).abs().le(step * 0.51 + blocks.abs().amax(2, true) / 1024).all().item<bool>());
  EXPECT_TRUE(at::equal(values[7], weight[7]));
  for (const int64_t rows : {1, 2, 3, 4, 5, 8, 13, 32, 45}) {
    const auto x = numbers({rows, 96}, 5);
    EXPECT_TRUE(at::equal(
        kernels::batch_invariant_linear(x, packed),
        kernels::batch_invariant_linear(x, kernels::InferenceWeight::of(values, kernels::WeightFormat::kFloat32))))
        << rows;
  }
}

TEST(BatchInvariantLinear, Int4KeepsTheValuesOfGgufQ41Blocks) {
  std::mt19937 random(8);
  const int64_t rows = 40, blocks = 5;
  std::vector<std::byte> bytes;
  const auto put = [&](uint16_t bits) {
    for (int i = 0; i < 2; ++i) bytes.push_back(static_cast<std::byte>(bits >> 8 * i));
  };
  for (int64_t block = 0; block < rows * blocks; ++block) {
    put(static_cast<uint16_t>(0x1400 + random() % 0x1000));  // the scale: fp16 of about 0.001 to 0.02
    put(static_cast<uint16_t>(0x9800 + random() % 0x1000));  // the minimum: fp16 of about -0.002 to -0.03
    for (int i = 0; i < 16; ++i) bytes.push_back(static_cast<std::byte>(random()));
    bytes.back() = std::byte{0xF0};  // codes 0 and 15 both occur, as in every block that was quantized from weights
  }
  auto values = at::empty({rows, blocks * 32});
  dequantize(GgmlType::kQ4_1, bytes, {values.data_ptr<float>(), static_cast<size_t>(values.numel())});
  const auto packed = kernels::InferenceWeight::of(values, kernels::WeightFormat::kInt4);
  EXPECT_TRUE(at::equal(packed.dequantized(), values));
  EXPECT_EQ(std::memcmp(packed.values().const_data_ptr(), bytes.data(), bytes.size()), 0);
}

TEST(BatchInvariantLinear, Int4RefusesOutOfRangeValuesAndUsesInt8ForPartialBlocks) {
  auto weight = numbers({4, 64}, 1);
  EXPECT_EQ(kernels::InferenceWeight::of(weight.narrow(1, 0, 40), kernels::WeightFormat::kInt4).dtype(),
            kernels::WeightFormat::kInt8);
  for (const float wrong : {NAN, INFINITY, 1e6F}) {
    weight[2][33] = wrong;
    EXPECT_THROW(kernels::InferenceWeight::of(weight, kernels::WeightFormat::kInt4), Error) << wrong;
  }
}

TEST(BatchInvariantLinear, RowsHaveTheSameBitsInAnyBatch) {
  for (const auto dtype :
       {kernels::WeightFormat::kFloat32, kernels::WeightFormat::kBFloat16, kernels::WeightFormat::kFloat16,
        kernels::WeightFormat::kInt8, kernels::WeightFormat::kInt4}) {
    const int64_t in = dtype == kernels::WeightFormat::kInt4 ? 96 : 83;
    const auto x = numbers({61, in}, 5);
    const auto weight = kernels::InferenceWeight::of(numbers({101, in}, 6), dtype);
    const auto all = kernels::batch_invariant_linear(x, weight);
    for (int64_t begin = 0; begin < 61; begin += 7) {
      for (int64_t count = 1; begin + count <= 61; count += 5) {
        ASSERT_TRUE(
            at::equal(kernels::batch_invariant_linear(x.narrow(0, begin, count), weight), all.narrow(0, begin, count)));
      }
    }
  }
}

TEST(BatchInvariantLinear, SeveralWeightsInOneCallEqualSeparateCalls) {
  const auto x = numbers({3, 20}, 1);
  const auto a = kernels::InferenceWeight::of(numbers({33, 20}, 2), kernels::WeightFormat::kFloat32),
             b = kernels::InferenceWeight::of(numbers({5, 20}, 3), kernels::WeightFormat::kInt8);
  const std::array<const kernels::InferenceWeight*, 2> both = {&a, &b};
  const auto found = kernels::batch_invariant_linears(x, both);
  EXPECT_TRUE(at::equal(found[0], kernels::batch_invariant_linear(x, a)));
  EXPECT_TRUE(at::equal(found[1], kernels::batch_invariant_linear(x, b)));
  EXPECT_THROW(kernels::batch_invariant_linear(numbers({3, 21}, 1), a), Error);
  EXPECT_THROW(kernels::batch_invariant_linear(x.to(at::kDouble), a), Error);
}

TEST(BatchInvariantLinear, EmptyInputsGiveZerosOrNoRows) {
  const auto weight = kernels::InferenceWeight::of(at::empty({5, 0}), kernels::WeightFormat::kFloat32);
  EXPECT_TRUE(at::equal(kernels::batch_invariant_linear(at::empty({3, 0}), weight), at::zeros({3, 5})));
  EXPECT_EQ(kernels::batch_invariant_linear(
                at::empty({2, 0, 7}), kernels::InferenceWeight::of(numbers({5, 7}, 1), kernels::WeightFormat::kInt8))
                .sizes(),
            (at::IntArrayRef{2, 0, 5}));
}

TEST(BatchInvariantGate, EqualsActivationTimesUp) {
  const auto gate = numbers({5, 77}, 1).mul(8), up = numbers({5, 77}, 2);
  EXPECT_LT((kernels::batch_invariant_gate(gate, up, false) - at::silu(gate) * up).abs().max().item<double>(), 2e-5);
  EXPECT_LT((kernels::batch_invariant_gate(gate, up, true) - at::gelu(gate, "tanh") * up).abs().max().item<double>(),
            2e-5);
  const auto far = at::tensor({-1e4F, 1e4F, -90.F, 90.F});
  EXPECT_LT((kernels::batch_invariant_gate(far, at::ones(4), false) - at::silu(far)).abs().max().item<double>(), 1e-3);
}

TEST(PagedAttention, EqualsAttentionOverContiguousKeys) {
  const int64_t heads = 6, kv_heads = 2, d = 20, length = 45;
  const auto q = numbers({length, heads, d}, 1), k = numbers({length, kv_heads, d}, 2),
             v = numbers({length, kv_heads, d}, 3);
  const std::vector<int32_t> pages = {4, 0, 2};
  auto keys = at::full({5, kv_heads, kernels::kPageTokens, d}, std::nan("")), values = keys.clone();
  for (int64_t t = 0; t < length; ++t) {
    keys[pages[static_cast<size_t>(t / kernels::kPageTokens)]].select(1, t % kernels::kPageTokens).copy_(k[t]);
    values[pages[static_cast<size_t>(t / kernels::kPageTokens)]].select(1, t % kernels::kPageTokens).copy_(v[t]);
  }
  for (const int64_t window : {0, 7, 20}) {
    for (const double softcap : {0.0, 3.0}) {
      const auto rk = k.repeat_interleave(heads / kv_heads, 1), rv = v.repeat_interleave(heads / kv_heads, 1);
      auto scores = at::einsum("thd,shd->hts", {q, rk}) / std::sqrt(static_cast<double>(d));
      if (softcap > 0) scores = (scores / softcap).tanh() * softcap;
      const auto distance = at::arange(length).unsqueeze(1) - at::arange(length);
      auto hidden = distance.lt(0);
      if (window > 0) hidden = hidden.logical_or(distance.ge(window));
      const auto expected = at::einsum("hts,shd->thd", {at::softmax(scores.masked_fill(hidden, -INFINITY), -1), rv});
      const auto attend = [&](int64_t first, int64_t rows) {
        const std::vector<kernels::PagedSequence> one = {
            {.first_row = 0, .rows = rows, .first_position = first, .pages = pages}};
        return kernels::paged_attention({.queries = q.narrow(0, first, rows).contiguous(),
                                         .keys = keys,
                                         .values = values,
                                         .sequences = one,
                                         .window = window,
                                         .softcap = softcap});
      };
      const auto whole = attend(0, length);
      EXPECT_LT((whole - expected).abs().max().item<double>(), 1e-5) << window << " " << softcap;
      for (const int64_t first : {0, 1, 15, 16, 17, 44}) {
        ASSERT_TRUE(at::equal(attend(first, 1), whole.narrow(0, first, 1))) << first;
      }
      EXPECT_TRUE(at::equal(attend(13, 20), whole.narrow(0, 13, 20)));
    }
  }
}

// A token with broken values (NaN) may be in a page that other tokens of the call attend to in part.
TEST(PagedAttention, InvisibleValuesDoNotAffectTheResult) {
  const int64_t d = 20, length = 40;
  const std::vector<int32_t> pages = {0, 1, 2};
  const auto q = numbers({length, 2, d}, 1), keys = numbers({3, 1, kernels::kPageTokens, d}, 2);
  const auto values = numbers({3, 1, kernels::kPageTokens, d}, 3);
  const auto attend = [&](const at::Tensor& of, int64_t window) {
    const std::vector<kernels::PagedSequence> one = {
        {.first_row = 0, .rows = length, .first_position = 0, .pages = pages}};
    return kernels::paged_attention({.queries = q, .keys = keys, .values = of, .sequences = one, .window = window});
  };
  auto broken = values.clone();
  broken[1][0][5].fill_(INFINITY);
  broken[1][0][6].fill_(std::nan(""));
  for (const int64_t window : {0, 4}) {
    const auto right = attend(values, window), found = attend(broken, window);
    EXPECT_TRUE(at::equal(found.narrow(0, 0, 21), right.narrow(0, 0, 21))) << window;
    const int64_t seen = window == 0 ? length - 22 : window, after = 22 + seen;
    EXPECT_TRUE(found.narrow(0, 22, seen).isnan().all().item<bool>()) << window;
    EXPECT_TRUE(at::equal(found.narrow(0, after, length - after), right.narrow(0, after, length - after))) << window;
  }
}

TEST(GemvKernels, AllInstructionSetsAgreeUpToRounding) {
  const auto x = numbers({9, 75}, 1), weight = numbers({31, 75}, 2);
  std::vector<const kernels::GemvKernels*> all = {&kernels::plain_gemv_kernels()};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    all.push_back(&kernels::avx2_gemv_kernels());
  }
#endif
  all.push_back(&kernels::gemv_kernels());
  for (const auto* kernels : all) {
    auto y = at::empty({9, 31});
    kernels->float32(x.const_data_ptr<float>(), 9, 75, weight.const_data_ptr<float>(), nullptr, 31, 75,
                     y.data_ptr<float>(), 31);
    EXPECT_LT((y - at::linear(x, weight)).abs().max().item<double>(), 1e-4) << kernels->name;
    const auto half = weight.to(at::kHalf);
    kernels->float16(x.const_data_ptr<float>(), 9, 75, static_cast<const kernels::Float16*>(half.const_data_ptr()),
                     nullptr, 31, 75, y.data_ptr<float>(), 31);
    EXPECT_LT((y - at::linear(x, half.to(at::kFloat))).abs().max().item<double>(), 1e-4) << kernels->name;
    const auto blocks = kernels::InferenceWeight::of(numbers({31, 96}, 3), kernels::WeightFormat::kInt4);
    const auto wide = numbers({9, 96}, 4);
    kernels->q4(wide.const_data_ptr<float>(), 9, 96,
                reinterpret_cast<const kernels::Q4Block*>(blocks.values().const_data_ptr<uint8_t>()), nullptr, 31, 96,
                y.data_ptr<float>(), 31);
    EXPECT_LT((y - at::linear(wide, blocks.dequantized())).abs().max().item<double>(), 1e-4) << kernels->name;
  }
}

}  // namespace
}  // namespace tessera
