// Tests of mixed precision. The expected values come from one process that does the same casts explicitly.
#include "tessera/optim/optimizer.h"
#include "tests/parallel/small_model.h"

namespace tessera::testing {
namespace {

// Gradients of the float32 parameters of `model`. Each rank's rows are computed in dtype `compute`. The ranks'
// gradients are summed in dtype `reduce`, and the sum is rounded once.
std::vector<at::Tensor> emulate(SmallModel& model, int ranks, const at::Tensor& tokens, c10::ScalarType compute,
                                c10::ScalarType reduce) {
  std::vector<at::Tensor> sums;
  for (int rank = 0; rank < ranks; ++rank) {
    SmallModel copy;
    {
      at::NoGradGuard no_grad;
      const auto from = model.named_parameters(true), to = copy.named_parameters(true);
      for (size_t i = 0; i < to.size(); ++i) {
        if (to[i].name == "head") {
          nn::Module::set_parameter(*to[i].slot, to[0].slot->parameter);
        } else {
          nn::Module::set_parameter(*to[i].slot, from[i].slot->parameter.to(compute).set_requires_grad(true));
        }
      }
    }
    const auto rows = rows_of_rank(tokens, rank, ranks);
    loss_sum(copy(rows), rows).backward();
    const auto gradients = whole_gradients(copy);
    for (size_t i = 0; i < gradients.size(); ++i) {
      const auto value = gradients[i].to(reduce).to(at::kFloat);
      if (rank == 0) sums.push_back(at::zeros_like(value));
      sums[i].add_(value);
    }
  }
  for (auto& sum : sums) sum = sum.to(reduce).to(at::kFloat);
  return sums;
}

TEST(MixedPrecision, ComputesAndReducesInTheGivenTypes) {
  using Dtype = std::optional<c10::ScalarType>;
  for (const Dtype reduce : {Dtype(at::kFloat), Dtype(at::kBFloat16), Dtype()}) {
    on_threads(3, [&](const WorldPtr& world) {
      SmallModel plain, sharded;
      shard(sharded, {.mesh = line(world), .mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = reduce}});
      set_gradient_divide_factor(sharded, 1);
      auto plain_optimizer = optim::make_sgd(plain, {.lr = 1e-2});
      auto optimizer = optim::make_sgd(sharded, {.lr = 1e-2});
      for (int step = 0; step < 3; ++step) {
        const auto tokens = tokens_of(step);
        const auto expected = emulate(plain, world->size(), tokens, at::kBFloat16, reduce.value_or(at::kBFloat16));
        const auto rows = rows_of_rank(tokens, world->rank(), world->size());
        const auto logits = sharded(rows);
        EXPECT_EQ(logits.scalar_type(), at::kBFloat16);
        loss_sum(logits, rows).backward();
        const auto gradients = whole_gradients(sharded);
        EXPECT_EQ(gradients[0].scalar_type(), at::kFloat);
        EXPECT_LT(distance(gradients, expected), 1e-6) << "step " << step;
        for (size_t i = 0; i < expected.size(); ++i) plain.parameters()[i].mutable_grad() = expected[i];
        plain_optimizer->step();
        optimizer->step();
        EXPECT_LT(distance(whole_parameters(sharded), whole_parameters(plain)), 1e-6);
        sharded.zero_grad();
      }
    });
  }
}

TEST(MixedPrecision, AccumulatesUnshardedGradientsInTheReduceDtype) {
  on_threads(2, [](const WorldPtr& world) {
    const int micro_batches = 4;
    SmallModel model;
    shard(model, {.mesh = line(world), .mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
    set_gradient_divide_factor(model, 1);
    SmallModel plain;
    std::vector<at::Tensor> expected;
    for (int i = 0; i < micro_batches; ++i) {
      const auto part = emulate(plain, world->size(), tokens_of(i), at::kBFloat16, at::kFloat);
      for (size_t k = 0; k < part.size(); ++k) i == 0 ? expected.push_back(part[k]) : (void)expected[k].add_(part[k]);
      set_requires_gradient_sync(model, i + 1 == micro_batches);
      const auto rows = rows_of_rank(tokens_of(i), world->rank(), world->size());
      loss_sum(model(rows), rows).backward();
    }
    EXPECT_LT(distance(whole_gradients(model), expected), 1e-6);
  });
}

TEST(MixedPrecision, WorksOnOneRankToo) {
  on_threads(1, [](const WorldPtr& world) {
    SmallModel plain, model;
    shard(model, {.mesh = line(world), .mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
    const auto expected = emulate(plain, 1, tokens_of(0), at::kBFloat16, at::kFloat);
    loss_sum(model(tokens_of(0)), tokens_of(0)).backward();
    EXPECT_LT(distance(whole_gradients(model), expected), 1e-6);
    EXPECT_EQ(fsdp_stats(model).all_gathers, 0);
    EXPECT_EQ(fsdp_stats(model).reduce_scatters, 0);
  });
}

TEST(MixedPrecision, CastsInputsAndOutputs) {
  on_threads(2, [](const WorldPtr& world) {
    for (const bool cast_inputs : {true, false}) {
      Values values(1);
      Layer layer(values, 6, 10);
      fully_shard(layer,
                  {.mesh = line(world),
                   .mp_policy = {
                       .param_dtype = at::kBFloat16, .output_dtype = at::kDouble, .cast_forward_inputs = cast_inputs}});
      c10::ScalarType seen = at::kByte;
      layer.register_forward_pre_hook([&](nn::Module&, nn::TensorRefs& inputs) {
        seen = inputs[0]->scalar_type();
        *inputs[0] = inputs[0]->to(at::kBFloat16);
      });
      const auto output = layer(here(at::ones({2, 6})));
      EXPECT_EQ(seen, cast_inputs ? at::kBFloat16 : at::kFloat);
      EXPECT_EQ(output.scalar_type(), at::kDouble);
      output.sum().backward();
      EXPECT_EQ(layer.parameters()[0].grad().scalar_type(), at::kFloat);
    }
  });
}

TEST(MixedPrecision, DividesHalfPrecisionSumsInTwoSteps) {
  on_threads(3, [](const WorldPtr& world) {
    // The sum of the ranks' gradients, 3 * 30000, overflows float16; their mean does not.
    struct Scale : nn::Callable<Scale> {
      at::Tensor weight;
      Scale() { register_parameter("weight", weight, here(at::ones({5, 2}))); }
      at::Tensor forward(const at::Tensor& x) { return x * weight; }
    } model;
    fully_shard(model, {.mesh = line(world), .mp_policy = {.param_dtype = at::kHalf}});
    model(here(at::full({5, 2}, 30000.0))).sum(at::kFloat).backward();
    const auto gradient = whole(model.parameters()[0].grad());
    EXPECT_LT((gradient - 30000).abs().max().item<float>(), 30);
  });
}

TEST(MixedPrecision, AllGathersMixedParameterDtypesAsBytes) {
  on_threads(3, [](const WorldPtr& world) {
    struct Quantised : nn::Callable<Quantised> {
      at::Tensor codes, scale, weight;
      Quantised() {
        register_parameter("codes", codes, Values(1)({5, 4}, 3));
        Values half(2, at::kBFloat16), full(3);
        register_parameter("scale", scale, half({7, 4}));
        register_parameter("weight", weight, full({4, 4}));
        own_parameters()[1].parameter.set_requires_grad(false);
      }
      at::Tensor forward(const at::Tensor& x) {
        return at::linear(at::linear(at::linear(x, weight), codes), at::linear(scale.to(at::kFloat), codes));
      }
    } plain, sharded;
    fully_shard(sharded, {.mesh = line(world)});
    set_gradient_divide_factor(sharded, 1);
    const auto input = Values(8)({3, 4});
    plain(input).sum().backward();
    sharded(input.narrow(0, world->rank(), 1)).sum().backward();
    EXPECT_LT(distance(whole_gradients(sharded), whole_gradients(plain)), 1e-6);
    sharded.own_parameters()[1].parameter.set_requires_grad(true);
    EXPECT_NE(error_of([&] { sharded(input); }).find("uniform original parameter dtype"), std::string::npos);
  });
}

}  // namespace
}  // namespace tessera::testing
