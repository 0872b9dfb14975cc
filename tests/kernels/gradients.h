// Comparison of a fused operation with plain operations: values and the gradients of every input.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <vector>

namespace tessera::testing {

using Op = std::function<at::Tensor(const std::vector<at::Tensor>&)>;

inline at::Tensor random_tensor(std::vector<int64_t> sizes, int64_t seed = 0) {
  at::manual_seed(static_cast<uint64_t>(seed + 17 * static_cast<int64_t>(sizes.size()) + sizes[0]));
  return at::randn(sizes);
}

// Returns the largest difference divided by the largest reference value.
inline double relative_error(const at::Tensor& found, const at::Tensor& wanted) {
  const double scale = std::max(1e-6, wanted.abs().max().item<double>());
  return (found.to(at::kDouble) - wanted.to(at::kDouble)).abs().max().item<double>() / scale;
}

// Compares values and gradients. The reference runs in fp64 on the same values.
inline void expect_same_with_gradients(const Op& fused, const Op& plain, const std::vector<at::Tensor>& inputs,
                                       double tolerance) {
  std::vector<at::Tensor> ours, theirs;
  for (const auto& input : inputs) {
    const bool floating = input.is_floating_point();
    ours.push_back(input.detach().clone().set_requires_grad(floating));
    theirs.push_back((floating ? input.detach().to(at::kDouble) : input).clone().set_requires_grad(floating));
  }
  const auto found = fused(ours), wanted = plain(theirs);
  ASSERT_EQ(found.sizes(), wanted.sizes());
  EXPECT_LT(relative_error(found, wanted), tolerance) << "forward";
  const auto weights =
      random_tensor(wanted.dim() ? wanted.sizes().vec() : std::vector<int64_t>{1}, 5).view(wanted.sizes());
  (found * weights.to(found.scalar_type())).sum().backward();
  (wanted * weights.to(at::kDouble)).sum().backward();
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!theirs[i].grad().defined()) continue;
    ASSERT_TRUE(ours[i].grad().defined()) << "gradient of input " << i;
    EXPECT_EQ(ours[i].grad().scalar_type(), inputs[i].scalar_type());
    EXPECT_LT(relative_error(ours[i].grad(), theirs[i].grad()), tolerance) << "gradient of input " << i;
  }
}

}  // namespace tessera::testing
