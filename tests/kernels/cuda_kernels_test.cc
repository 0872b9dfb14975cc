// Tests our CUDA kernels without a GPU. The kernels are compiled as C++ (support/cuda_on_host), run on the host and are
// compared with the formulas in fp64. elementwise_kernels_cuda_test.cc runs the kernels on a GPU.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>

#include "tessera/base/ignored_label.h"
#include "tests/kernels/gradients.h"
#include "tests/support/cuda_on_host/cuda_runtime_api.h"

#define cuda cuda_on_host  // the host build's namespace, beside the real kernels of a CUDA build
#include "tessera/kernels/cuda/launchers.h"
#undef cuda

namespace tessera::kernels::cuda_on_host {
namespace {

using tessera::testing::random_tensor;
using Tensors = std::vector<at::Tensor>;

ElementType element_of(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat ? ElementType::kFloat : ElementType::kBFloat16;
}

// Returns the same values, stored `shift` elements behind the alignment that vector loads need.
at::Tensor shifted(const at::Tensor& values, int64_t shift) {
  return at::empty({values.numel() + shift}, values.options())
      .narrow(0, shift, values.numel())
      .copy_(values.flatten())
      .view(values.sizes());
}

// Compares values that were rounded to bf16 once or twice; in fp32 the sums may have another order.
void expect_near(const at::Tensor& found, const at::Tensor& wanted, const std::string& what) {
  const double tolerance = found.scalar_type() == at::kFloat ? 3e-6 : 8e-3;
  const auto there = found.to(at::kDouble).flatten(), right = wanted.flatten();
  ASSERT_FALSE(there.isnan().any().item<bool>()) << what;
  const double most = std::max(1e-3, right.abs().max().item<double>());
  const auto off = (there - right).abs() - tolerance * (right.abs() + 0.05 * most);
  EXPECT_LE(off.max().item<double>(), 0) << what;
}

void expect_all_came_to_barriers() {
  EXPECT_FALSE(HostBlock::diverged);
  HostBlock::diverged = false;
}

const std::vector<at::ScalarType> kTypes = {at::kFloat, at::kBFloat16};

TEST(CudaKernels, GatesWorkForAnyNumberOfElements) {
  for (const auto type : kTypes) {
    for (const int64_t count : {1, 7, 8, 9, 257, 4099}) {
      for (const int64_t shift : {0, 1}) {
        for (const bool gelu : {false, true}) {
          const auto drawn = [&](int64_t seed) { return shifted(random_tensor({count}, seed).to(type), shift); };
          const auto gate = drawn(1).mul_(3), up = drawn(2), grad = drawn(3);
          const auto y = at::empty_like(gate);
          const auto grads = std::pair(at::empty_like(gate), at::empty_like(gate));
          launch_gate(element_of(gate), gelu, gate.data_ptr(), up.data_ptr(), y.data_ptr(), count, nullptr);
          launch_gate_backward(element_of(gate), gelu, grad.data_ptr(), gate.data_ptr(), up.data_ptr(),
                               grads.first.data_ptr(), grads.second.data_ptr(), count, nullptr);
          const auto x = gate.to(at::kDouble).requires_grad_(), factor = up.to(at::kDouble).requires_grad_();
          const auto wanted = (gelu ? at::gelu(x, "tanh") : at::silu(x)) * factor;
          wanted.backward(grad.to(at::kDouble));
          const auto what = std::to_string(count) + (gelu ? " gelu " : " silu ") + c10::toString(type);
          expect_near(y, wanted.detach(), what);
          expect_near(grads.first, x.grad(), what + ", gradient of the gate");
          expect_near(grads.second, factor.grad(), what + ", gradient of the other");
        }
      }
    }
  }
  expect_all_came_to_barriers();
}

// Returns the result, the inverse root mean squares and both gradients.
Tensors normed(const at::Tensor& x, const at::Tensor& factors, const at::Tensor& grad, bool rounds_first) {
  const int64_t rows = x.size(0), width = x.size(1);
  Tensors out = {at::empty_like(x), at::empty({rows}, at::kFloat), at::empty_like(x)};
  const auto partial = at::full({rms_norm_blocks(rows), width}, std::nan(""), at::kFloat);
  launch_rms_norm(element_of(x), x.data_ptr(), factors.data_ptr<float>(), 1e-5F, rounds_first, out[0].data_ptr(),
                  out[1].data_ptr<float>(), rows, width, nullptr);
  launch_rms_norm_backward(element_of(x), grad.data_ptr(), x.data_ptr(), factors.data_ptr<float>(),
                           out[1].data_ptr<float>(), out[2].data_ptr(), partial.data_ptr<float>(), rows, width,
                           nullptr);
  out.push_back(partial.sum(0));
  return out;
}

TEST(CudaKernels, NormsWorkForAnyNumberOfRows) {
  for (const auto type : kTypes) {
    for (const auto& sizes : std::vector<std::vector<int64_t>>{{1, 1}, {5, 16}, {3, 33}, {2, 4104}, {300, 40}}) {
      for (const int64_t shift : {0, 1}) {
        const auto x = shifted(random_tensor(sizes).to(type), shift);
        const auto grad = shifted(random_tensor(sizes, 2).to(type), shift);
        const auto factors = random_tensor({sizes[1]}, 1);
        const auto in = x.to(at::kDouble).requires_grad_(), by = factors.to(at::kDouble).requires_grad_();
        const auto inverse = (in.square().mean(-1, true) + 1e-5).rsqrt();
        const auto wanted = in * inverse * by;
        wanted.backward(grad.to(at::kDouble));
        for (const bool rounds_first : {false, true}) {
          const auto found = normed(x, factors, grad, rounds_first);
          const auto what = std::to_string(sizes[0]) + " of " + std::to_string(sizes[1]) + " " + c10::toString(type);
          expect_near(found[0], wanted.detach(), what);
          expect_near(found[1], inverse.detach(), what + ", inverse");
          expect_near(found[2], in.grad(), what + ", gradient of x");
          expect_near(found[3], by.grad(), what + ", gradient of the factors");
        }
      }
    }
  }
  expect_all_came_to_barriers();
}

TEST(CudaKernels, NormsRoundInBf16AsTransformersDoes) {
  const auto x = random_tensor({64, 96}).to(at::kBFloat16), weight = random_tensor({96}, 1).to(at::kBFloat16);
  const auto wide = x.to(at::kFloat);
  const auto wanted = weight * (wide * at::rsqrt(wide.square().mean(-1, true) + 1e-5)).to(at::kBFloat16);
  const auto found = normed(x, weight.to(at::kFloat), x, /*rounds_first=*/true)[0];
  EXPECT_LE(found.ne(wanted).sum().item<int64_t>(), x.numel() / 1000);  // another order of a sum may change a rounding
}

TEST(CudaKernels, RotarySupportsDifferentAnglesPerRow) {
  for (const auto type : kTypes) {
    for (const int64_t half : {1, 3, 32, 64}) {
      for (const int64_t angle_rows : {1, 3}) {
        const auto x = random_tensor({3, 7, 5, 2 * half}).to(type), angles = random_tensor({angle_rows, 7, half}, 1);
        const auto cos = angles.cos(), sin = angles.sin();
        for (const float sign : {1.0F, -1.0F}) {
          const auto y = at::empty_like(x);
          launch_rotary(element_of(x), x.data_ptr(), cos.data_ptr<float>(), sin.data_ptr<float>(), sign, y.data_ptr(),
                        3, 7, 5, half, angle_rows == 1 ? 0 : 7 * half, nullptr);
          const auto c = cos.to(at::kDouble).unsqueeze(2), s = sin.to(at::kDouble).unsqueeze(2) * sign;
          const auto halves = x.to(at::kDouble).chunk(2, -1);
          expect_near(y, at::cat({halves[0] * c - halves[1] * s, halves[1] * c + halves[0] * s}, -1),
                      std::to_string(half) + " " + c10::toString(type));
        }
      }
    }
  }
  expect_all_came_to_barriers();
}

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& labels, bool wants_gradient) {
  const auto losses = at::full({logits.size(0)}, 7.0F);
  launch_cross_entropy(logits.data_ptr<float>(), labels.data_ptr<int64_t>(), kIgnoredLabel, wants_gradient,
                       losses.data_ptr<float>(), logits.size(0), logits.size(1), nullptr);
  return losses;
}

std::vector<int64_t> rows_without_number(const at::Tensor& losses) {
  const auto rows = losses.isnan().nonzero().flatten();
  return {rows.data_ptr<int64_t>(), rows.data_ptr<int64_t>() + rows.numel()};
}

TEST(CudaKernels, CrossEntropyWorksForAnyNumberOfClasses) {
  for (const int64_t classes : {1, 4, 37, 300, 5003, 5004}) {
    for (const int64_t shift : {0, 1}) {
      auto labels = at::arange(9, at::kLong).mul(41).remainder(classes);
      const auto logits = shifted(random_tensor({9, classes}) * 5, shift), before = logits.clone();
      const auto x = logits.to(at::kDouble).requires_grad_();
      const auto wanted = at::cross_entropy_loss(x, labels, {}, at::Reduction::None);
      wanted.sum().backward();
      const auto what = std::to_string(classes) + " classes";
      expect_near(cross_entropy(logits, labels, /*wants_gradient=*/false), wanted.detach(), what);
      EXPECT_TRUE(logits.equal(before)) << what;
      expect_near(cross_entropy(logits, labels, /*wants_gradient=*/true), wanted.detach(), what);
      expect_near(logits, x.grad(), what);
    }
  }
  expect_all_came_to_barriers();
}

TEST(CudaKernels, IgnoredLabelsGiveZeroAndInvalidLabelsGiveNan) {
  for (const int64_t classes : {37, 64}) {
    const auto labels = at::tensor({int64_t{3}, kIgnoredLabel, classes, int64_t{-1}}, at::kLong);
    const auto logits = random_tensor({4, classes}).contiguous();
    const auto losses = cross_entropy(logits, labels, /*wants_gradient=*/true);
    EXPECT_EQ(rows_without_number(losses), (std::vector<int64_t>{2, 3}));
    EXPECT_EQ(losses[1].item<float>(), 0);
    EXPECT_TRUE(logits[1].eq(0).all().item<bool>());
    EXPECT_TRUE(logits.narrow(0, 2, 2).isnan().all().item<bool>());
    EXPECT_FALSE(logits[0].isnan().any().item<bool>());
  }
}

TEST(CudaKernels, InfiniteLogitsGiveNanOnlyWhereTheFormulaDoes) {
  const float infinity = std::numeric_limits<float>::infinity();
  const auto logits = random_tensor({5, 40}).contiguous();
  logits[0][7] = -infinity;  // a masked class
  logits[1][7] = infinity;
  logits[2].fill_(-infinity);
  logits[3][39] = std::nan("");
  const auto losses = cross_entropy(logits, at::zeros({5}, at::kLong), /*wants_gradient=*/true);
  EXPECT_EQ(rows_without_number(losses), (std::vector<int64_t>{1, 2, 3}));
  EXPECT_EQ(logits[0][7].item<float>(), 0);
}

// No thread reads a value that another thread writes without a barrier between them.
TEST(CudaKernels, ResultsDoNotDependOnThreadOrderOrNumberOfBlocks) {
  const auto run = [](unsigned order, unsigned most) {
    HostBlock::order = order;
    const auto x = random_tensor({7, 520}), grad = random_tensor({7, 520}, 2), logits = random_tensor({7, 520}, 3);
    Tensors out = normed(x, random_tensor({520}, 1), grad, false);  // with its own number of blocks
    HostBlock::most = most;
    out.push_back(cross_entropy(logits, at::arange(7, at::kLong), true));
    out.push_back(logits);
    out.push_back(at::empty_like(x));
    launch_rms_norm(ElementType::kFloat, x.data_ptr(), grad.data_ptr<float>(), 1e-5F, false, out.back().data_ptr(),
                    at::empty({7}).data_ptr<float>(), 7, 520, nullptr);
    out.push_back(at::empty_like(x));
    launch_gate(ElementType::kFloat, false, x.data_ptr(), grad.data_ptr(), out.back().data_ptr(), x.numel(), nullptr);
    out.push_back(at::empty_like(x));
    launch_rotary(ElementType::kFloat, x.data_ptr(), grad.data_ptr<float>(), logits.data_ptr<float>(), 1,
                  out.back().data_ptr(), 1, 7, 10, 26, 0, nullptr);
    HostBlock::order = 0;
    HostBlock::most = ~0U;
    return out;
  };
  const auto wanted = run(0, ~0U);
  for (unsigned order = 0; order < 6; ++order) {
    const auto found = run(order, 2);
    for (size_t i = 0; i < wanted.size(); ++i) EXPECT_TRUE(found[i].equal(wanted[i])) << i;
  }
  expect_all_came_to_barriers();
}

}  // namespace
}  // namespace tessera::kernels::cuda_on_host
