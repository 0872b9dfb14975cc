// Tests float8 linears on a device that multiplies float8 itself. The products must give the values of the emulation.
#include <fmt/format.h>

#include "tessera/nn/linear/float8.h"
#include "tests/devices/pretend.h"

namespace tessera::testing {
namespace {

using Float8OnDevice = OnPretendDevice;

struct OneProduct : nn::Callable<OneProduct> {
  std::shared_ptr<nn::Linear> linear;
  OneProduct(int64_t in, int64_t out, c10::Device device) {
    register_module("linear", linear,
                    std::make_shared<nn::Linear>(in, out, true, nn::ParameterOptions{.device = device}));
    const at::NoGradGuard no_grad;
    auto seed = 7;
    for (const auto& parameter : parameters()) {
      parameter.copy_(at::randn(parameter.sizes(), at::detail::createCPUGenerator(++seed), at::kFloat));
    }
  }
  at::Tensor forward(const at::Tensor& x) { return (*linear)(x); }
};

struct TrainedLinear {
  at::Tensor y, x, weight, bias;
};

TrainedLinear trained(OneProduct& model, const at::Tensor& x, const at::Tensor& gradient) {
  const auto leaf = x.detach().clone().set_requires_grad(true);
  const auto y = model(leaf);
  y.backward(gradient);
  return {y.detach().cpu(), leaf.grad().cpu(), model.linear->weight.grad().cpu(), model.linear->bias.grad().cpu()};
}

// Sizes that are multiples of a tile, and other sizes.
TEST_F(Float8OnDevice, MultipliesOnTheDeviceAndConvertsAWeightOncePerStep) {
  EXPECT_FALSE(kernels::has_float8_products(c10::kCPU));
  ASSERT_TRUE(kernels::has_float8_products(pretend_device()));
  for (const auto& [rows, in, out] :
       {std::tuple<int64_t, int64_t, int64_t>{32, 48, 64}, {5, 7, 3}, {17, 16, 33}, {1, 50, 16}}) {
    const auto x = at::randn({rows, in}, at::detail::createCPUGenerator(1), at::kFloat);
    const auto gradient = at::randn({rows, out}, at::detail::createCPUGenerator(2), at::kFloat);
    OneProduct host(in, out, c10::kCPU), there(in, out, pretend_device());
    nn::convert_to_float8(host);
    const auto steps = nn::convert_to_float8(there);
    steps->begin_float8_step();
    const auto wanted = trained(host, x, gradient);
    pretend::keep_names(true);
    pretend::take_launches(0);
    const auto before = pretend::counters(0);
    const auto there_x = x.to(pretend_device()), there_gradient = gradient.to(pretend_device());
    const auto copies = (pretend::counters(0) - before).host_syncs;
    const auto found = trained(there, there_x, there_gradient);
    const auto cost = pretend::counters(0) - before;
    const auto launches = pretend::take_launches(0);
    pretend::keep_names(false);
    EXPECT_EQ(std::ranges::count(launches, "aten::_scaled_mm", &pretend::Launch::name), 3);
    EXPECT_EQ(std::ranges::count(launches, "aten::mm", &pretend::Launch::name), 0);
    EXPECT_EQ(cost.host_syncs, copies + 4) << "results that are read, nothing else";
    const auto what = fmt::format("{} x {} x {}", rows, in, out);
    const auto expect_near = [&](const at::Tensor& ours, const at::Tensor& theirs) {
      const double most = theirs.abs().max().item<double>();
      EXPECT_LE((ours - theirs).abs().max().item<double>(), 1e-5 * most) << what;
    };
    expect_near(found.y, wanted.y);
    expect_near(found.x, wanted.x);
    expect_near(found.weight, wanted.weight);
    expect_near(found.bias, wanted.bias);
    there(there_x);
    EXPECT_EQ(steps->weight_conversions, 1);
  }
}

}  // namespace
}  // namespace tessera::testing
