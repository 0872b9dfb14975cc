// Tests that a run's state that is saved on any layout loads on every other layout: model, optimizer state and its
// float32 copies, bit by bit.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/models/files/weights.h"
#include "tessera/parallel/parallelize_model.h"
#include "tessera/train/run/run_layout.h"
#include "tessera/train/run/run_mesh.h"
#include "tessera/train/run/run_setup.h"
#include "tests/support/ranks.h"
#include "tests/support/temp_folder.h"

namespace tessera::train {
namespace {

const ModelConfig& small_config() {
  static const auto config = ModelConfig::parse(
      R"({"architectures": ["LlamaForCausalLM"], "vocab_size": 37, "hidden_size": 24, "intermediate_size": 22,
          "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
          "rms_norm_eps": 1e-05})",
      "small");
  return config;
}

const RunLayout kLayouts[] = {{},
                              {.dp_shard = 2},
                              {.dp_shard = 3},
                              {.dp_shard = 4},
                              {.tp = 2},
                              {.dp_shard = 2, .tp = 2},
                              {.dp_replicate = 2, .dp_shard = 2},
                              {.dp_replicate = 2, .dp_shard = 1, .tp = 2}};

int ranks_of(const RunLayout& layout) { return static_cast<int>(layout.dp_replicate * layout.dp_shard * layout.tp); }

std::string text_of(const RunLayout& layout) {
  return fmt::format("dp_replicate {} dp_shard {} tp {}", layout.dp_replicate, layout.dp_shard, layout.tp);
}

// A 16-bit model with its optimizer, before the first step.
struct State {
  State(RunLayout layout, const std::shared_ptr<comm::World>& world)
      : place((layout.data_parallel = layout.dp_replicate * layout.dp_shard, layout), testing::test_device_type(),
              world),
        model(make_parallel_model(
            small_config(), at::kBFloat16,
            {.mesh = place.mesh(),
             .replicate = {.init_sync = false, .broadcast_buffers = false, .rebuild_buckets = false}},
            pipeline_options({}, small_config(), place.mesh()))) {
    init_weights(*model, 5, testing::test_device());
    optimizer = optim::make_adamw(*model, {});
    tensors = training_state(*model, *optimizer).tensors;
  }

  RunMesh place;
  std::shared_ptr<CausalLM> model;
  std::unique_ptr<optim::Optimizer> optimizer;
  NamedTensors tensors;
};

at::Tensor local_of(const at::Tensor& tensor) { return is_dtensor(tensor) ? to_local(tensor) : tensor; }

// This rank's shard of the tensor `name`. The full tensor has the same values on every layout, and all its elements
// differ.
at::Tensor wanted_part(const std::string& name, const at::Tensor& tensor) {
  const auto first = static_cast<double>(std::hash<std::string>()(name) % 97);
  const auto whole =
      at::arange(tensor.numel(), at::kFloat).mul(0.37).add(first).view(tensor.sizes()).to(tensor.scalar_type());
  if (!is_dtensor(tensor)) return whole.to(tensor.device());
  return to_local(distribute_tensor(whole, device_mesh(tensor), placements(tensor), std::nullopt));
}

TEST(CheckpointLayouts, StateLoadsBitwiseOnEveryOtherLayout) {
  for (const auto& first : kLayouts) {
    const testing::TempFolder folder;
    testing::run_ranks({.size = ranks_of(first)}, [&](const std::shared_ptr<comm::World>& world) {
      const at::NoGradGuard no_grad;
      const State state(first, world);
      for (const auto& [name, tensor] : state.tensors) local_of(tensor).copy_(wanted_part(name, tensor));
      CheckpointWriter writer({.folder = folder.path(), .world = world});
      writer.save(1, state.tensors, {});
      writer.finish();
    });
    for (const auto& other : kLayouts) {
      testing::run_ranks({.size = ranks_of(other)}, [&](const std::shared_ptr<comm::World>& world) {
        const at::NoGradGuard no_grad;
        const State state(other, world);
        Checkpoint::latest(folder.path(), *world->group())->load(state.tensors);
        size_t masters = 0;
        for (const auto& [name, tensor] : state.tensors) {
          EXPECT_TRUE(at::equal(local_of(tensor), wanted_part(name, tensor)))
              << name << " of " << text_of(first) << " on " << text_of(other);
          masters += name.ends_with(".master");
        }
        EXPECT_GT(masters, 0U) << "the optimizer's state is not among the tensors";
      });
    }
  }
}

}  // namespace
}  // namespace tessera::train
