// A small model with the difficult cases of sharding: a row count that is not divisible by the ranks, a vector shorter
// than the number of ranks, and a weight that is tied between embedding and head.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/nll_loss.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>

#include <functional>
#include <memory>
#include <vector>

#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/nn/module.h"
#include "tessera/parallel/fsdp/fully_shard.h"
#include "tests/support/ranks.h"

namespace tessera::testing {

struct Values {
  at::Generator generator;
  at::TensorOptions options;
  explicit Values(uint64_t seed, at::TensorOptions options = at::kFloat)
      : generator(at::detail::createCPUGenerator(seed)), options(options) {}
  at::Tensor operator()(std::vector<int64_t> shape, double scale = 0.3) {
    auto values = at::randn(shape, generator, at::TensorOptions(at::kFloat)) * scale;
    return options.device().is_meta() ? at::empty(shape, options) : here(values.to(options.dtype()));
  }
};

struct Layer : nn::Callable<Layer> {
  at::Tensor norm, up, down, bias;
  Layer(Values& values, int64_t width, int64_t hidden) {
    register_parameter("norm", norm, values({width}) + 1);
    register_parameter("up", up, values({hidden, width}));
    register_parameter("down", down, values({width, hidden}));
    register_parameter("bias", bias, values({width}), /*decay=*/false);
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = at::layer_norm(x, {x.size(-1)}, norm.to(x.scalar_type()));
    return x + at::linear(at::gelu(at::linear(y, up)), down, bias);
  }
};

// A module whose own parameter is also a parameter of its layer.
struct TiedToItsLayer : nn::Callable<TiedToItsLayer> {
  at::Tensor copy;
  std::shared_ptr<Layer> layer;
  TiedToItsLayer() {
    Values values(5);
    layer = register_module("layer", std::make_shared<Layer>(values, 6, 10));
    register_parameter("copy", copy, layer->up);
  }
  at::Tensor forward(const at::Tensor& x) { return (*layer)(x); }
};

struct SmallModel : nn::Callable<SmallModel> {
  static constexpr int64_t kVocab = 11, kWidth = 6, kHidden = 10;
  at::Tensor embedding, head, norm;
  std::vector<std::shared_ptr<Layer>> layers;

  explicit SmallModel(int count = 3, at::TensorOptions options = at::kFloat, uint64_t seed = 7) {
    Values values(seed, options);
    auto table = register_parameter("embedding", embedding, values({kVocab, kWidth}));
    register_parameter("head", head, table);  // tied
    register_parameter("norm", norm, values({kWidth}) + 1);
    for (int i = 0; i < count; ++i) {
      layers.push_back(
          register_module("layers." + std::to_string(i), std::make_shared<Layer>(values, kWidth, kHidden)));
    }
  }
  at::Tensor forward(const at::Tensor& tokens) {
    auto x = at::embedding(embedding, tokens);
    for (auto& layer : layers) x = (*layer)(x);
    return at::linear(at::layer_norm(x, {kWidth}, norm), head);
  }
};

inline std::vector<nn::Module*> blocks_of(const SmallModel& model) {
  std::vector<nn::Module*> blocks;
  for (const auto& layer : model.layers) blocks.push_back(layer.get());
  return blocks;
}
// Shards every layer, then the root.
inline void shard(SmallModel& model, const FullyShardOptions& options) {
  for (auto* layer : blocks_of(model)) fully_shard(*layer, options);
  fully_shard(model, options);
}

// Tokens [rows, 5] of step `step`, the same on every rank.
inline at::Tensor tokens_of(int64_t step, int64_t rows = 12) {
  auto generator = at::detail::createCPUGenerator(100 + static_cast<uint64_t>(step));
  return here(at::randint(0, SmallModel::kVocab, {rows, 5}, generator, at::kLong));
}
inline at::Tensor rows_of_rank(const at::Tensor& rows, int rank, int size) {
  return rows.tensor_split(size, 0)[static_cast<size_t>(rank)];
}
// Sum of the next-token losses.
inline at::Tensor loss_sum(const at::Tensor& logits, const at::Tensor& tokens) {
  const auto predicted = logits.narrow(1, 0, 4).flatten(0, 1);
  const auto dtype = predicted.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return at::nll_loss(at::log_softmax(predicted, -1, dtype), tokens.narrow(1, 1, 4).flatten(), {}, at::Reduction::Sum);
}

// Backward of the mean loss over `total_rows` rows. `tokens` are some of these rows.
inline void backward(SmallModel& model, const at::Tensor& tokens, int64_t total_rows) {
  (loss_sum(model(tokens), tokens) / static_cast<double>(total_rows * 4)).backward();
}
// Backward over all rows of step `step`.
inline void plain_backward(SmallModel& model, int64_t step, int64_t rows = 12) {
  backward(model, tokens_of(step, rows), rows);
}
// Backward over this rank's rows of step `step`.
inline void rank_backward(SmallModel& model, const comm::World& world, int64_t step, int64_t rows = 12) {
  backward(model, rows_of_rank(tokens_of(step, rows), world.rank(), world.size()), rows);
}

inline at::Tensor whole(const at::Tensor& tensor) {
  at::NoGradGuard no_grad;
  return is_dtensor(tensor) ? full_tensor(tensor) : tensor;
}

inline std::vector<at::Tensor> whole_parameters(nn::Module& module) {
  std::vector<at::Tensor> out;
  for (const auto& parameter : module.parameters()) out.push_back(whole(parameter).clone());
  return out;
}
// Full gradients of all parameters; undefined for a parameter without a gradient.
inline std::vector<at::Tensor> whole_gradients(nn::Module& module) {
  std::vector<at::Tensor> out;
  for (const auto& parameter : module.parameters()) {
    out.push_back(parameter.grad().defined() ? whole(parameter.grad()).clone() : at::Tensor());
  }
  return out;
}

// Largest relative distance |a - b| / |b| over pairs, on any devices; 1 if only one tensor of a pair is defined.
inline double distance(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  double worst = a.size() == b.size() ? 0 : 1;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    if (a[i].defined() != b[i].defined() || (a[i].defined() && a[i].sizes() != b[i].sizes())) return 1;
    if (!a[i].defined()) continue;
    const auto found = a[i].cpu().to(at::kDouble), wanted = b[i].cpu().to(at::kDouble);
    worst = std::max(worst, (found - wanted).norm().item<double>() / std::max(wanted.norm().item<double>(), 1e-30));
  }
  return worst;
}
inline bool same_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].defined() != b[i].defined() || (a[i].defined() && !a[i].cpu().equal(b[i].cpu()))) return false;
  }
  return a.size() == b.size();
}

inline constexpr double kTolerance = 1e-6;  // relative error in float32

using WorldPtr = std::shared_ptr<comm::World>;

inline MeshPtr line(const WorldPtr& world) {
  return init_device_mesh(world, test_device_type(), {world->size()}, {"dp"});
}
// The group of all ranks, for tensors of their device. COLLECTIVE.
inline std::shared_ptr<comm::Group> group_of(const WorldPtr& world) {
  return on_accelerator() ? line(world)->group(0) : world->group();
}
inline void on_threads(int size, const RankBody& body) { run_ranks({.size = size, .mode = RankMode::kThreads}, body); }

// The kind and message of the Error that `call` throws; empty when it throws none.
inline std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace tessera::testing
