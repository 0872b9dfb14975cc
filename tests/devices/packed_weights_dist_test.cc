// Tests packed weights on the pretend device: decoded to the CPU's bits, without a wait of the host.
#include <fmt/format.h>

#include "tessera/base/error.h"
#include "tessera/formats/gguf/gguf_quants.h"
#include "tessera/kernels/linear/quantized_weight.h"
#include "tests/devices/pretend.h"

namespace tessera::testing {
namespace {

at::Tensor drawn_weight(int64_t out, int64_t in) {
  return at::randn({out, in}, at::detail::createCPUGenerator(3), at::kFloat);
}

// Returns blocks of random bits, whose scales are replaced by finite numbers.
kernels::QuantizedWeight drawn_blocks(GgmlType type, int64_t out, int64_t in) {
  const auto& info = *ggml_type_info(static_cast<uint32_t>(type));
  auto generator = at::detail::createCPUGenerator(5);
  const auto rows = at::randint(0, 256, {out, in / info.block_elements * info.block_bytes}, generator, at::kByte);
  if (info.block_elements == 1) {
    const auto kind = type == GgmlType::kF32 ? at::kFloat : type == GgmlType::kF16 ? at::kHalf : at::kBFloat16;
    rows.copy_(drawn_weight(out, in).to(kind).view(at::kByte));
  } else {
    const int64_t at = type == GgmlType::kQ6_K ? 208 : 0;
    const auto blocks = rows.view({-1, info.block_bytes});
    const auto scales = drawn_weight(blocks.size(0), 2).to(at::kHalf).view(at::kByte);
    const bool two =
        type == GgmlType::kQ4_1 || type == GgmlType::kQ5_1 || type == GgmlType::kQ4_K || type == GgmlType::kQ5_K;
    blocks.narrow(1, at, two ? 4 : 2).copy_(scales.narrow(1, 0, two ? 4 : 2));
  }
  return kernels::QuantizedWeight::gguf(type, rows, in);
}

using PackedOnDevice = OnPretendDevice;

void expect_as_on_cpu(const kernels::QuantizedWeight& weight, const std::string& what) {
  const auto there = weight.to(pretend_device());
  ASSERT_EQ(there.device(), pretend_device());
  EXPECT_EQ(there.size_bytes(), weight.size_bytes()) << what;
  for (const auto& [dim, begin, size] : {std::tuple<int64_t, int64_t, int64_t>{0, 0, weight.out()},
                                         {0, 1, weight.out() - 1},
                                         {0, weight.out(), 0},
                                         {1, 3, weight.in() - 5}}) {
    const auto before = pretend::counters(0);
    const auto values = there.part(dim, begin, size).values();
    EXPECT_EQ((pretend::counters(0) - before).host_syncs, 0) << what;
    EXPECT_TRUE(values.cpu().equal(weight.part(dim, begin, size).values()))
        << what << ", dim " << dim << " from " << begin;
  }
  const auto x = drawn_weight(4, weight.in()).requires_grad_(), x2 = x.detach().to(pretend_device()).requires_grad_();
  const auto bias = drawn_weight(1, weight.out())[0].contiguous();
  const auto y = kernels::quantized_linear(x, weight, bias),
             y2 = kernels::quantized_linear(x2, there, bias.to(pretend_device()));
  y.sum().backward();
  y2.sum().backward();
  EXPECT_TRUE(y2.cpu().allclose(y, 1e-4, 1e-4)) << what;
  EXPECT_TRUE(x2.grad().cpu().allclose(x.grad(), 1e-4, 1e-4)) << what;
}

TEST_F(PackedOnDevice, DecodedWeightsEqualTheCpuBitwise) {
  for (const bool twice : {false, true}) {
    for (const auto& [out, in] : {std::pair<int64_t, int64_t>{4, 64}, {7, 33}, {300, 192}}) {
      expect_as_on_cpu(kernels::QuantizedWeight::nf4(drawn_weight(out, in), {.double_quant = twice}),
                       fmt::format("nf4 [{}, {}], twice {}", out, in, twice));
    }
  }
  for (const auto type :
       {GgmlType::kF32, GgmlType::kF16, GgmlType::kBF16, GgmlType::kQ4_0, GgmlType::kQ4_1, GgmlType::kQ5_0,
        GgmlType::kQ5_1, GgmlType::kQ8_0, GgmlType::kQ4_K, GgmlType::kQ5_K, GgmlType::kQ6_K}) {
    expect_as_on_cpu(drawn_blocks(type, 5, 512), std::string(ggml_type_info(static_cast<uint32_t>(type))->name));
  }
}

TEST_F(PackedOnDevice, InputsOnAnotherDeviceAreRefused) {
  const auto weight = kernels::QuantizedWeight::nf4(drawn_weight(4, 8));
  EXPECT_THROW(kernels::quantized_linear(drawn_weight(2, 8), weight.to(pretend_device())), Error);
  EXPECT_THROW(kernels::quantized_linear(drawn_weight(2, 8).to(pretend_device()), weight), Error);
}

}  // namespace
}  // namespace tessera::testing
