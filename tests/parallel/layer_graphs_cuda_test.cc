// Tests of layers as CUDA graphs: training with graphs gives the same bits as training without graphs. The other tests
// of graphs are in tests/devices and use the pretend device.
#include <ATen/Context.h>
#include <gtest/gtest.h>

#include "tessera/comm/backends/device_backends.h"
#include "tessera/comm/backends/nccl_backend.h"
#include "tessera/mesh/device_graph.h"
#include "tessera/models/files/weights.h"
#include "tessera/optim/optimizer.h"
#include "tessera/parallel/parallelize_model.h"
#include "tests/support/ranks.h"

namespace tessera {
namespace {

using Settings = ParallelizeModelOptions;

ModelConfig small_llama() {
  return ModelConfig::parse(
      R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "initializer_range": 0.1, "tie_word_embeddings": false})",
      "config.json");
}

std::vector<at::Tensor> trained(const std::shared_ptr<comm::World>& world, Settings settings, bool documents) {
  settings.mesh = init_device_mesh(world, "cuda", {world->size()}, {"dp_shard"});
  const auto model = make_parallel_model(small_llama(), at::kFloat, settings);
  init_weights(*model, 3);
  const auto optimizer = optim::make_adamw(*model, {.lr = 1e-2});
  for (int64_t step = 0; step < 6; ++step) {
    const auto tokens = at::arange(step, step + 128, at::kLong).mul(31).remainder(256).view({2, 64});
    const auto ids = at::arange(64, at::kLong).div(9 + step, "floor").expand({2, 64}).contiguous();
    const auto device = settings.mesh->device();
    model
        ->loss_sum({.tokens = tokens.to(device), .document_ids = documents ? ids : at::Tensor()},
                   tokens.roll(-1, 1).to(device))
        .backward();
    optimizer->step();
    optimizer->zero_grad();
  }
  std::vector<at::Tensor> out;
  for (const auto& parameter : model->parameters()) out.push_back(full_tensor(parameter.detach()).cpu());
  return out;
}

TEST(LayerGraphsCuda, TrainBitwiseAsWithoutGraphs) {
  const int gpus = comm::visible_devices(c10::DeviceType::CUDA);
  if (gpus == 0) {
    GTEST_SKIP() << "this process sees no GPU";
  }
  ASSERT_TRUE(has_device_graphs(c10::DeviceType::CUDA));
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);  // for flash attention's backward
  const MixedPrecisionPolicy half = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  const std::vector<std::pair<Settings, bool>> cases = {
      {{}, false},
      {{.mp_policy = half}, false},
      {{.mp_policy = half}, true},
      {{.mp_policy = half, .activation_checkpointing = ActivationCheckpointing::kFull}, false},
      {{.mp_policy = half, .activation_checkpointing = ActivationCheckpointing::kSelective}, true}};
  for (const int ranks : {1, 2}) {
    if (ranks > gpus) continue;
    testing::run_ranks({.size = ranks}, [&](const std::shared_ptr<comm::World>& world) {
      for (size_t i = 0; i < cases.size(); ++i) {
        auto [settings, documents] = cases[i];
        const auto wanted = trained(world, settings, documents);
        settings.layer_graphs = true;
        const auto found = trained(world, settings, documents);
        for (size_t p = 0; p < found.size(); ++p) {
          EXPECT_TRUE(at::equal(found[p], wanted[p])) << "case " << i << ", parameter " << p;
        }
      }
    });
  }
  at::globalContext().setDeterministicAlgorithms(false, false);
}

}  // namespace
}  // namespace tessera
