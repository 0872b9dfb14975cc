// Tests packed weights against plain references: NF4 against its definition, and GGUF's blocks against the decoder in
// tessera/formats.
#include "tessera/kernels/linear/quantized_weight.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"

namespace tessera {
namespace {

at::Tensor some_weight(int64_t out, int64_t in, uint64_t seed = 3) {
  return at::randn({out, in}, at::detail::createCPUGenerator(seed), at::kFloat);
}

// Quantizes element by element. Each element divided by its block's largest becomes the nearest of the 16 values.
at::Tensor nf4_by_definition(const at::Tensor& weight) {
  const auto codes =
      at::tensor(std::vector<float>(kernels::nf4_values().begin(), kernels::nf4_values().end()), at::kFloat);
  const auto flat = weight.reshape({-1});
  std::vector<at::Tensor> blocks;
  for (int64_t first = 0; first < flat.numel(); first += 64) {
    const auto block = flat.slice(0, first, std::min(first + 64, flat.numel()));
    const auto largest = block.abs().max();
    if (largest.item<float>() == 0) {
      blocks.push_back(at::zeros_like(block));
      continue;
    }
    const auto nearest = (block.div(largest).unsqueeze(1) - codes.unsqueeze(0)).abs().argmin(1);
    blocks.push_back(codes.index({nearest}) * largest);
  }
  return at::cat(blocks).view(weight.sizes());
}

TEST(QuantizedWeight, Nf4MatchesItsDefinitionForAnyShape) {
  for (const auto& [out, in] : {std::pair<int64_t, int64_t>{4, 64}, {3, 50}, {1, 1}, {7, 33}, {128, 192}}) {
    const auto weight = some_weight(out, in);
    const auto packed = kernels::QuantizedWeight::nf4(weight);
    EXPECT_TRUE(packed.values().allclose(nf4_by_definition(weight), 1e-6, 1e-7)) << out << " x " << in;
    EXPECT_EQ(packed.packed().numel(), (out * in + 1) / 2);
    EXPECT_EQ(packed.absmax().numel(), (out * in + 63) / 64);
    for (int64_t first = 0; first < out; ++first) {
      const auto rows = packed.rows(first, out - first);
      EXPECT_TRUE(rows.equal(packed.values().narrow(0, first, out - first))) << "from row " << first;
    }
  }
  auto zeros = some_weight(2, 128);
  zeros.view({-1}).narrow(0, 64, 64).zero_();
  EXPECT_TRUE(kernels::QuantizedWeight::nf4(zeros).values().view({-1}).narrow(0, 64, 64).eq(0).all().item<bool>());
}

TEST(QuantizedWeight, DoubleQuantizationStoresScalesIn8Bits) {
  const auto weight = some_weight(256, 160);  // 640 blocks, which are 2.5 blocks of scales
  const auto once = kernels::QuantizedWeight::nf4(weight),
             twice = kernels::QuantizedWeight::nf4(weight, {.double_quant = true});
  EXPECT_TRUE(once.packed().equal(twice.packed()));
  const auto largest = once.absmax(), mean = largest.mean(), found = twice.absmax();
  for (int64_t first = 0; first < 640; first += 256) {
    const auto block = (largest - mean).slice(0, first, std::min<int64_t>(first + 256, 640));
    const double error =
        (found - largest).slice(0, first, std::min<int64_t>(first + 256, 640)).abs().max().item<double>();
    // The bound is half of the map's widest step, 0.9 / 64, times the block's largest.
    EXPECT_LE(error, block.abs().max().item<double>() * 0.9 / 64 / 2 * 1.01);
    EXPECT_GT(error, 0);
  }
  EXPECT_TRUE(
      twice.values().allclose(once.values() * (found / largest).repeat_interleave(64).view({256, 160}), 1e-5, 1e-6));
  EXPECT_EQ(once.size_bytes(), 256 * 160 / 2 + 640 * 4);
  EXPECT_EQ(twice.size_bytes(), 256 * 160 / 2 + 640 + 3 * 4);
  EXPECT_TRUE(twice.rows(101, 77).equal(twice.values().narrow(0, 101, 77)));
}

kernels::QuantizedWeight random_q4_k(int64_t out, int64_t in) {
  auto bytes = at::randint(0, 256, {out, in / 256 * 144}, at::detail::createCPUGenerator(5), at::kByte);
  // Each block begins with two F16 numbers, scale and minimum. 0x13 as their upper byte keeps them near 0.001.
  bytes.view({-1, 144}).narrow(1, 1, 1).fill_(0x13);
  bytes.view({-1, 144}).narrow(1, 3, 1).fill_(0x13);
  return kernels::QuantizedWeight::gguf(GgmlType::kQ4_K, bytes, in);
}

TEST(QuantizedWeight, GgufBlocksAreDecodedLikeGgufFiles) {
  const auto weight = random_q4_k(6, 512);
  auto wanted = at::empty({6, 512}, at::kFloat);
  dequantize(GgmlType::kQ4_K,
             {reinterpret_cast<const std::byte*>(weight.packed().const_data_ptr<uint8_t>()), 6 * 2 * 144},
             {wanted.mutable_data_ptr<float>(), 6 * 512});
  EXPECT_TRUE(weight.values().equal(wanted));
  EXPECT_TRUE(weight.rows(2, 3).equal(wanted.narrow(0, 2, 3)));
  EXPECT_EQ(weight.size_bytes(), 6 * 2 * 144);
}

TEST(QuantizedWeight, PartsEqualRowsAndColumnsOfTheFullWeight) {
  for (const auto& weight :
       {kernels::QuantizedWeight::nf4(some_weight(7, 33), {.double_quant = true}), random_q4_k(6, 512)}) {
    const int64_t out = weight.out(), in = weight.in();
    const auto part = weight.part(0, 2, 4).part(1, 5, in - 9).part(0, 1, 3).part(1, 1, 20);
    EXPECT_EQ(part.out(), 3);
    EXPECT_EQ(part.in(), 20);
    EXPECT_TRUE(part.values().equal(weight.values().narrow(0, 3, 3).narrow(1, 6, 20)));
    const auto x = some_weight(5, 20);
    EXPECT_TRUE(kernels::quantized_linear(x, part).allclose(at::linear(x, part.values()), 1e-4, 1e-5));
    EXPECT_EQ(weight.part(0, out, 0).values().sizes(), (std::vector<int64_t>{0, in}));
    EXPECT_THROW(weight.part(0, 4, out - 3), Error);
  }
}

TEST(QuantizedLinear, EqualsLinearOfTheDequantizedWeight) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const double tolerance = dtype == at::kFloat ? 1e-4 : 3e-2;
    for (const auto& weight :
         {kernels::QuantizedWeight::nf4(some_weight(48, 96), {.double_quant = true}), random_q4_k(20, 256),
          kernels::QuantizedWeight::nf4(some_weight(1300, 1000))}) {  // several pieces
      auto x = (some_weight(10, weight.in(), 4) * 0.1).view({2, 5, weight.in()}).to(dtype).requires_grad_();
      auto bias = some_weight(1, weight.out(), 5)[0].contiguous().to(dtype).requires_grad_();
      const auto y = kernels::quantized_linear(x, weight, bias);
      ASSERT_EQ(y.scalar_type(), dtype);
      const auto gradient = some_weight(10, weight.out(), 6).view_as(y).to(dtype);
      y.backward(gradient);
      auto x2 = x.detach().clone().requires_grad_(), bias2 = bias.detach().clone().requires_grad_();
      const auto wanted = at::linear(x2, weight.values().to(dtype), bias2);
      wanted.backward(gradient);
      const auto alike = [&](const at::Tensor& found, const at::Tensor& plain) {
        return (found - plain).abs().max().item<double>() <= tolerance * plain.abs().max().item<double>();
      };
      EXPECT_TRUE(alike(y, wanted));
      EXPECT_TRUE(alike(x.grad(), x2.grad()));
      EXPECT_TRUE(alike(bias.grad(), bias2.grad()));
    }
  }
}

TEST(QuantizedLinear, HasASecondDerivativeAndSupportsEmptyInputs) {
  const auto weight = kernels::QuantizedWeight::nf4(some_weight(5, 8));
  const auto x = some_weight(3, 8).requires_grad_(), gradient = some_weight(3, 5).requires_grad_();
  const auto of_x = torch::autograd::grad({kernels::quantized_linear(x, weight)}, {x}, {gradient}, true, true)[0];
  const auto again = some_weight(3, 8, 9);
  const auto of_gradient = torch::autograd::grad({of_x}, {gradient}, {again})[0];
  EXPECT_TRUE(of_gradient.allclose(at::linear(again, weight.values()), 1e-5, 1e-6));
  EXPECT_EQ(kernels::quantized_linear(at::empty({2, 0, 8}), weight).sizes(), (std::vector<int64_t>{2, 0, 5}));
}

TEST(QuantizedLinear, RefusesInvalidInputs) {
  const auto refused = [](const std::function<void()>& call) -> std::string {
    try {
      call();
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  using ::testing::HasSubstr;
  const auto weight = kernels::QuantizedWeight::nf4(some_weight(5, 8));
  EXPECT_THAT(refused([&] { kernels::quantized_linear(some_weight(3, 7), weight); }), HasSubstr("wanted [..., 8]"));
  EXPECT_THAT(refused([&] { kernels::quantized_linear(some_weight(3, 8), {}); }), HasSubstr("has no values yet"));
  EXPECT_THAT(refused([&] { kernels::QuantizedWeight::nf4(at::full({2, 2}, NAN)); }), HasSubstr("not finite"));
  EXPECT_THAT(refused([&] { kernels::QuantizedWeight::nf4(at::full({2, 2}, INFINITY)); }), HasSubstr("not finite"));
  EXPECT_THAT(refused([&] { kernels::QuantizedWeight::nf4(at::ones({2})); }), HasSubstr("[out, in]"));
  EXPECT_THAT(refused([&] {
                kernels::QuantizedWeight::gguf(GgmlType::kQ4_K, at::empty({2, 143}, at::kByte), 256);
              }),
              HasSubstr("wanted bytes [out, 144]"));
  EXPECT_THAT(refused([&] {
                kernels::QuantizedWeight::gguf(GgmlType{10}, at::empty({2, 84}, at::kByte), 256);
              }),
              HasSubstr("Q2_K, which cannot be decoded"));
}

}  // namespace
}  // namespace tessera
