// Tests the layout, the sharding and the training of flat parameters against PyTorch's FullyShardedDataParallel.
#include <ATen/ops/arange.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "tessera/optim/optimizer.h"
#include "tests/fsdp1/fsdp1_model.h"
#include "tests/support/process.h"

namespace tessera::testing {
namespace {

using nlohmann::json;

// The modules of the oracle script, tests/fsdp1/oracle/fsdp1.py.
struct OracleUnit : nn::Callable<OracleUnit> {
  std::vector<std::unique_ptr<at::Tensor>> values;
  std::vector<at::Tensor> start;

  OracleUnit(const json& parameters, int64_t unit, const std::vector<std::shared_ptr<OracleUnit>>& before) {
    for (size_t p = 0; p < parameters.size(); ++p) {
      values.push_back(std::make_unique<at::Tensor>());
      const auto value = value_of(parameters[p], unit, static_cast<int64_t>(p), before);
      const bool trained = !parameters[p]["frozen"].get<bool>();
      register_parameter("p" + std::to_string(p), *values[p], value);
      values[p]->set_requires_grad(trained);
      start.push_back(value.detach().clone());
    }
  }
  at::Tensor value_of(const json& parameter, int64_t unit, int64_t p,
                      const std::vector<std::shared_ptr<OracleUnit>>& before) const {
    if (const auto& like = parameter["like"]; !like.is_null()) {
      const auto& of = like[0] == unit ? values : before[like[0].get<size_t>()]->values;
      return *of[like[1].get<size_t>()];
    }
    const auto order = parameter["order"].get<std::vector<int64_t>>();
    std::vector<int64_t> lying, back(order.size());
    for (size_t d = 0; d < order.size(); ++d) {
      lying.push_back(parameter["shape"][static_cast<size_t>(order[d])]);
      back[static_cast<size_t>(order[d])] = static_cast<int64_t>(d);
    }
    const auto numel = c10::multiply_integers(lying);
    return here((at::arange(numel, at::kDouble) + 10 * p + 100 * unit).sin().to(at::kFloat).view(lying).permute(back));
  }
  at::Tensor forward(const at::Tensor& zero) {
    at::Tensor sum = zero;
    for (size_t p = 0; p < values.size(); ++p) sum = sum + (*values[p] * (start[p] + 0.5)).sum().square();
    return sum;
  }
};

struct OracleModel : nn::Callable<OracleModel> {
  std::vector<std::shared_ptr<OracleUnit>> units;
  explicit OracleModel(const json& specs) {
    for (size_t u = 0; u < specs.size(); ++u) {
      auto unit = std::make_shared<OracleUnit>(specs[u]["parameters"], static_cast<int64_t>(u), units);
      units.push_back(register_module("u" + std::to_string(u), unit));
    }
  }
  at::Tensor forward(at::Tensor sum) {
    for (auto& unit : units) sum = (*unit)(sum);
    return sum;
  }
};

json described(const FlatParameterHandle& handle) {
  const auto& layout = handle.layout();
  json out{{"numels_with_padding", layout.numels_with_padding()},
           {"is_padding", layout.is_padding()},
           {"requires_grad", layout.requires_grad()},
           {"fqns", json::array()},
           {"shared", json::array()},
           {"infos", json::array()}};
  for (const auto& member : layout.members()) out["fqns"].push_back(member.fqn);
  for (const auto& shared : layout.shared()) out["shared"].push_back({shared.fqn, shared.primary_fqn});
  for (const auto& info : handle.shard_param_infos()) {
    out["infos"].push_back({info.in_shard ? 1 : 0, info.offset_in_shard, info.numel_in_shard, info.intra_param_start,
                            info.intra_param_end});
  }
  const bool sharded = handle.sharding_strategy() != ShardingStrategy::kNoShard;
  out["padding"] = sharded ? layout.shard_padding(handle.group()->rank()) : 0;
  return out;
}

std::optional<c10::ScalarType> dtype_of(const json& name) {
  if (name.is_null()) return std::nullopt;
  return name == "bfloat16" ? at::kBFloat16 : name == "float32" ? at::kFloat : at::kDouble;
}

void compare(const json& request, const json& expected, const WorldPtr& world) {
  OracleModel model(request["units"]);
  const std::map<std::string, ShardingStrategy> strategies = {{"FULL_SHARD", ShardingStrategy::kFullShard},
                                                              {"SHARD_GRAD_OP", ShardingStrategy::kShardGradOp},
                                                              {"NO_SHARD", ShardingStrategy::kNoShard}};
  const Fsdp1Options options = {
      world->group(test_device().type()),
      strategies.at(request["strategy"]),
      request["use_orig_params"].get<bool>(),
      {.param_dtype = dtype_of(request["param_dtype"]), .reduce_dtype = dtype_of(request["reduce_dtype"])}};
  for (size_t u = 0; u < model.units.size(); ++u) {
    if (request["units"][u]["nested"].get<bool>()) wrap_fsdp1(*model.units[u], options);
  }
  wrap_fsdp1(model, options);
  optim::ParameterGroup all{.names = {}, .weight_decay = 0.1};
  for (const auto& named : model.named_parameters()) all.names.push_back(named.name);
  const auto optimizer = optim::make_adamw(model, {.lr = 0.01, .groups = {all}});
  for (int step = 0; step < request["steps"].get<int>(); ++step) {
    model(here(at::zeros({}))).backward();
    optimizer->step();
    optimizer->zero_grad();
  }
  const auto handles = flat_parameter_handles(model);
  ASSERT_EQ(handles.size(), expected.size()) << request.dump();
  for (size_t i = 0; i < handles.size(); ++i) {
    json want = expected[i];
    const auto shard = at::tensor(want["shard"].get<std::vector<double>>(), at::kDouble);
    want.erase("shard");
    EXPECT_EQ(described(*handles[i]), want) << request.dump();
    ASSERT_EQ(handles[i]->shard().sizes(), shard.sizes());
    EXPECT_TRUE(handles[i]->shard().cpu().to(at::kDouble).allclose(shard, 1e-5, 1e-6)) << request.dump();
  }
}

json parameter(std::vector<int64_t> shape, std::vector<int64_t> order = {}) {
  for (int64_t d = 0; order.size() < shape.size(); ++d) order.push_back(d);
  return {{"shape", shape}, {"order", order}, {"frozen", false}, {"like", nullptr}};
}
json frozen(json parameter) {
  parameter["frozen"] = true;
  return parameter;
}
json like(int64_t unit, int64_t index) {
  auto out = parameter({});
  out["like"] = {unit, index};
  return out;
}
json unit(bool nested, std::vector<json> parameters) { return {{"nested", nested}, {"parameters", parameters}}; }

// Requests each model with all options. PyTorch's FSDP1 can neither train a flat parameter without elements, nor wrap a
// parameter of 0 dims.
std::vector<json> requests() {
  const json plain = {unit(false, {parameter({5, 3}), parameter({5})}), unit(false, {parameter({1, 5})})};
  const json nested = {unit(true, {parameter({5, 3}), parameter({5})}),
                       unit(false, {parameter({4, 2}), parameter({3})}), unit(true, {parameter({2})})};
  const json strided = {unit(true, {parameter({3, 4}, {1, 0}), parameter({2, 3, 2, 2}, {0, 2, 3, 1}), parameter({4})}),
                        unit(false, {parameter({4, 1}, {1, 0}), parameter({3})})};
  const json shared = {unit(false, {parameter({3, 3}), parameter({2}), like(0, 0)}),
                       unit(false, {like(0, 1), parameter({2})})};
  const json empty = {unit(false, {parameter({2}), parameter({0}), parameter({3}), parameter({0, 2})})};
  const json frozen_some = {unit(false, {parameter({5}), frozen(parameter({3})), parameter({2})})};
  const json frozen_unit = {unit(true, {frozen(parameter({5})), frozen(parameter({3}))}),
                            unit(false, {parameter({4})})};
  std::vector<json> out;
  const auto add = [&](const json& units, bool use_orig_params, const char* strategy, int steps,
                       const json& param_dtype = nullptr, const json& reduce_dtype = nullptr) {
    out.push_back({{"units", units},
                   {"use_orig_params", use_orig_params},
                   {"strategy", strategy},
                   {"steps", steps},
                   {"param_dtype", param_dtype},
                   {"reduce_dtype", reduce_dtype}});
  };
  for (const bool use_orig_params : {false, true}) {
    for (const auto* strategy : {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"}) {
      for (const auto& units : {plain, nested, shared}) add(units, use_orig_params, strategy, 3);
    }
    add(strided, use_orig_params, "FULL_SHARD", 3);
    add(empty, use_orig_params, "FULL_SHARD", 0);
    add(frozen_unit, use_orig_params, "FULL_SHARD", 2);
    // In float64 the values agree to rounding. In bfloat16 only the layout is compared.
    add(nested, use_orig_params, "FULL_SHARD", 3, "float64");
    add(plain, use_orig_params, "NO_SHARD", 3, "float64", "float32");
    add(nested, use_orig_params, "FULL_SHARD", 0, "bfloat16");
  }
  add(frozen_some, true, "FULL_SHARD", 2);
  return out;
}

TEST(Fsdp1Oracle, LayoutAndTrainingMatchPyTorch) {
  const int ranks = 3;
  std::string input;
  for (const auto& request : requests()) input += request.dump() + "\n";
  const auto run = run_python("tests/fsdp1/oracle/fsdp1.py", {std::to_string(ranks)}, {.input = input});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  std::vector<json> answers;
  std::istringstream lines(run.out);
  for (std::string line; std::getline(lines, line);) answers.push_back(json::parse(line));
  ASSERT_EQ(answers.size(), requests().size()) << run.err;
  on_threads(ranks, [&](const WorldPtr& world) {
    for (size_t i = 0; i < answers.size(); ++i) {
      compare(requests()[i], answers[i][static_cast<size_t>(world->rank())], world);
    }
  });
}

}  // namespace
}  // namespace tessera::testing
