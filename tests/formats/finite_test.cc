// Tests of the search for NaN and infinity in tensors of every dtype and in the blocks of GGUF files.
#include "tessera/formats/tensor_files/finite.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "tests/formats/file_bytes.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

at::Tensor with_value(c10::IntArrayRef sizes, at::ScalarType dtype, int64_t place, double value) {
  auto tensor = at::ones(sizes, at::kDouble);
  tensor.view(-1)[place] = value;
  return tensor.to(dtype);
}

TEST(Finite, FindsTheFirstNonFiniteValueInEachDtype) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kFloat8_e5m2}) {
    // Sizes below, at and above the size of a block and of a thread's share.
    for (const int64_t columns : {1, 7, 4096, 40'001}) {
      EXPECT_FALSE(find_non_finite(at::ones({3, columns}, at::kDouble).to(dtype))) << dtype << " " << columns;
      for (const int64_t place : {int64_t{0}, columns, 3 * columns - 1}) {
        for (const double value : {kNan, kInfinity, -kInfinity}) {
          const auto found = find_non_finite(with_value({3, columns}, dtype, place, value));
          ASSERT_TRUE(found) << dtype << " " << columns << " " << place << " " << value;
          EXPECT_EQ(found->first, (std::vector<int64_t>{place / columns, place % columns}));
          EXPECT_EQ(found->value, value > 0 ? "inf" : value < 0 ? "-inf" : "nan");
          EXPECT_EQ(found->count, 1);
        }
      }
    }
  }
}

TEST(Finite, TheLargestAndTheSmallestNumbersOfADtypeAreFinite) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    const double largest = dtype == at::kHalf     ? 65504
                           : dtype == at::kDouble ? std::numeric_limits<double>::max()
                                                  : 3.38e38;
    EXPECT_FALSE(find_non_finite(at::tensor({largest, -largest, 0.0, 5e-324, -1e-45}, at::kDouble).to(dtype))) << dtype;
  }
  EXPECT_FALSE(find_non_finite(at::full({3}, std::numeric_limits<int64_t>::max(), at::kLong)));
  EXPECT_FALSE(find_non_finite(at::empty({0, 4})));
}

TEST(Finite, ChecksOnlyTheElementsOfAView) {
  auto base = at::ones({4, 6});
  base[3][5] = kNan;
  EXPECT_FALSE(find_non_finite(base.narrow(1, 0, 5)));
  EXPECT_FALSE(find_non_finite(base.slice(1, 0, 6, 2)));
  EXPECT_EQ(find_non_finite(base.t())->first, (std::vector<int64_t>{5, 3}));
  EXPECT_EQ(find_non_finite(base.narrow(1, 4, 2))->first, (std::vector<int64_t>{3, 1}));
  EXPECT_EQ(describe(*find_non_finite(base)), "nan at [3, 5], 1 of 24 values");
  EXPECT_EQ(find_non_finite(at::scalar_tensor(kNan))->first, std::vector<int64_t>{});
  const auto complex = at::complex(at::zeros({2}), at::tensor({0.0F, static_cast<float>(kInfinity)}));
  EXPECT_EQ(describe(*find_non_finite(complex)), "(0, inf) at [1], 1 of 2 values");
}

TEST(Finite, ErrorsNameTheTensorTheIndexAndTheNarrowDtype) {
  const auto stored = with_value({2, 3}, at::kFloat, 4, 1e6);
  EXPECT_THAT(testing::error_of(ErrorKind::kFormat,
                                [&] {
                                  check_converted(stored, stored.to(at::kHalf), "a.weight", "[x] file", {10, 0});
                                }),
              HasSubstr("[x] file: tensor 'a.weight' holds 1000000 at [11, 1], beyond the range of float16"));
  const auto broken = with_value({2, 3}, at::kFloat, 4, kNan);
  EXPECT_THAT(testing::error_of(ErrorKind::kFormat,
                                [&] {
                                  check_converted(broken, broken.to(at::kHalf), "a.weight", "[x] file", {10, 0});
                                }),
              HasSubstr("tensor 'a.weight' holds values that are not finite: nan at [11, 1], 1 of 6 values"));
  EXPECT_NO_THROW(check_converted(stored, stored.to(at::kBFloat16), "a.weight", "[x] file"));
}

// Writes NaN, an infinity or a finite half into three blocks, at every byte in turn. Blocks count as finite exactly if
// all their decoded values are finite.
TEST(Finite, GgufBlocksAreFiniteExactlyIfTheirDecodedValuesAre) {
  for (const auto type :
       {GgmlType::kF32, GgmlType::kF16, GgmlType::kBF16, GgmlType::kQ4_0, GgmlType::kQ4_1, GgmlType::kQ5_0,
        GgmlType::kQ5_1, GgmlType::kQ8_0, GgmlType::kQ4_K, GgmlType::kQ5_K, GgmlType::kQ6_K}) {
    const auto& info = *ggml_type_info(static_cast<uint32_t>(type));
    int not_finite = 0;
    for (size_t place = 0; place + 1 < 3 * info.block_bytes; ++place) {
      for (const uint16_t bits :
           {uint16_t{0x7C00}, uint16_t{0xFE00}, uint16_t{0x7F80}, uint16_t{0x7BFF}, uint16_t{0x3C00}}) {
        std::vector<std::byte> blocks(3 * info.block_bytes, std::byte{0x11});
        std::memcpy(blocks.data() + place, &bits, sizeof bits);
        const auto values = at::empty({3 * static_cast<int64_t>(info.block_elements)});
        dequantize(type, blocks, {values.mutable_data_ptr<float>(), static_cast<size_t>(values.numel())});
        const bool finite = values.isfinite().all().item<bool>();
        ASSERT_EQ(has_finite_values(type, blocks), finite) << info.name << " byte " << place << " bits " << bits;
        not_finite += !finite;
      }
    }
    EXPECT_GT(not_finite, 0) << info.name;
  }
}

}  // namespace
}  // namespace tessera
