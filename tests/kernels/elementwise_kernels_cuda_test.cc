// Tests our CUDA kernels on a GPU against the CPU's loops and formulas: results and gradients. cuda_kernels_test.cc
// runs the same kernels on the host, with more sizes.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/base/ignored_label.h"
#include "tessera/kernels/loss/linear_cross_entropy.h"
#include "tessera/kernels/rows/elementwise_kernels.h"
#include "tessera/kernels/rows/gated.h"
#include "tessera/kernels/rows/rms_norm.h"
#include "tessera/kernels/rows/rotary.h"
#include "tests/kernels/gradients.h"

namespace tessera {
namespace {

using testing::random_tensor;
using Tensors = std::vector<at::Tensor>;
using Function = std::function<at::Tensor(const Tensors&)>;

const c10::Device kGpu(c10::kCUDA, 0);
const std::vector<at::ScalarType> kTypes = {at::kFloat, at::kBFloat16};

class ElementwiseKernelsCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) {
      GTEST_SKIP() << "no CUDA device";
    }
    if (!kernels::has_elementwise_kernels(kGpu, at::kFloat)) {
      GTEST_SKIP() << "this build has no CUDA kernels of its own";
    }
  }
};

// Returns the result and the gradients of a computation on `device`, copied to the CPU.
Tensors computed_on(c10::Device device, const Function& f, const Tensors& given) {
  Tensors in;
  for (const auto& each : given) in.push_back(each.to(device).detach().requires_grad_());
  const auto y = f(in);
  y.backward(random_tensor({y.numel()}, 9).view(y.sizes()).to(y.options()));
  Tensors out = {y.detach().cpu()};
  for (const auto& each : in) out.push_back(each.grad().cpu());
  return out;
}

// Runs the GPU's computation twice, which must give the same bits, and compares with the CPU's. Both devices round to
// bf16 in the same places; another order of a sum may change a rounding.
void expect_the_cpus(const Function& f, const Tensors& in, double of_bf16 = 1e-2) {
  for (const auto type : kTypes) {
    Tensors rounded;
    for (const auto& each : in) rounded.push_back(each.to(type));
    const auto wanted = computed_on(at::kCPU, f, rounded);
    const auto found = computed_on(kGpu, f, rounded), again = computed_on(kGpu, f, rounded);
    for (size_t i = 0; i < wanted.size(); ++i) {
      EXPECT_EQ(found[i].scalar_type(), wanted[i].scalar_type());
      EXPECT_LT(testing::relative_error(found[i], wanted[i]), type == at::kFloat ? 1e-5 : of_bf16)
          << "tensor " << i << " of " << c10::toString(type);
      EXPECT_TRUE(found[i].equal(again[i])) << "tensor " << i << " of " << c10::toString(type);
    }
  }
}

TEST_F(ElementwiseKernelsCuda, GatesEqualTheCpu) {
  for (const auto& shape : std::vector<std::vector<int64_t>>{{1}, {15}, {3, 37}, {130, 257}, {64, 4096}}) {
    const Tensors in = {random_tensor(shape) * 4, random_tensor(shape, 1)};
    expect_the_cpus([](const Tensors& t) { return kernels::swiglu(t[0], t[1]); }, in);
    expect_the_cpus([](const Tensors& t) { return kernels::geglu(t[0], t[1]); }, in);
    expect_the_cpus(
        [](const Tensors& t) { return kernels::swiglu(t[0].flatten().slice(0, 1), t[1].flatten().slice(0, 1)); },
        {at::cat({in[0].flatten(), in[0].flatten()}), at::cat({in[1].flatten(), in[1].flatten()})});
  }
}

TEST_F(ElementwiseKernelsCuda, NormsEqualTheCpu) {
  for (const auto& shape : std::vector<std::vector<int64_t>>{{1, 16}, {5, 48}, {70, 9}, {3, 41, 64}, {700, 4096}}) {
    const Tensors in = {random_tensor(shape), random_tensor({shape.back()}, 1)};
    for (const bool one_plus : {false, true}) {
      expect_the_cpus([=](const Tensors& t) { return kernels::rms_norm(t[0], t[1], 1e-5, one_plus); }, in);
    }
  }
}

// Calls our loops directly, also for the sizes for which the library takes libtorch's kernel.
TEST_F(ElementwiseKernelsCuda, NormLoopsEqualTheFormulas) {
  for (const auto type : kTypes) {
    for (const int64_t width : {33, 64, 4096}) {
      const auto x = random_tensor({300, width}).to(type), grad = random_tensor({300, width}, 2).to(type);
      const auto factors = random_tensor({width}, 1);
      const auto in = x.to(at::kDouble).requires_grad_(), by = factors.to(at::kDouble).requires_grad_();
      const auto wanted = in * (in.square().mean(-1, true) + 1e-5).rsqrt() * by;
      wanted.backward(grad.to(at::kDouble));
      for (const bool rounds_first : {false, true}) {
        const auto [y, inverse] =
            kernels::elementwise_kernels(kGpu).rms_norm(x.to(kGpu), factors.to(kGpu), 1e-5, rounds_first);
        const auto [grad_x, grad_factors] =
            kernels::elementwise_kernels(kGpu).rms_norm_backward(grad.to(kGpu), x.to(kGpu), factors.to(kGpu), inverse);
        const double tolerance = type == at::kFloat ? 1e-5 : 1.2e-2;
        EXPECT_LT(testing::relative_error(y.cpu(), wanted.detach()), tolerance);
        EXPECT_LT(testing::relative_error(grad_x.cpu(), in.grad()), tolerance);
        EXPECT_LT(testing::relative_error(grad_factors.cpu(), by.grad()), 1e-4);
      }
    }
  }
}

TEST_F(ElementwiseKernelsCuda, RotaryEqualsTheCpu) {
  for (const int64_t width : {6, 32, 128}) {
    for (const int64_t rows : {1, 3}) {
      const auto angles = random_tensor({rows, 7, width / 2}, 1);
      expect_the_cpus(
          [&](const Tensors& t) {
            return kernels::rotary(t[0], angles.cos().to(t[0].device()), angles.sin().to(t[0].device()));
          },
          {random_tensor({3, 7, 5, width})});
    }
  }
}

TEST_F(ElementwiseKernelsCuda, CrossEntropyEqualsTheCpu) {
  for (const int64_t classes : {1, 37, 300, 5004}) {
    auto labels = at::arange(21, at::kLong).remainder(classes);
    labels[4] = kIgnoredLabel;
    for (const int64_t chunk_bytes : {int64_t{1} << 12, int64_t{64} << 20}) {
      expect_the_cpus(
          [&](const Tensors& t) {
            return kernels::linear_cross_entropy(t[0], t[1], labels.to(t[0].device()), {.chunk_bytes = chunk_bytes});
          },
          {random_tensor({21, 24}) * 2, random_tensor({classes, 24}, 1)},
          /*of_bf16=*/4e-2);  // tolerance of logits in bf16
    }
  }
}

TEST_F(ElementwiseKernelsCuda, InvalidLabelGivesANanLoss) {
  const auto labels = at::tensor({int64_t{3}, int64_t{20}}, at::kLong).to(kGpu);
  const auto loss =
      kernels::linear_cross_entropy(random_tensor({2, 16}).to(kGpu), random_tensor({20, 16}, 1).to(kGpu), labels);
  EXPECT_TRUE(std::isnan(loss.item<float>()));
}

TEST_F(ElementwiseKernelsCuda, EmptyInputsGiveEmptyResults) {
  const auto empty = at::empty({0, 64}, kGpu), weight = at::ones({64}, kGpu);
  EXPECT_EQ(kernels::swiglu(empty, empty).numel(), 0);
  EXPECT_EQ(
      std::get<0>(kernels::elementwise_kernels(kGpu).gate_backward(kernels::Gate::kSilu, empty, empty, empty)).numel(),
      0);
  EXPECT_EQ(kernels::rms_norm(empty, weight, 1e-5).numel(), 0);
  EXPECT_EQ(std::get<0>(kernels::elementwise_kernels(kGpu).rms_norm(empty, weight, 1e-5, false)).numel(), 0);
  EXPECT_EQ(kernels::elementwise_kernels(kGpu).cross_entropy(empty, at::empty({0}, at::kLong).to(kGpu), true).numel(),
            0);
}

// The tensors have more elements than 32 bits count: 9 GiB each for gate and result.
TEST_F(ElementwiseKernelsCuda, GateSupportsMoreElementsThan32BitsCount) {
  const int64_t count = (int64_t{1} << 32) + 4096;
  at::Tensor gate;
  try {
    gate = at::zeros({count}, at::TensorOptions(kGpu).dtype(at::kBFloat16));
    gate.narrow(0, count - 5, 5).fill_(2);
    const auto y = kernels::swiglu(gate, gate);
    EXPECT_EQ(y.narrow(0, 0, 4096).abs().max().item<float>(), 0);
    EXPECT_TRUE(y.narrow(0, count - 5, 5)
                    .cpu()
                    .equal(kernels::swiglu(at::full({5}, 2, at::kBFloat16), at::full({5}, 2, at::kBFloat16))));
  } catch (const c10::OutOfMemoryError&) {
    GTEST_SKIP() << "needs 18 GiB of the GPU's memory";
  }
}

}  // namespace
}  // namespace tessera
