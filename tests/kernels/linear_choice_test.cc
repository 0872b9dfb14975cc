// Tests the choice of a linear's kernel: the file that keeps a machine's measurement, and equal results of the kernels.
#include "tessera/kernels/linear/linear_choice.h"

#include <gtest/gtest.h>

#include "tessera/base/files/file.h"
#include "tessera/kernels/linear/linear.h"
#include "tests/support/temp_folder.h"

namespace tessera::kernels {
namespace {

bool yes() { return true; }
bool no() { return false; }
constexpr KernelChoiceNames kNames{"fast", "slow"};

TEST(LinearChoice, FirstMeasurementOfAMachineIsStored) {
  testing::TempFolder folder;
  const auto file = folder / "new" / "choice";
  EXPECT_TRUE(stored_choice(file, kNames, yes));
  EXPECT_EQ(read_file(file), "fast\n");
  EXPECT_TRUE(stored_choice(file, kNames, no)) << "the kept choice counts, not a later measurement";
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder / "new"), {}), 1);
}

TEST(LinearChoice, UnreadableOrUnwritableChoiceIsMeasured) {
  testing::TempFolder folder;
  publish_file(folder / "broken", "neither");
  EXPECT_FALSE(stored_choice(folder / "broken", kNames, no));
  EXPECT_TRUE(stored_choice(folder / "broken" / "below a file", kNames, yes));
}

TEST(LinearChoice, OneDnnEqualsAtLinear) {
  const auto x = at::randn({33, 20}), weight = at::randn({17, 20}), bias = at::randn({17});
  EXPECT_TRUE(at::allclose(onednn_product(x, weight, bias), at::linear(x, weight, bias), 1e-5, 1e-5));
}

// Tests forward and both gradients, with a bias. The choice applies to one of the shapes; the other shape is too small
// for a choice.
TEST(LinearChoice, HalfPrecisionProductsAreRoundedOnceWithBothKernels) {
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    const bool before = fp32_is_faster_for(type);
    for (const int64_t rows : {3, 40}) {
      const auto x = at::randn({2, rows, 64}).to(type), weight = at::randn({48, 64}).to(type),
                 bias = at::randn({48}).to(type), pull = at::randn({2, rows, 48}).to(type);
      const auto compute = [&](bool fp32) {
        set_fp32_choice(type, fp32);
        const auto own_x = x.clone().requires_grad_(), own_weight = weight.clone().requires_grad_(),
                   own_bias = bias.clone().requires_grad_();
        const auto y = linear(own_x, own_weight, own_bias);
        y.backward(pull);
        return std::vector<at::Tensor>{y.detach(), own_x.grad(), own_weight.grad(), own_bias.grad()};
      };
      const auto wide = [](const at::Tensor& tensor) { return tensor.to(at::kDouble); };
      const auto flat_x = wide(x).flatten(0, 1), flat_pull = wide(pull).flatten(0, 1);
      const std::vector<at::Tensor> exact = {at::linear(wide(x), wide(weight), wide(bias)),
                                             wide(pull).matmul(wide(weight)), flat_pull.t().mm(flat_x)};
      const double unit = type == at::kBFloat16 ? 1.0 / 256 : 1.0 / 2048;
      for (const bool fp32 : {true, false}) {
        const auto found = compute(fp32);
        for (size_t i = 0; i < exact.size(); ++i) {
          EXPECT_EQ(found[i].scalar_type(), type);
          EXPECT_TRUE(at::allclose(wide(found[i]), exact[i], unit, 1e-4)) << type << " " << fp32 << " " << i;
        }
      }
    }
    set_fp32_choice(type, before);
  }
}

}  // namespace
}  // namespace tessera::kernels
