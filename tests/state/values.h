// State dicts for tests: a small model without sharding, gradients that are drawn, and text for comparisons.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include <memory>
#include <string>
#include <vector>

#include "tessera/nn/module.h"
#include "tessera/optim/optimizer.h"
#include "tessera/state/state_dict_structure.h"
#include "tessera/state/state_value.h"

namespace tessera::testing {

inline at::Tensor drawn(std::vector<int64_t> shape, uint64_t seed) {
  return at::randn(shape, at::detail::createCPUGenerator(seed), at::TensorOptions(at::kFloat));
}

struct AffineLayer : nn::Callable<AffineLayer> {
  at::Tensor weight, bias;
  AffineLayer(int64_t in, int64_t out, bool with_bias, uint64_t seed) {
    register_parameter("weight", weight, drawn({out, in}, seed));
    if (with_bias) register_parameter("bias", bias, drawn({out}, seed + 1));
  }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight, bias); }
};

// The parameters are a.weight, a.bias, b.weight, b.bias, c.weight. Of the two buffers only `scale` is persistent.
struct AffineNet : nn::Callable<AffineNet> {
  std::shared_ptr<AffineLayer> a, b, c;
  at::Tensor scale, scratch;
  explicit AffineNet(uint64_t seed = 1) {
    a = register_module("a", std::make_shared<AffineLayer>(3, 4, true, seed));
    b = register_module("b", std::make_shared<AffineLayer>(4, 2, true, seed + 10));
    c = register_module("c", std::make_shared<AffineLayer>(2, 2, false, seed + 20));
    register_buffer("scale", scale, drawn({2}, seed + 30), /*persistent=*/true);
    register_buffer("scratch", scratch, at::zeros({3}));
  }
};

// Draws a gradient for every parameter that requires one.
inline void draw_gradients(nn::Module& model, uint64_t seed) {
  for (const auto& parameter : model.parameters()) {
    if (parameter.requires_grad()) parameter.mutable_grad() = drawn(parameter.sizes().vec(), ++seed);
  }
}

inline void train(nn::Module& model, optim::Optimizer& optimizer, int steps, uint64_t seed = 100) {
  for (int step = 0; step < steps; ++step) {
    draw_gradients(model, seed + 20 * static_cast<uint64_t>(step));
    optimizer.step();
    optimizer.zero_grad();
  }
}

inline bool same_parameters(nn::Module& a, nn::Module& b) {
  const auto left = a.parameters(), right = b.parameters();
  for (size_t i = 0; i < left.size(); ++i) {
    if (!left[i].detach().equal(right[i].detach())) return false;
  }
  return left.size() == right.size();
}

inline std::vector<std::string> keys_of(const StateDict& dict) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : dict) keys.push_back(to_string(key));
  return keys;
}

// Copies the tensors, so that later steps do not change them.
inline StateValue copy_of(const StateValue& value) {
  if (value.is_tensor()) return value.tensor().detach().clone();
  if (value.is_dict()) {
    StateDict out;
    for (const auto& [key, child] : value.dict()) out.set(key, copy_of(child));
    return out;
  }
  if (value.is_list()) {
    StateList out;
    for (const auto& child : value.list()) out.push_back(copy_of(child));
    return out;
  }
  return value;
}
inline StateDict copy_of(const StateDict& dict) { return copy_of(StateValue(dict)).dict(); }

template <class Call>
std::string thrown_by(Call call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace tessera::testing
