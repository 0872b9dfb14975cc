// Tests of ranks that read the same rows as another rank, as tensor-parallel ranks do: such rows count once. A signal
// or failure of one of these ranks reaches the whole run, and their shards are saved.
#include <gtest/gtest.h>

#include <mutex>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/optim/optimizer.h"
#include "tessera/parallel/data_parallel.h"
#include "tessera/train/run/run_mesh.h"
#include "tessera/train/run/run_setup.h"
#include "tessera/train/step/step.h"
#include "tests/models/tiny.h"
#include "tests/support/ranks.h"
#include "tests/support/temp_folder.h"

namespace tessera::train {
namespace {

data::Batch rows_of_share(int64_t share, int64_t number) {
  const auto tokens = testing::tiny_tokens(2, 12).cpu().add(share + 5 * number).remainder_(37);
  return data::make_batch(tokens, testing::next_labels(tokens), at::arange(12).expand({2, 12}).contiguous(),
                          at::zeros({2, 12}, at::kLong));
}

// A model that is sharded over the data-parallel ranks of a layout and replicated over the other dims.
struct PlacedRun {
  RunMesh place;
  std::shared_ptr<comm::World> world;
  std::shared_ptr<CausalLM> model;
  std::unique_ptr<optim::Optimizer> optimizer;
  std::unique_ptr<TrainStep> step;

  PlacedRun(const RunLayout& layout, const std::shared_ptr<comm::World>& given)
      : place(layout, testing::test_device_type(), given), world(given) {
    model = make_model(ModelConfig::parse(testing::tiny_config(), "tiny"), {.device = c10::Device(at::kMeta)});
    std::vector<nn::Module*> blocks;
    for (const auto& block : model->blocks()) blocks.push_back(block.get());
    data_parallel(*model, blocks, {.mesh = place.data_parallel()});
    init_weights(*model, 5, testing::test_device());
    optimizer = optim::make_adamw(*model, {.lr = 0.01});
    step =
        std::make_unique<TrainStep>(*model, *optimizer, world->group(), StepOptions{.is_counted = place.is_counted()});
  }
  StepResult run(int64_t number, const StepSignals& signals = {}) {
    const auto share = place.data_rank();
    return step->run({rows_of_share(share, number), rows_of_share(share, number + 9)}, 0.01, signals);
  }
  double validate() {
    return validation_loss(*model, world->group(), {rows_of_share(place.data_rank(), 3)}, place.is_counted());
  }
};

struct Found {
  StepResult first, second;
  double validation = 0;
  std::vector<at::Tensor> values;  // values of all parameters
};

// Trains two steps and saves. Returns the results of rank 0.
Found train_two_steps(const RunLayout& layout, int ranks, const std::filesystem::path& checkpoints) {
  Found found;
  std::mutex mutex;
  testing::run_ranks({.size = ranks}, [&](const std::shared_ptr<comm::World>& world) {
    PlacedRun run(layout, world);
    Found own;
    own.first = run.run(0);
    own.second = run.run(1);
    own.validation = run.validate();
    const at::NoGradGuard no_grad;
    for (const auto& parameter : run.model->parameters()) own.values.push_back(full_tensor(parameter).clone());
    CheckpointWriter writer({.folder = checkpoints, .world = world, .stage_ranks = run.place.stage_ranks()});
    writer.save(2, training_state(*run.model, *run.optimizer).tensors, {});
    writer.finish();
    if (world->rank() == 0) {
      const std::lock_guard lock(mutex);
      found = own;
    }
  });
  return found;
}

TEST(RunMeshRanks, RanksWithTheSameRowsAreCountedOnce) {
  const testing::TempFolder plain_folder, twin_folder;
  const auto plain = train_two_steps({.dp_shard = 2}, 2, plain_folder.path());
  const auto twins = train_two_steps({.dp_shard = 2, .tp = 2}, 4, twin_folder.path());
  EXPECT_GT(plain.second.label_tokens, 0);
  for (const auto step : {&Found::first, &Found::second}) {
    EXPECT_EQ((twins.*step).label_tokens, (plain.*step).label_tokens);
    EXPECT_EQ((twins.*step).tokens, (plain.*step).tokens);
    EXPECT_EQ((twins.*step).loss, (plain.*step).loss);
    EXPECT_EQ((twins.*step).grad_norm, (plain.*step).grad_norm);
  }
  EXPECT_EQ(twins.validation, plain.validation);
  ASSERT_EQ(twins.values.size(), plain.values.size());
  for (size_t i = 0; i < plain.values.size(); ++i) EXPECT_TRUE(at::equal(twins.values[i], plain.values[i])) << i;
  // The checkpoint of the replicated ranks has the whole model, once, and every other layout can load it.
  testing::run_ranks({.size = 1}, [&](const std::shared_ptr<comm::World>& world) {
    PlacedRun run({}, world);
    Checkpoint::latest(twin_folder.path())->load(training_state(*run.model, *run.optimizer).tensors);
    const at::NoGradGuard no_grad;
    const auto parameters = run.model->parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_TRUE(at::equal(full_tensor(parameters[i]), plain.values[i])) << i;
    }
  });
}

TEST(RunMeshRanks, SignalOfOneRankReachesAllRanks) {
  testing::run_ranks({.size = 4}, [&](const std::shared_ptr<comm::World>& world) {
    PlacedRun run({.dp_shard = 2, .tp = 2}, world);
    const auto stopped = run.run(0, {.stop = world->rank() == 1});  // signal of the second tensor-parallel rank
    EXPECT_TRUE(stopped.all_signals.stop);
    EXPECT_FALSE(stopped.all_signals.failed);
    EXPECT_TRUE(run.run(1, {.failed = world->rank() == 3}).all_signals.failed);
  });
}

}  // namespace
}  // namespace tessera::train
