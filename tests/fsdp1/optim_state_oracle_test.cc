// Tests model and optimizer state under FSDP1 against PyTorch's FullyShardedDataParallel, with the same model and
// batches on two ranks.
#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "tessera/fsdp1/state/model_state_dict.h"
#include "tessera/fsdp1/state/optim_state_dict.h"
#include "tessera/state/sharded_tensor.h"
#include "tests/fsdp1/net.h"
#include "tests/support/process.h"

namespace tessera::testing {
namespace {

using nlohmann::json;

at::Tensor listed_tensor(const json& listed) {
  return at::tensor(listed["values"].get<std::vector<double>>(), at::kDouble)
      .to(at::kFloat)
      .view(listed["shape"].get<std::vector<int64_t>>());
}

struct OracleLinear : nn::Callable<OracleLinear> {
  at::Tensor weight, bias;
  OracleLinear(const json& start, const std::string& name) {
    register_parameter("weight", weight, listed_tensor(start[name + ".weight"]));
    if (start.contains(name + ".bias")) register_parameter("bias", bias, listed_tensor(start[name + ".bias"]));
  }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight, bias); }
};

struct OracleNet : nn::Callable<OracleNet> {
  at::Tensor scale, again, empty;
  std::shared_ptr<OracleLinear> first, frozen, middle, last;
  explicit OracleNet(const json& start) {
    const auto shared = register_parameter("scale", scale, listed_tensor(start["scale"]));
    register_parameter("again", again, shared);
    register_parameter("empty", empty, listed_tensor(start["empty"]));
    first = register_module("first", std::make_shared<OracleLinear>(start, "first"));
    frozen = register_module("frozen", std::make_shared<OracleLinear>(start, "frozen"));
    middle = register_module("middle", std::make_shared<OracleLinear>(start, "middle"));
    last = register_module("last", std::make_shared<OracleLinear>(start, "last"));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto hidden = at::tanh((*middle)(at::tanh((*first)(x)))) + (*frozen)(x);
    return (*last)(hidden * scale) + again.sum() + empty.sum();
  }
};

void freeze(nn::Module& net, const std::vector<std::string>& names) {
  for (const auto& parameter : net.named_parameters()) {
    if (std::ranges::find(names, parameter.name) == names.end()) continue;
    parameter.slot->parameter.set_requires_grad(false);
    parameter.slot->slot->set_requires_grad(false);
  }
}

bool near(const at::Tensor& value, const json& listed) {
  const auto wanted = listed_tensor(listed);
  return value.sizes() == wanted.sizes() && at::allclose(value.detach(), wanted, 1e-4, 1e-6);
}

void expect_value(const StateValue& value, const json& wanted, const std::string& name) {
  if (!wanted.contains("chunks")) {
    ASSERT_TRUE(value.is_tensor()) << name;
    EXPECT_TRUE(near(value.tensor(), wanted)) << name << " " << wanted.dump();
    return;
  }
  ASSERT_TRUE(value.is_sharded()) << name;
  const auto& shards = value.sharded()->local_shards;
  EXPECT_EQ(json(value.sharded()->size), wanted["size"]) << name;
  ASSERT_EQ(shards.size(), wanted["chunks"].size()) << name;
  for (size_t i = 0; i < shards.size(); ++i) {
    EXPECT_EQ(json(shards[i].metadata.shard_offsets), wanted["chunks"][i]["offsets"]) << name;
    EXPECT_EQ(json(shards[i].metadata.shard_sizes), wanted["chunks"][i]["sizes"]) << name;
    EXPECT_TRUE(near(shards[i].tensor, wanted["chunks"][i])) << name;
  }
}

void expect_states(const StateDict& found, const json& wanted, const std::string& what) {
  ASSERT_EQ(found.size(), wanted.size()) << what;
  for (const auto& [key, state] : found) {
    ASSERT_TRUE(wanted.contains(to_string(key))) << what << " " << to_string(key);
    const auto& expected = wanted[to_string(key)];
    EXPECT_EQ(state.dict().size(), expected.size()) << what << " " << to_string(key);
    for (const auto& [name, value] : state.dict()) {
      const auto full_name = what + " " + to_string(key) + " " + to_string(name);
      ASSERT_TRUE(expected.contains(to_string(name))) << full_name;
      expect_value(value, expected[to_string(name)], full_name);
    }
  }
}

void expect_like_pytorch(const WorldPtr& world, const json& wanted, bool original) {
  OracleNet net(wanted["start"]);
  freeze(net, original ? std::vector<std::string>{"frozen.weight", "middle.bias", "empty"}
                       : std::vector<std::string>{"frozen.weight"});
  const Fsdp1Options options{.group = world->group(), .use_orig_params = original};
  wrap_fsdp1(*net.first, options);
  wrap_fsdp1(*net.frozen, options);
  wrap_fsdp1(net, options);
  const auto optimizer = adam_of(net);
  for (int step = 0; step < 3; ++step) {
    const auto x = at::linspace(-1, 1 + step, 12).view({4, 3});
    (net(x) - 0.3 * step).pow(2).mean().backward();
    optimizer->step();
    optimizer->zero_grad();
  }
  const auto full = optim_state_dict(net, *optimizer);
  expect_states(full.at("state").dict(), wanted["full"], "full");
  const auto& groups = full.at("param_groups").list();
  std::vector<std::string> names, expected_names;
  for (const auto& group : groups) {
    for (const auto& name : group.dict().at("params").list()) names.push_back(name.string());
  }
  for (const auto& group : wanted["groups"]) {
    for (const auto& name : group) expected_names.push_back(name);
  }
  EXPECT_THAT(names, ::testing::UnorderedElementsAreArray(expected_names));

  const StateDictTypeScope scope(net, {.type = StateDictType::kSharded});
  const auto sharded = optim_state_dict(net, *optimizer);
  expect_states(sharded.at("state").dict(), wanted["sharded"], "sharded");
  for (const auto* dict : {&full, &sharded}) {
    // Our optimizer numbers parameters by its own groups, so the states are compared by name.
    const auto ids = optimizer_parameter_names(*optimizer);
    const auto loaded = optim_state_dict_to_load(net, *optimizer, *dict);
    std::vector<std::string> order;
    for (const auto& parameter : net.named_parameters()) order.push_back(parameter.name);
    StateDict by_position;
    for (const auto& [key, state] : loaded.at("state").dict()) {
      const auto& name = ids.at(static_cast<size_t>(std::get<int64_t>(key)));
      by_position.set(std::ranges::find(order, name) - order.begin(), state);
    }
    expect_states(by_position, wanted["loaded"], "loaded");
  }
  for (const auto& [name, value] : fsdp1_state_dict(net)) {
    expect_value(value, wanted["weight_chunks"][to_string(name)], "weight chunk " + to_string(name));
  }
  const StateDictTypeScope whole(net, {});
  const auto weights = fsdp1_state_dict(net);
  EXPECT_EQ(weights.size(), wanted["weights"].size());
  for (const auto& [name, value] : weights) {
    expect_value(value, wanted["weights"][to_string(name)], "weight " + to_string(name));
  }
  const StateDictTypeScope local(net, {.type = StateDictType::kLocal});
  for (const auto& [name, value] : fsdp1_state_dict(net)) {
    ASSERT_TRUE(wanted["local"].contains(to_string(name))) << to_string(name);
    expect_value(value, wanted["local"][to_string(name)], "local " + to_string(name));
  }
}

TEST(Fsdp1State, MatchesPyTorchOnTwoRanks) {
  const auto run = run_python("tests/fsdp1/oracle/optim_state.py", {}, {.timeout_seconds = 300});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const auto oracle = json::parse(run.out);
  on_ranks(2, [&](const WorldPtr& world) {
    expect_like_pytorch(world, oracle[static_cast<size_t>(world->rank())]["flat"], false);
    expect_like_pytorch(world, oracle[static_cast<size_t>(world->rank())]["original"], true);
  });
}

}  // namespace
}  // namespace tessera::testing
