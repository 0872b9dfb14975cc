// Tests that optimizer steps of a model that is cut into stages are equal to those of one rank.
#include <gtest/gtest.h>

#include "tessera/optim/optimizer.h"
#include "tessera/parallel/data_parallel.h"
#include "tessera/train/step/step.h"
#include "tests/parallel/pipeline_model.h"

namespace tessera::train {
namespace {

using testing::documents;
using testing::whole;

std::vector<data::Batch> batches_of(const std::vector<ModelInputs>& inputs) {
  std::vector<data::Batch> out;
  for (const auto& each : inputs) {
    out.push_back(
        data::make_batch(each.tokens.cpu(), each.labels.cpu(), each.positions.cpu(), each.document_ids.cpu()));
  }
  return out;
}

struct Steps {
  std::vector<StepResult> results;
  double validation = 0;
  std::map<std::string, at::Tensor> weights;
};

Steps run_steps(CausalLM& model, const std::shared_ptr<comm::Group>& group, StepOptions options,
                const std::vector<ModelInputs>& inputs) {
  auto optimizer = optim::make_adamw(model, {.lr = 0.01});
  options.max_grad_norm = 0.5;
  TrainStep step(model, *optimizer, group, options);
  Steps out;
  for (int i = 0; i < 3; ++i) out.results.push_back(step.run(batches_of(inputs), 0.01));
  out.validation = validation_loss(model, step.pipeline(), group, batches_of(inputs), options.is_counted);
  const at::NoGradGuard no_grad;
  for (const auto& named : model.named_parameters()) {
    out.weights[named.name] = whole(named.slot->parameter).clone().cpu();
  }
  return out;
}

void expect_same_steps(const Steps& found, const Steps& wanted, const std::string& what) {
  for (size_t i = 0; i < wanted.results.size(); ++i) {
    const auto &a = found.results[i], &b = wanted.results[i];
    EXPECT_NEAR(a.loss, b.loss, 1e-5 * b.loss) << what << " step " << i;
    EXPECT_NEAR(a.grad_norm, b.grad_norm, 1e-4 * b.grad_norm) << what << " step " << i;
    EXPECT_EQ(a.label_tokens, b.label_tokens) << what;
    EXPECT_EQ(a.tokens, b.tokens) << what;
  }
  EXPECT_NEAR(found.validation, wanted.validation, 1e-4 * wanted.validation) << what;
  for (const auto& [name, weight] : found.weights) {
    EXPECT_TRUE(at::allclose(weight, wanted.weights.at(name), 1e-3, 1e-4)) << what << " " << name;
  }
}

TEST(PipelineStep, TrainsAndValidatesAsOneRank) {
  const auto changes = testing::layers(5, R"("tie_word_embeddings": true)");
  const auto inputs = documents(8, 8);
  Steps wanted;
  testing::on_threads(1, [&](const testing::WorldPtr& world) {
    auto model = testing::tiny_model(changes);
    const auto mesh = init_device_mesh(world, testing::test_device_type(), {1}, {"dp_shard"});
    data_parallel(*model, {}, {.mesh = mesh});
    wanted = run_steps(*model, world->group(), {}, inputs);
  });
  struct Case {
    const char* schedule;
    int stages_per_rank;
    bool defer_gradient_sync;
  };
  for (const auto& each : {Case{"1F1B", 1, false}, Case{"ZBVZeroBubble", 2, true}}) {
    testing::on_threads(4, [&](const testing::WorldPtr& world) {
      const auto mesh = init_device_mesh(world, testing::test_device_type(), {2, 2}, {"pp", "dp_shard"});
      const pipeline::PipelineOptions options{
          .mesh = mesh, .schedule = each.schedule, .stages_per_rank = each.stages_per_rank};
      testing::PipelineRig rig(changes, options, {.mesh = mesh});
      std::vector<ModelInputs> own;
      for (size_t i = static_cast<size_t>(mesh->local_rank(1)); i < inputs.size(); i += 2) own.push_back(inputs[i]);
      const StepOptions how{.defer_gradient_sync = each.defer_gradient_sync, .pipeline = options};
      expect_same_steps(run_steps(*rig.model, world->group(), how, own), wanted, each.schedule);
    });
  }
}

}  // namespace
}  // namespace tessera::train
