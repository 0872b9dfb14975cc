// A small model for tests of state under FSDP1. Its numbers of rows divide by no number of ranks; it has vectors
// shorter than the number of ranks, a transposed weight, a shared weight and a buffer. The file also has functions that
// wrap and train it in the same way on any number of ranks.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tanh.h>
#include <c10/core/GradMode.h>

#include <memory>
#include <string>
#include <utility>

#include "tessera/fsdp1/fully_sharded_data_parallel.h"
#include "tessera/nn/module.h"
#include "tessera/optim/optimizer.h"
#include "tessera/state/optimizer_dict.h"
#include "tessera/state/state_value.h"
#include "tests/support/ranks.h"

namespace tessera::testing {

struct Dense : nn::Callable<Dense> {
  at::Tensor weight, bias;
  Dense(at::Generator& random, int64_t in, int64_t out, bool transposed = false) {
    const at::Tensor values = at::randn({transposed ? in : out, transposed ? out : in}, random) * 0.4;
    register_parameter("weight", weight, transposed ? values.t() : values);
    register_parameter("bias", bias, at::randn({out}, random) * 0.1);
  }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight, bias); }
};

struct Fsdp1Net : nn::Callable<Fsdp1Net> {
  std::shared_ptr<Dense> first, middle, last;
  at::Tensor scale, again, mean;
  explicit Fsdp1Net(uint64_t seed = 3, bool transposed = true) {
    at::Generator random = at::detail::createCPUGenerator(seed);
    const auto shared = register_parameter("scale", scale, at::randn({7}, random) + 1);
    register_parameter("again", again, shared);  // the same parameter
    first = register_module("first", std::make_shared<Dense>(random, 3, 5));
    middle = register_module("middle", std::make_shared<Dense>(random, 5, 7, transposed));
    last = register_module("last", std::make_shared<Dense>(random, 7, 1));
    register_buffer("mean", mean, at::randn({2}, random), /*persistent=*/true);
  }
  at::Tensor forward(const at::Tensor& x) {
    return (*last)(at::tanh((*middle)(at::tanh((*first)(x)))) * scale) + again.sum();
  }
};

enum class Wrapping { kEach, kRoot, kMiddle };

inline void wrap(Fsdp1Net& net, const std::shared_ptr<comm::Group>& group, Wrapping wrapping, bool use_orig_params,
                 ShardingStrategy strategy = ShardingStrategy::kFullShard) {
  const Fsdp1Options options{.group = group, .sharding_strategy = strategy, .use_orig_params = use_orig_params};
  if (wrapping == Wrapping::kEach) {
    wrap_fsdp1(*net.first, options);
    wrap_fsdp1(*net.last, options);
  }
  if (wrapping != Wrapping::kRoot) wrap_fsdp1(*net.middle, options);
  wrap_fsdp1(net, options);
}

inline std::unique_ptr<optim::Optimizer> adam_of(nn::Module& net) {
  return optim::make_adamw(net, {.lr = 0.05, .weight_decay = 0});
}

// Trains with the same batches on every rank and on one device.
inline void train(Fsdp1Net& net, optim::Optimizer& optimizer, int steps, int from = 0) {
  for (int step = from; step < from + steps; ++step) {
    const auto x = at::linspace(-1, 1 + step, 12).view({4, 3});
    (net(x) - 0.3 * step).pow(2).mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
}

// Returns "" if both values have the same structure and are equal up to float32 rounding.
inline std::string state_difference(const StateValue& a, const StateValue& b, const std::string& at = "") {
  const std::string types = at + ": " + type_name(a) + " and " + type_name(b);
  if (a.is_tensor() != b.is_tensor() || a.is_dict() != b.is_dict() || a.is_list() != b.is_list()) return types;
  if (a.is_tensor()) {
    const auto &left = a.tensor(), &right = b.tensor();
    if (left.sizes() != right.sizes() || left.scalar_type() != right.scalar_type()) return at + ": shapes differ";
    return at::allclose(left.detach(), right.detach(), 1e-4, 1e-6) ? "" : at + ": values differ";
  }
  if (a.is_dict()) {
    if (a.dict().size() != b.dict().size()) return at + ": sizes differ";
    for (const auto& [key, value] : a.dict()) {
      const auto* other = b.dict().find(key);
      if (!other) return at + "." + to_string(key) + ": only one has it";
      if (auto text = state_difference(value, *other, at + "." + to_string(key)); !text.empty()) return text;
    }
  }
  if (a.is_list()) {
    if (a.list().size() != b.list().size()) return at + ": lengths differ";
    for (size_t i = 0; i < a.list().size(); ++i) {
      if (auto text = state_difference(a.list()[i], b.list()[i], at + "." + std::to_string(i)); !text.empty()) {
        return text;
      }
    }
  }
  if (a.is_int() || a.is_double()) return a.number() == b.number() ? "" : types + ": values differ";
  if (a.is_string()) return b.is_string() && a.string() == b.string() ? "" : types + ": texts differ";
  return "";
}

inline std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

using WorldPtr = std::shared_ptr<comm::World>;
inline void on_ranks(int size, const RankBody& body) { run_ranks({.size = size, .mode = RankMode::kThreads}, body); }

}  // namespace tessera::testing
