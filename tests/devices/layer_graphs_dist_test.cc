// Tests graphs of layers on the pretend device. steps_dist_test.cc tests whole steps with such graphs.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>

#include "tessera/base/error.h"
#include "tessera/base/ignored_label.h"
#include "tessera/models/adapters/adapters.h"
#include "tessera/models/config/rope.h"
#include "tessera/models/decoder/causal_lm.h"
#include "tessera/models/decoder/decoder.h"
#include "tessera/models/files/weights.h"
#include "tessera/nn/linear/float8.h"
#include "tessera/nn/linear/quantized_linear.h"
#include "tessera/parallel/fsdp/fully_shard.h"
#include "tessera/parallel/layers/activation_checkpoint.h"
#include "tessera/parallel/layers/layer_graphs.h"
#include "tessera/parallel/parallelize_model.h"
#include "tests/devices/pretend.h"
#include "tests/support/ranks.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using LayerGraphs = testing::OnPretendDevice;
using Tensors = std::vector<at::Tensor>;

ModelConfig tiny_llama(const std::string& kv_heads = "1") {
  return ModelConfig::parse(
      R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": )" +
          kv_heads + R"(,
    "max_position_embeddings": 512, "initializer_range": 0.2, "tie_word_embeddings": false, "attention_bias": true})",
      "config.json");
}

void graph_layers_of(CausalLM& model, c10::Device device) {
  std::vector<nn::Module*> layers;
  for (const auto& block : model.blocks()) layers.push_back(block.get());
  graph_layers(layers, device);
}

std::shared_ptr<CausalLM> model_on(c10::Device device, bool graphs, at::ScalarType dtype) {
  auto model = make_model(tiny_llama(), {.dtype = dtype, .device = device});
  init_weights(*model, 7);
  if (!graphs) return model;
  for (const auto& [path, module] : model->named_modules()) {
    if (auto* decoder = dynamic_cast<DecoderModel*>(module)) decoder->pad_document_lists();
  }
  graph_layers_of(*model, device);
  return model;
}

nn::Module& child_of(nn::Module& parent, const std::string& name) {
  for (const auto& [own, child] : parent.named_children()) {
    if (own == name) return *child;
  }
  throw std::out_of_range(name);
}

at::Tensor tokens_of(int64_t rows, int64_t length, int64_t seed, c10::Device device) {
  return at::arange(seed, seed + rows * length, at::kLong).mul(7).remainder(32).view({rows, length}).to(device);
}

at::Tensor loss_of(CausalLM& model, const at::Tensor& tokens, const at::Tensor& documents = {}) {
  auto labels = tokens.roll(-1, 1);
  if (documents.defined()) labels.masked_fill_(documents.lt(0), kIgnoredLabel);
  return model.loss_sum({.tokens = tokens, .document_ids = documents}, labels);
}

Tensors gradients_of(CausalLM& model) {
  Tensors out;
  for (const auto& parameter : model.parameters()) out.push_back(parameter.grad().cpu());
  model.zero_grad();
  return out;
}

void expect_equal(const Tensors& found, const Tensors& wanted, const std::string& where) {
  ASSERT_EQ(found.size(), wanted.size());
  for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::equal(found[i], wanted[i])) << where << ", gradient " << i;
}

// The same model twice on the device: with graphs and without.
class Twins {
 public:
  explicit Twins(at::ScalarType dtype = at::kFloat)
      : graphed(model_on(testing::pretend_device(), true, dtype)),
        plain(model_on(testing::pretend_device(), false, dtype)) {}
  // Runs a forward and a backward of each model and compares loss and gradients.
  void expect_one_step(int64_t rows, int64_t length, int64_t seed, const at::Tensor& documents = {}) {
    const auto tokens = tokens_of(rows, length, seed, testing::pretend_device());
    const auto found = loss_of(*graphed, tokens, documents), wanted = loss_of(*plain, tokens, documents);
    EXPECT_EQ(found.item<float>(), wanted.item<float>());
    found.backward(), wanted.backward();
    expect_equal(gradients_of(*graphed), gradients_of(*plain), "step " + std::to_string(seed));
  }
  std::shared_ptr<CausalLM> graphed, plain;
};

int64_t graphs_of(const std::vector<pretend::Launch>& launches) {
  return std::ranges::count_if(launches, [](const auto& each) { return each.name == "graph"; });
}

// Returns for one step of the model the number of all launches, and of launches of graphs.
std::pair<int64_t, int64_t> launches_of_step(CausalLM& model, int64_t rows, int64_t length) {
  const auto tokens = tokens_of(rows, length, 5, testing::pretend_device());
  pretend::keep_names(true);
  pretend::take_launches(0);
  loss_of(model, tokens).backward();
  const auto launches = pretend::take_launches(0);
  pretend::keep_names(false);
  model.zero_grad();
  return {static_cast<int64_t>(launches.size()), graphs_of(launches)};
}

TEST_F(LayerGraphs, EqualLayersWithoutGraphsBitwiseWithFewerLaunches) {
  Twins twins;
  for (int64_t step = 0; step < 5; ++step) twins.expect_one_step(2, 8, step);
  const auto [with, graphs] = launches_of_step(*twins.graphed, 2, 8);
  const auto [without, none] = launches_of_step(*twins.plain, 2, 8);
  EXPECT_EQ(graphs, 4) << "forward and backward of two layers";
  EXPECT_EQ(none, 0);
  EXPECT_LE(with, without * 6 / 10) << without;
}

TEST_F(LayerGraphs, ParametersMayChangeTheirValues) {
  Twins twins;
  for (int64_t step = 0; step < 6; ++step) {
    twins.expect_one_step(2, 8, step);
    const at::NoGradGuard no_grad;
    for (auto* model : {twins.graphed.get(), twins.plain.get()}) {
      for (const auto& parameter : model->parameters()) at::Tensor(parameter).mul_(0.9);
    }
  }
}

TEST_F(LayerGraphs, EachShapeHasGraphsUpToALimit) {
  Twins twins;
  for (int64_t round = 0; round < 4; ++round) {
    for (const int64_t length : {8, 5, 6, 7, 9, 10}) twins.expect_one_step(1, length, round);
  }
  EXPECT_EQ(launches_of_step(*twins.graphed, 1, 8).second, 4);
  EXPECT_EQ(launches_of_step(*twins.graphed, 1, 10).second, 0) << "the sixth shape";
}

TEST_F(LayerGraphs, SeveralForwardsMayPrecedeTheirBackwards) {
  Twins twins;
  for (int64_t step = 0; step < 3; ++step) twins.expect_one_step(2, 8, step);
  const auto device = testing::pretend_device();
  // Orders as in pipelines: the first backward belongs to the first forward, and other micro-batches come between.
  for (const auto& order : std::vector<std::vector<int>>{{0, 1, 2}, {1, 0, 2}, {2, 1, 0}, {0, 1, 2}}) {
    std::vector<Tensors> found, wanted;
    for (auto* model : {twins.graphed.get(), twins.plain.get()}) {
      auto& gradients = model == twins.graphed.get() ? found : wanted;
      std::vector<at::Tensor> losses;
      const auto forward = [&] {
        losses.push_back(loss_of(*model, tokens_of(2, 8, 20 + static_cast<int64_t>(losses.size()), device)));
      };
      const auto backward = [&](size_t micro) {
        losses[micro].backward();
        gradients.push_back(gradients_of(*model));
      };
      forward(), forward(), forward();
      backward(static_cast<size_t>(order[0]));
      forward();
      for (const int micro : {order[1], order[2], 3}) backward(static_cast<size_t>(micro));
    }
    for (size_t i = 0; i < found.size(); ++i) expect_equal(found[i], wanted[i], "backward " + std::to_string(i));
  }
  twins.expect_one_step(2, 8, 30);
}

// Each forward has its own activations. A graph that is replayed between another graph's forward and backward must not
// overwrite them.
TEST_F(LayerGraphs, ForwardsOfTwoShapesMayPrecedeTheirBackwards) {
  Twins twins;
  const auto device = testing::pretend_device();
  for (int64_t step = 0; step < 4; ++step) {
    for (const int64_t length : {8, 6}) twins.expect_one_step(2, length, step);
  }
  std::vector<Tensors> found, wanted;
  for (auto* model : {twins.graphed.get(), twins.plain.get()}) {
    const auto one = loss_of(*model, tokens_of(2, 8, 3, device)), two = loss_of(*model, tokens_of(2, 6, 4, device));
    for (const auto& loss : {one, two}) {
      loss.backward();
      (model == twins.graphed.get() ? found : wanted).push_back(gradients_of(*model));
    }
  }
  for (size_t i = 0; i < 2; ++i) expect_equal(found[i], wanted[i], "shape " + std::to_string(i));
}

// A checkpoint (recompute) around the layer keeps the results of one forward.
TEST_F(LayerGraphs, EqualLayersWithoutGraphsInsideActivationCheckpoints) {
  for (const bool selective : {true, false}) {
    Twins twins;
    for (auto* model : {twins.graphed.get(), twins.plain.get()}) {
      checkpoint_activations(*model->named_children()[0].second, selective);
    }
    for (int64_t step = 0; step < 6; ++step) twins.expect_one_step(2, 8, step);
  }
}

TEST_F(LayerGraphs, SecondDerivativesAreRefused) {
  Twins twins;
  for (int64_t step = 0; step < 3; ++step) twins.expect_one_step(2, 8, step);
  const auto loss = loss_of(*twins.graphed, tokens_of(2, 8, 3, testing::pretend_device()));
  EXPECT_THAT([&] { torch::autograd::grad({loss}, twins.graphed->parameters(), {}, true, /*create_graph=*/true); },
              ThrowsMessage<Error>(HasSubstr("no second derivative")));
}

// Graphs read unsharded parameters at fixed addresses. If three layers stay unsharded, the two buffers that layers
// otherwise share are not enough.
TEST_F(LayerGraphs, GroupsThatStayUnshardedHaveSeparateBuffers) {
  const auto config = ModelConfig::parse(
      R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "initializer_range": 0.2, "tie_word_embeddings": false})",
      "config.json");
  testing::run_ranks({.size = 2}, [&](const std::shared_ptr<comm::World>& world) {
    const auto mesh = init_device_mesh(world, "pretend", {2}, {"dp_shard"});
    const auto losses_of = [&](bool graphs, const std::function<void(nn::Module&, int64_t)>& before_step) {
      const auto model = make_parallel_model(config, at::kFloat, {.mesh = mesh, .layer_graphs = graphs});
      init_weights(*model, 5);
      std::vector<float> out;
      for (int64_t step = 0; step < 6; ++step) {
        before_step(*model, step);
        for (int64_t micro = 0; micro < 2; ++micro) {
          const auto loss = loss_of(*model, tokens_of(2, 8, step + micro + world->rank(), mesh->device()));
          loss.backward();
          out.push_back(loss.item<float>());
        }
        const at::NoGradGuard no_grad;
        for (const auto& parameter : model->parameters()) at::Tensor(parameter).sub_(parameter.grad(), 1e-3);
        model->zero_grad();
      }
      return out;
    };
    const std::vector<std::function<void(nn::Module&, int64_t)>> ways = {
        [](nn::Module&, int64_t) {},
        [](nn::Module& model, int64_t step) { set_reshard_after_backward(model, step % 2 == 1); },
        [](nn::Module& model, int64_t step) { set_reshard_after_forward(model, step < 3); }};
    for (const auto& way : ways) EXPECT_EQ(losses_of(true, way), losses_of(false, way));
  });
}

TEST_F(LayerGraphs, KeptResultsAreNotOverwritten) {
  Twins twins;
  for (int64_t step = 0; step < 3; ++step) twins.expect_one_step(2, 8, step);
  const auto device = testing::pretend_device();
  at::Tensor kept;
  const int hook = twins.graphed->blocks()[0]->register_forward_hook(
      [&](nn::Module&, nn::TensorRefs& outputs) { kept = outputs[0]->detach(); });
  loss_of(*twins.graphed, tokens_of(2, 8, 40, device)).backward();
  const at::Tensor first = kept, values = kept.cpu();
  const at::Tensor gradient = twins.graphed->parameters()[1].grad(), before = gradient.cpu();
  twins.graphed->zero_grad();
  loss_of(*twins.graphed, tokens_of(2, 8, 50, device)).backward();
  EXPECT_TRUE(at::equal(first.cpu(), values)) << "the next forward wrote over a result";
  EXPECT_TRUE(at::equal(gradient.cpu(), before)) << "the next backward wrote over a gradient";
  twins.graphed->blocks()[0]->remove_hook(hook);
  twins.graphed->zero_grad();
}

TEST_F(LayerGraphs, HooksWithinALayerAreCalledEachTime) {
  Twins twins;
  for (int64_t step = 0; step < 3; ++step) twins.expect_one_step(2, 8, step);
  int calls = 0;
  auto* const attention = twins.graphed->blocks()[1]->named_children()[0].second.get();
  const int hook = attention->register_forward_hook([&](nn::Module&, nn::TensorRefs&) { ++calls; });
  EXPECT_EQ(launches_of_step(*twins.graphed, 2, 8).second, 2) << "those of the other layer";
  for (int64_t step = 3; step < 6; ++step) twins.expect_one_step(2, 8, step);
  EXPECT_EQ(calls, 4);
  attention->remove_hook(hook);
  EXPECT_EQ(launches_of_step(*twins.graphed, 2, 8).second, 4);
}

TEST_F(LayerGraphs, HooksOfACheckpointedChildAreCalledEachTime) {
  Twins twins;
  int calls = 0;
  for (auto* model : {twins.graphed.get(), twins.plain.get()}) {
    checkpoint_activations(child_of(*model->blocks()[1], "mlp"));
  }
  auto& mlp = child_of(*twins.graphed->blocks()[1], "mlp");
  const int hook = mlp.register_forward_hook([&](nn::Module&, nn::TensorRefs&) { ++calls; });
  for (int64_t step = 0; step < 5; ++step) twins.expect_one_step(2, 8, step);
  EXPECT_EQ(calls, 5);
  EXPECT_EQ(launches_of_step(*twins.graphed, 2, 8).second, 2) << "those of the other layer";
  mlp.remove_hook(hook);
  for (int64_t step = 5; step < 8; ++step) twins.expect_one_step(2, 8, step);
  EXPECT_EQ(launches_of_step(*twins.graphed, 2, 8).second, 4);
}

// Returns the error of backward after a parameter of the second layer was written to behind forward.
std::string error_after_write(CausalLM& model, const std::string& parameter) {
  const auto loss = loss_of(model, tokens_of(2, 8, 3, testing::pretend_device()));
  for (const auto& named : model.blocks()[1]->named_parameters()) {
    const at::NoGradGuard no_grad;
    if (named.name == parameter) named.slot->parameter.mul_(1.25);
  }
  try {
    loss.backward();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

// Backward does not need biases, and a checkpoint reads weights again. Writes to all other parameters are refused.
TEST_F(LayerGraphs, WritesBetweenForwardAndBackwardAreRefusedWhereAutogradRefusesThem) {
  for (const bool captured : {true, false}) {
    Twins twins;
    for (auto* model : {twins.graphed.get(), twins.plain.get()}) {
      checkpoint_activations(child_of(*model->blocks()[1], "mlp"));
    }
    for (int64_t step = 0; step < (captured ? 4 : 2); ++step) twins.expect_one_step(2, 8, step);
    int64_t refused = 0, taken = 0;
    for (const auto& named : twins.plain->blocks()[1]->named_parameters()) {
      const std::string wanted = error_after_write(*twins.plain, named.name);
      const std::string found = error_after_write(*twins.graphed, named.name);
      ++(wanted.empty() ? taken : refused);
      if (wanted.empty()) {
        EXPECT_EQ(found, "") << named.name;
        expect_equal(gradients_of(*twins.graphed), gradients_of(*twins.plain), named.name);
      } else {
        EXPECT_THAT(wanted, HasSubstr("modified by an inplace operation")) << named.name;
        EXPECT_THAT(found, HasSubstr("modified by an inplace operation")) << named.name;
      }
      for (auto* model : {twins.graphed.get(), twins.plain.get()}) model->zero_grad();
      twins.expect_one_step(2, 8, 9);
    }
    EXPECT_EQ(refused, 6) << "two norms and four projections";
    EXPECT_EQ(taken, 7) << "four biases and three weights below the checkpoint";
  }
}

TEST_F(LayerGraphs, PackedDocumentsAndInferenceEqualLayersWithoutGraphs) {
  Twins twins;
  for (int64_t step = 0; step < 4; ++step) twins.expect_one_step(2, 8, step);
  const auto device = testing::pretend_device();
  const auto tokens = tokens_of(2, 8, 3, device);
  const auto documents = at::arange(8, at::kLong).ge(5).to(at::kLong).expand({2, 8}).contiguous();
  twins.expect_one_step(2, 8, 3, documents.to(device));
  const at::NoGradGuard no_grad;
  EXPECT_TRUE(at::equal(twins.graphed->logits({.tokens = tokens}), twins.plain->logits({.tokens = tokens})));
}

// The lengths of documents are read on the device. A new graph is captured if there are more documents, or a longer
// one, than the graph has room for.
TEST_F(LayerGraphs, ReplayForDocumentsOfAnyLengthsInBfloat16) {
  Twins twins(at::kBFloat16);
  const auto documents = [](int64_t length, int64_t each, int64_t padding) {
    auto ids = at::arange(2 * length, at::kLong).view({2, length}).div(each, "floor");
    if (padding > 0) ids.narrow(1, length - padding, padding).fill_(-1);
    return ids.to(testing::pretend_device());
  };
  int64_t step = 0;
  for (const int64_t each : {20, 7, 9, 11, 40}) twins.expect_one_step(2, 40, step++, documents(40, each, each % 5));
  pretend::keep_names(true);
  for (const int64_t each : {10, 33, 6}) {
    pretend::take_launches(0);
    twins.expect_one_step(2, 40, step++, documents(40, each, 3));
    EXPECT_EQ(graphs_of(pretend::take_launches(0)), 4) << "documents of " << each;
  }
  pretend::keep_names(false);
  for (int64_t again = 0; again < 4; ++again) twins.expect_one_step(2, 40, step++, documents(40, 2, 4));
  for (int64_t again = 0; again < 4; ++again) twins.expect_one_step(2, 300, step++, documents(300, 250, 0));
  twins.expect_one_step(2, 40, step++, documents(40, 13, 0));
}

// When the count of documents grows, graphs of smaller counts are not used any more and are dropped.
TEST_F(LayerGraphs, GraphsOfUnusedShapesAreDropped) {
  Twins twins;
  for (const int64_t length : {5, 6, 7, 8}) {
    for (int64_t step = 0; step < 3; ++step) twins.expect_one_step(1, length, step);
  }
  for (int64_t step = 0; step < 3; ++step) twins.expect_one_step(1, 9, step);
  EXPECT_EQ(launches_of_step(*twins.graphed, 1, 9).second, 0) << "the fifth shape";
  const auto before = pretend::counters(0).bytes;
  for (int64_t step = 0; step < 70; ++step) twins.expect_one_step(1, 9, step);
  EXPECT_EQ(launches_of_step(*twins.graphed, 1, 9).second, 4);
  EXPECT_LT(pretend::counters(0).bytes, before) << "graphs of four shapes are gone";
}

TEST_F(LayerGraphs, ASecondBackwardIsRefused) {
  Twins twins;
  for (int64_t step = 0; step < 3; ++step) twins.expect_one_step(2, 8, step);
  const auto loss = loss_of(*twins.graphed, tokens_of(2, 8, 3, testing::pretend_device()));
  loss.backward({}, /*retain_graph=*/true);
  EXPECT_THAT([&] { loss.backward(); }, ThrowsMessage<Error>(HasSubstr("a second time")));
  twins.graphed->zero_grad();
  twins.expect_one_step(2, 8, 9);
}

// A graph would read a parameter at its old address, after its memory has moved.
TEST_F(LayerGraphs, MovedParametersHaveNewGraphs) {
  Twins twins;
  for (int64_t step = 0; step < 3; ++step) twins.expect_one_step(2, 8, step);
  for (auto* model : {twins.graphed.get(), twins.plain.get()}) {
    for (const auto& named : model->named_parameters()) {
      nn::Module::set_parameter(*named.slot, named.slot->parameter.detach().mul(1.5).set_requires_grad(true));
    }
  }
  for (int64_t step = 3; step < 7; ++step) twins.expect_one_step(2, 8, step);
  EXPECT_EQ(launches_of_step(*twins.graphed, 2, 8).second, 4);
}

// The replaced weights are other rows of the same bytes. The row offset is a number on the host, so a graph contains
// its value.
TEST_F(LayerGraphs, ReplacedQuantizedWeightsHaveNewGraphs) {
  const auto device = testing::pretend_device();
  std::vector<std::shared_ptr<CausalLM>> models;
  for (int i = 0; i < 2; ++i) {
    models.push_back(make_model(tiny_llama(), {.device = c10::Device(at::kMeta)}));
    nn::quantize_linears(*models[i], {.double_quant = true});
    add_adapters(*models[i], {.rank = 2});
    to_empty(*models[i], device);
    init_weights(*models[i], 7);
    init_adapters(*models[i], 7);
  }
  graph_layers_of(*models[0], device);
  std::map<std::string, kernels::QuantizedWeight> twice_the_rows;
  const auto take_rows = [&](int64_t half) {
    for (const auto& model : models) {
      for (const auto& [name, packed] : nn::packed_weights(*model)) {
        auto& whole = twice_the_rows[name];
        if (!whole.defined()) {
          const auto values = packed->weight.values().cpu();
          whole =
              kernels::QuantizedWeight::nf4(at::cat({values, values.flip(0) * 2}), {.double_quant = true}).to(device);
        }
        packed->set_weight(whole.part(0, half * packed->out, packed->out));
      }
    }
  };
  const auto expect_steps = [&](int64_t first) {
    for (int64_t step = first; step < first + 4; ++step) {
      const auto tokens = tokens_of(2, 8, step, device);
      const auto found = loss_of(*models[0], tokens), wanted = loss_of(*models[1], tokens);
      EXPECT_EQ(found.item<float>(), wanted.item<float>()) << "step " << step;
      found.backward(), wanted.backward();
      for (const auto& model : models) model->zero_grad();
    }
  };
  take_rows(0);
  expect_steps(0);
  take_rows(1);
  expect_steps(4);
}

// The memory on the device: activations between forward and backward, gradients, and the buffers of one pass.
TEST_F(LayerGraphs, CheckpointedLayersKeepLessMemory) {
  const auto held_by = [](bool checkpointed) {
    const auto model = make_model(ModelConfig::parse(R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama",
    "vocab_size": 32, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 4, "initializer_range": 0.1, "tie_word_embeddings": false})",
                                                     "config.json"),
                                  {.device = testing::pretend_device()});
    init_weights(*model, 7);
    for (const auto& block : model->blocks()) {
      if (checkpointed) checkpoint_activations(*block);
    }
    graph_layers_of(*model, testing::pretend_device());
    const auto before = pretend::counters(0).bytes;
    for (int64_t step = 0; step < 4; ++step) {
      loss_of(*model, tokens_of(2, 64, step, testing::pretend_device())).backward();
      model->zero_grad();
    }
    EXPECT_EQ(launches_of_step(*model, 2, 64).second, 12);
    return pretend::counters(0).bytes - before;
  };
  // A layer keeps at least x, q, k, v and the result of attention, 5 times 64 wide, and gate, up and their product, 3
  // times 256 wide.
  constexpr int64_t kActivations = 6 * 2 * 64 * (5 * 64 + 3 * 256) * 4;
  const auto whole = held_by(false), checkpointed = held_by(true);
  EXPECT_GT(whole, kActivations);
  EXPECT_LT(whole, 2 * kActivations);
  EXPECT_LT(checkpointed, kActivations / 2);
}

TEST_F(LayerGraphs, ExpertsDropoutFloat8AndTensorParallelAreRefused) {
  testing::run_ranks({.size = 2}, [&](const std::shared_ptr<comm::World>& world) {
    const auto mesh = init_device_mesh(world, "pretend", {2}, {"tp"});
    const auto refused = [&](const ModelConfig& config, const MeshPtr& over, const char* what) {
      const auto model = make_model(config, {.device = c10::Device(at::kMeta)});
      EXPECT_THAT([&] { parallelize_model(*model, {.mesh = over, .layer_graphs = true}); },
                  ThrowsMessage<Error>(HasSubstr(what)));
    };
    const auto experts = ModelConfig::parse(
        R"({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 32, "hidden_size": 16,
    "intermediate_size": 24, "moe_intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": true})",
        "config.json");
    refused(experts, init_device_mesh(world, "pretend", {2}, {"dp_shard"}), "or experts");
    const auto refused_layers = [&](CausalLM& model, const char* what) {
      EXPECT_THAT([&] { graph_layers({model.blocks()[0].get()}, mesh->device()); },
                  ThrowsMessage<Error>(HasSubstr(what)));
    };
    refused_layers(*make_model(experts, {.device = c10::Device(at::kMeta)}), "a layer with experts");
    const auto dropping = make_model(tiny_llama(), {.device = c10::Device(at::kMeta)});
    add_adapters(*dropping, {.rank = 2, .dropout = 0.1});
    refused_layers(*dropping, "a layer with adapters that drop");
    const auto float8 = make_model(tiny_llama(), {.device = c10::Device(at::kMeta)});
    nn::convert_to_float8(*float8);
    refused_layers(*float8, "a layer with float8 products");
    refused(tiny_llama("2"), mesh, "layer_graphs with tensor or context parallelism");
    refused(tiny_llama("2"), init_device_mesh(world, "pretend", {2}, {"cp"}), "layer_graphs with tensor or context");
  });
}

TEST_F(LayerGraphs, DropoutAndFloat8AddedLaterAreRefusedInForward) {
  const auto tokens = tokens_of(2, 8, 3, testing::pretend_device());
  const std::vector<std::pair<std::function<void(CausalLM&)>, const char*>> changes = {
      {[](CausalLM& model) { add_adapters(model, {.rank = 2, .dropout = 0.1}); }, "a layer with adapters that drop"},
      {[](CausalLM& model) { nn::convert_to_float8(model); }, "a layer with float8 products"}};
  for (const auto& [change, what] : changes) {
    const auto model = model_on(testing::pretend_device(), true, at::kFloat);
    for (int64_t step = 0; step < 3; ++step) loss_of(*model, tokens).backward();
    change(*model);
    EXPECT_THAT([&] { loss_of(*model, tokens); }, ThrowsMessage<Error>(HasSubstr(what)));
  }
}

// Layers have rotary angles as arguments. The dynamic kind of angles depends on the largest position.
TEST_F(LayerGraphs, RotaryAnglesNeedNoHostSync) {
  RopeConfig rope;
  rope.kind = RopeKind::kDynamic;
  rope.factor = 4;
  for (const int64_t head_dim : {2, 8}) {
    RotaryEmbedding rotary(rope, head_dim, /*max_position_embeddings=*/16);
    for (const int64_t length : {10, 40}) {
      const auto positions = at::arange(2 * length, at::kLong).remainder(length).view({2, length});
      const auto there = positions.to(testing::pretend_device());
      const auto wanted = rotary(positions, positions);
      const auto before = pretend::counters(0);
      const auto found = rotary(there, there);
      EXPECT_EQ((pretend::counters(0) - before).host_syncs, 0);
      EXPECT_TRUE(found.cos.cpu().allclose(wanted.cos, 0, 1e-5)) << head_dim << ", " << length;
      EXPECT_TRUE(found.sin.cpu().allclose(wanted.sin, 0, 1e-5)) << head_dim << ", " << length;
    }
  }
}

}  // namespace
}  // namespace tessera
