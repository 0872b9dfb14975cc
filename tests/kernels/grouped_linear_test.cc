// Tests grouped_linear, the products of the experts of a MoE layer, against one product for each group, and
// permute_rows against at::index_select.
#include "tessera/kernels/linear/grouped_linear.h"

#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tessera/kernels/linear/permute_rows.h"
#include "tests/kernels/gradients.h"

namespace tessera {
namespace {

using testing::expect_same_with_gradients;
using testing::random_tensor;

at::Tensor one_by_one(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& counts) {
  std::vector<at::Tensor> parts;
  int64_t begin = 0;
  for (int64_t i = 0; i < weight.size(0); ++i) {
    const int64_t rows = counts[i].item<int64_t>();
    parts.push_back(at::linear(x.narrow(0, begin, rows), weight[i]));
    begin += rows;
  }
  return at::cat(parts);
}

const std::vector<std::vector<int64_t>> kCounts = {{4, 2, 7}, {0, 13, 0}, {20, 0, 33},
                                                   {0, 0, 0}, {1, 0, 0},  {64, 64, 64}};

TEST(GroupedLinear, EqualsAProductForEachGroup) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const auto& rows : kCounts) {
      const auto counts = at::tensor(rows, at::kLong);
      const int64_t all = counts.sum().item<int64_t>();
      const auto x = random_tensor({all, 24}).to(dtype), weight = random_tensor({3, 40, 24}).to(dtype);
      if (all == 0) {
        auto leaf = weight.clone().set_requires_grad(true);
        kernels::grouped_linear(x, leaf, counts).sum().backward();
        EXPECT_EQ(leaf.grad().abs().sum().item<float>(), 0);
        continue;
      }
      expect_same_with_gradients([&](const auto& in) { return kernels::grouped_linear(in[0], in[1], counts); },
                                 [&](const auto& in) { return one_by_one(in[0], in[1], counts); }, {x, weight},
                                 dtype == at::kFloat ? 1e-5 : 2e-2);
    }
  }
}

TEST(GroupedLinear, HasSecondDerivatives) {
  const auto counts = at::tensor(std::vector<int64_t>{3, 0, 5}, at::kLong);
  const auto second = [&](bool grouped) {
    auto x = random_tensor({8, 6}).to(at::kDouble).set_requires_grad(true);
    auto weight = random_tensor({3, 4, 6}).to(at::kDouble).set_requires_grad(true);
    const auto y = grouped ? kernels::grouped_linear(x, weight, counts) : one_by_one(x, weight, counts);
    const auto first = torch::autograd::grad({y.pow(3).sum()}, {x, weight}, {}, true, true);
    return torch::autograd::grad({first[0].pow(2).sum() + first[1].pow(2).sum()}, {x, weight});
  };
  const auto found = second(true), wanted = second(false);
  for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(at::allclose(found[i], wanted[i], 1e-9, 1e-9));
}

TEST(GroupedLinear, RefusesInvalidShapesAndCounts) {
  const auto x = random_tensor({6, 4}), weight = random_tensor({2, 3, 4});
  EXPECT_THROW(kernels::grouped_linear(x, weight, at::tensor(std::vector<int64_t>{3, 4}, at::kLong)), Error);
  EXPECT_THROW(kernels::grouped_linear(x, weight, at::tensor(std::vector<int64_t>{8, -2}, at::kLong)), Error);
  EXPECT_THROW(kernels::grouped_linear(x, weight, at::tensor(std::vector<int64_t>{6}, at::kLong)), Error);
  EXPECT_THROW(kernels::grouped_linear(x, weight, at::tensor(std::vector<int>{3, 3}, at::kInt)), Error);
  EXPECT_THROW(kernels::grouped_linear(x, random_tensor({2, 3, 5}), at::tensor(std::vector<int64_t>{3, 3}, at::kLong)),
               Error);
}

TEST(PermuteRows, CopiesEachRowTheGivenNumberOfTimes) {
  const auto order = at::tensor(std::vector<int64_t>{3, 0, 5, 1, 4, 2}, at::kLong), inverse = order.argsort();
  for (const int64_t copies : {1, 2, 3}) {
    expect_same_with_gradients([&](const auto& in) { return kernels::permute_rows(in[0], order, inverse, copies); },
                               [&](const auto& in) { return in[0].index_select(0, order.div(copies, "floor")); },
                               {random_tensor({6 / copies, 4})}, 1e-6);
  }
  EXPECT_THROW(kernels::permute_rows(random_tensor({4, 2}), order, inverse), Error);
}

}  // namespace
}  // namespace tessera
