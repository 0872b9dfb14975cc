// Tests of stages whose compute dtype differs from their parameters' dtype: how often parameters are cast, and the
// dtype of the hidden states that are sent.
#include <gmock/gmock.h>

#include <set>

#include "tessera/models/decoder/decoder.h"
#include "tests/parallel/pipeline_model.h"

namespace tessera::testing {
namespace {

const MixedPrecisionPolicy kHalf{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat, .output_dtype = at::kFloat};

ParallelizeModelOptions in_half(const MeshPtr& mesh) { return {.mesh = mesh, .mp_policy = kHalf}; }

// One of this rank's layers.
DecoderLayer& some_layer(CausalLM& model) { return dynamic_cast<DecoderLayer&>(*model.blocks().front()); }

TEST(PipelinePrecision, ReplicatedParametersAreCastOncePerStep) {
  on_threads(4, [&](const WorldPtr& world) {
    const auto mesh = init_device_mesh(world, test_device_type(), {2, 2}, {"pp", "dp_replicate"});
    PipelineRig rig(layers(2), {.mesh = mesh, .schedule = "GPipe"}, in_half(mesh));
    auto& projection = *some_layer(*rig.model).mlp->up_proj;
    std::vector<at::Tensor> shown;
    projection.register_forward_pre_hook(
        [&](nn::Module&, nn::TensorRefs&) { shown.push_back(projection.weight.detach()); });
    const auto& parameter = projection.own_parameters().front().parameter;
    const auto batches = documents(6, 8);
    for (int step = 0; step < 2; ++step) {
      shown.clear();
      rig.pipeline->step(here(batches), {.loss_divisor = 10});
      ASSERT_EQ(shown.size(), 6u);
      for (const auto& each : shown) {
        EXPECT_EQ(each.const_data_ptr(), shown[0].const_data_ptr()) << "step " << step;
        EXPECT_TRUE(each.equal(parameter.detach().to(at::kBFloat16))) << "step " << step;
      }
      const at::NoGradGuard no_grad;
      parameter.sub_(parameter.grad(), 0.1);
      parameter.mutable_grad().reset();
    }
    // The second forward uses a parameter value that was written after the first.
    shown.clear();
    rig.pipeline->evaluate(here(batches));
    const at::NoGradGuard no_grad;
    parameter.mul_(2);
    rig.pipeline->evaluate({batches[0]});
    EXPECT_TRUE(shown.back().equal(parameter.to(at::kBFloat16)));
    EXPECT_FALSE(shown.back().equal(shown.front()));
  });
}

TEST(PipelinePrecision, HiddenStatesAreSentInTheComputeDtype) {
  const auto changes = layers(4);
  const auto batches = documents(4, 8);
  for (const char* dim : {"dp_shard", "dp_replicate"}) {
    Trained wanted;
    on_threads(2, [&](const WorldPtr& world) {
      const auto mesh = init_device_mesh(world, test_device_type(), {1, 2}, {"pp", dim});
      PipelineRig rig(changes, {}, in_half(mesh));
      double loss = 0;
      for (const auto& batch : here(batches)) {
        const auto own = rig.model->loss_sum(batch, batch.labels) / 100.0;
        own.backward();
        loss += own.item<double>();
      }
      std::map<std::string, at::Tensor> gradients;
      for (const auto& named : rig.model->named_parameters()) {
        gradients[named.name] = whole(named.slot->parameter.grad()).cpu();
      }
      if (world->rank() > 0) return;
      wanted = {.loss = loss, .gradients = gradients};
    });
    on_threads(4, [&](const WorldPtr& world) {
      const auto mesh = init_device_mesh(world, test_device_type(), {2, 2}, {"pp", dim});
      PipelineRig rig(changes, {.mesh = mesh, .schedule = "ZBVZeroBubble", .stages_per_rank = 2}, in_half(mesh));
      std::set<c10::ScalarType> hidden, results;
      rig.model->register_forward_hook([&](nn::Module&, nn::TensorRefs& outputs) {
        for (const auto* each : outputs) (each->dim() == 3 ? hidden : results).insert(each->scalar_type());
      });
      const double loss = rig.pipeline->step(here(batches), {.loss_divisor = 100}).item<double>();
      EXPECT_EQ(hidden, std::set<c10::ScalarType>{at::kBFloat16}) << dim << ", rank " << world->rank();
      for (const auto& named : rig.model->named_parameters()) {
        const auto& one = wanted.gradients.at(named.name);
        const auto off = whole(named.slot->parameter.grad()).cpu() - one;
        EXPECT_LE(off.norm().item<double>(), 1e-2 * one.norm().item<double>()) << dim << ", " << named.name;
      }
      const auto logprobs = rig.pipeline->logprobs({.tokens = here(batches[0].tokens)}, here(batches[0].labels));
      EXPECT_EQ(logprobs.defined(), rig.pipeline->has_last_stage());
      if (!logprobs.defined()) return;
      EXPECT_NEAR(loss, wanted.loss, 2e-2 * wanted.loss) << dim;
      EXPECT_EQ(results, std::set<c10::ScalarType>{at::kFloat}) << dim;
      EXPECT_EQ(logprobs.scalar_type(), at::kFloat) << dim;
    });
  }
}

}  // namespace
}  // namespace tessera::testing
