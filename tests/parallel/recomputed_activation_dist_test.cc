// Test of an activation that backward recomputes with a norm, when the FSDP group of the norm is already resharded.
#include <gtest/gtest.h>

#include "tessera/kernels/linear/linear.h"
#include "tessera/kernels/rows/rms_norm.h"
#include "tests/parallel/small_model.h"

namespace tessera {
namespace {

using namespace tessera::testing;

struct Norm : nn::Callable<Norm> {
  at::Tensor weight;
  explicit Norm(Values& values) { register_parameter("weight", weight, values({16}) + 1); }
  at::Tensor forward(const at::Tensor& x) { return kernels::rms_norm(x, weight, 1e-5, false); }
};

struct Product : nn::Callable<Product> {
  at::Tensor weight;
  explicit Product(Values& values) { register_parameter("weight", weight, values({24, 16})); }
  at::Tensor forward(const at::Tensor& x) { return tessera::kernels::linear(x, weight); }
};

struct Both : nn::Callable<Both> {
  std::shared_ptr<Norm> norm;
  std::shared_ptr<Product> product;
  Both() {
    Values values(3);
    norm = register_module("norm", std::make_shared<Norm>(values));
    product = register_module("product", std::make_shared<Product>(values));
  }
  at::Tensor forward(const at::Tensor& x) { return (*product)((*norm)(x)); }
};

TEST(RecomputedActivation, NormInASeparateFsdpGroupHasCorrectGradients) {
  on_threads(2, [](const WorldPtr& world) {
    for (const bool apart : {true, false}) {
      Both sharded, plain;
      if (apart) {
        fully_shard(*sharded.norm, {.mesh = line(world)});
        fully_shard(*sharded.product, {.mesh = line(world)});
      }
      fully_shard(sharded, {.mesh = line(world)});
      Values values(5);
      const auto x = values({20, 16});
      for (auto* model : {&sharded, &plain}) (*model)(x.detach().requires_grad_(true)).square().sum().backward();
      EXPECT_LT(distance(whole_gradients(sharded), whole_gradients(plain)), kTolerance) << apart;
    }
  });
}

}  // namespace
}  // namespace tessera
