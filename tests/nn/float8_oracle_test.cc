// Tests the float8 linear against torchao's within a tolerance, and float8 casts against torch's bit for bit.
#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include "tessera/formats/safetensors/safetensors.h"
#include "tessera/nn/linear/float8.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera::nn {
namespace {

using kernels::to_float8;

struct OneLinear : Callable<OneLinear> {
  std::shared_ptr<Linear> linear;
  explicit OneLinear(const ParameterOptions& options) {
    register_module("linear", linear, std::make_shared<Linear>(48, 32, true, options));
  }
  at::Tensor forward(const at::Tensor& x) { return (*linear)(x); }
};

TEST(Float8Oracle, LinearMatchesTorchaoAndCastsMatchTorchBitwise) {
  const testing::TempFolder folder;
  const auto path = folder / "out.safetensors";
  const auto run = testing::run_python("tests/nn/oracle/float8_linear.py", {path.string()});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const auto file = SafetensorsFile::open(path);
  for (const std::string name : {"float32", "bfloat16"}) {
    const auto of = [&](const std::string& key) { return file->tensor(name + "." + key).clone(); };
    OneLinear model({.dtype = of("x").scalar_type()});
    {
      const at::NoGradGuard no_grad;
      model.linear->weight.copy_(of("weight"));
      model.linear->bias.copy_(of("bias"));
    }
    convert_to_float8(model);
    const auto x = of("x").requires_grad_();
    const auto y = model(x);
    y.backward(of("grad_y"));
    const double tolerance = name == "float32" ? 1e-5 : 1e-2;
    EXPECT_TRUE(y.allclose(of("y"), tolerance, tolerance)) << name;
    EXPECT_TRUE(x.grad().allclose(of("grad_x"), tolerance, tolerance)) << name;
    EXPECT_TRUE(model.linear->weight.grad().allclose(of("grad_weight"), tolerance, tolerance)) << name;
    EXPECT_TRUE(model.linear->bias.grad().allclose(of("grad_bias"), tolerance, tolerance)) << name;
    // The float8 result must differ from the exact one, or the test would also pass without float8.
    EXPECT_FALSE(y.allclose(at::linear(of("x"), of("weight"), of("bias")), 1e-3, 1e-3)) << name;
  }
  for (const auto& [name, dtype] :
       {std::pair{"float8_e4m3fn", at::kFloat8_e4m3fn}, {"float8_e5m2", at::kFloat8_e5m2}}) {
    const auto found = to_float8(file->tensor("cast.values"), dtype);
    EXPECT_EQ(found.scale.item<float>(), file->tensor(std::string("cast.") + name + ".scale").item<float>()) << name;
    EXPECT_TRUE(found.data.view(at::kByte).equal(file->tensor(std::string("cast.") + name))) << name;
  }
}

}  // namespace
}  // namespace tessera::nn
