// Tests the forms of an optimizer's state dict against torch.optim and torch.distributed.checkpoint.state_dict.
#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <array>
#include <nlohmann/json.hpp>

#include "tessera/state/optimizer_dict.h"
#include "tessera/state/state_dict.h"
#include "tests/state/values.h"
#include "tests/support/process.h"

namespace tessera::testing {
namespace {

using Json = nlohmann::ordered_json;

Json state_dicts_oracle(const std::vector<std::string>& arguments, const std::string& input = "") {
  const auto run = run_python("tests/state/oracle/state_dicts.py", arguments, {.input = input});
  if (run.exit_code != 0) throw std::runtime_error(run.err);
  return Json::parse(run.out);
}

bool is_number(const std::string& key) { return key.find_first_not_of("0123456789") == std::string::npos; }

StateValue read(const Json& value) {
  if (value.is_null()) return {};
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number_integer()) return value.get<int64_t>();
  if (value.is_number()) return value.get<double>();
  if (value.is_string()) return value.get<std::string>();
  if (value.is_array()) {
    StateList out;
    for (const auto& item : value) out.push_back(read(item));
    return out;
  }
  if (value.contains("values")) {
    return at::tensor(value["values"].get<std::vector<double>>(), at::kDouble)
        .to(at::kFloat)
        .view(value["shape"].get<std::vector<int64_t>>());
  }
  if (value.contains("tuple")) return StateTuple{read(value["tuple"]).list()};
  StateDict out;
  for (const auto& [key, item] : value.items()) {
    out.set(is_number(key) ? StateKey(int64_t{std::stoll(key)}) : StateKey(key), read(item));
  }
  return out;
}

Json show(const StateValue& value) {
  if (value.is_none()) return nullptr;
  if (value.is_bool()) return std::get<bool>(value.variant());
  if (value.is_int()) return value.integer();
  if (value.is_double()) return value.number();
  if (value.is_string()) return value.string();
  if (value.is_tensor()) {
    const auto flat = value.tensor().detach().flatten().to(at::kDouble);
    return {
        {"shape", value.tensor().sizes().vec()},
        {"values", std::vector<double>(flat.const_data_ptr<double>(), flat.const_data_ptr<double>() + flat.numel())}};
  }
  if (value.is_tuple()) return {{"tuple", show(std::get<StateTuple>(value.variant()).items)}};
  Json out = value.is_list() ? Json::array() : Json::object();
  if (value.is_list()) {
    for (const auto& item : value.list()) out.push_back(show(item));
  } else {
    for (const auto& [key, item] : value.dict()) out[to_string(key)] = show(item);
  }
  return out;
}

// Expects the same keys and kinds of values, and nearly equal tensors and numbers. Our SGD counts its steps; PyTorch's
// has no such value.
void expect_close(const Json& ours, const Json& theirs, const std::string& path, bool sgd) {
  SCOPED_TRACE(path);
  if (theirs.is_object()) {
    ASSERT_TRUE(ours.is_object());
    for (const auto& [key, value] : theirs.items()) {
      ASSERT_TRUE(ours.contains(key)) << key;
      expect_close(ours[key], value, path + "/" + key, sgd);
    }
    for (const auto& [key, value] : ours.items()) {
      const bool is_step = key == "step" || key.ends_with(".step");
      EXPECT_TRUE(theirs.contains(key) || (sgd && is_step)) << key << " is ours only";
    }
  } else if (theirs.is_array()) {
    ASSERT_EQ(ours.size(), theirs.size());
    for (size_t i = 0; i < ours.size(); ++i) expect_close(ours[i], theirs[i], path + "/" + std::to_string(i), sgd);
  } else if (theirs.is_number_float()) {
    ASSERT_TRUE(ours.is_number());
    EXPECT_NEAR(ours.get<double>(), theirs.get<double>(), 1e-6 * std::max(1.0, std::abs(theirs.get<double>())));
  } else if (theirs.is_number()) {
    ASSERT_TRUE(ours.is_number());
    EXPECT_EQ(ours.get<double>(), theirs.get<double>());
  } else {
    EXPECT_EQ(ours, theirs);
  }
}

class Twin {
 public:
  Twin(bool adam, const Json& weights) {
    net_.c->weight.set_requires_grad(false);
    net_.c->own_parameters()[0].parameter.set_requires_grad(false);
    set_model_state_dict(net_, read(weights).dict());
    const std::vector<optim::ParameterGroup> groups = {
        {.names = {"a.weight", "b.weight", "c.weight"}, .weight_decay = 0.3},
        {.names = {"a.bias", "b.bias"}, .lr_factor = 0.5}};
    optimizer_ = adam ? optim::make_adamw(net_, {.lr = 0.1, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6, .groups = groups})
                      : optim::make_sgd(net_, {.lr = 0.1, .momentum = 0.9, .dampening = 0.25, .groups = groups});
  }

  void steps(const Json& gradients, size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      for (const auto& named : net_.named_parameters()) {
        if (named.slot->parameter.requires_grad()) {
          named.slot->parameter.mutable_grad() = read(gradients[i][named.name]).tensor();
        }
      }
      optimizer_->step();
    }
  }
  Json weights() { return show(get_model_state_dict(net_)); }
  Json form(const std::string& name) {
    if (name == "ids") return show(optimizer_state_dict(*optimizer_));
    return show(get_optimizer_state_dict(net_, {optimizer_.get()}, {.flatten_optimizer_state_dict = name == "flat"}));
  }
  void load(const Json& state) { set_optimizer_state_dict(net_, {optimizer_.get()}, read(state).dict()); }

 private:
  AffineNet net_;
  std::unique_ptr<optim::Optimizer> optimizer_;
};

constexpr std::array kForms = {"ids", "names", "flat"};

// Our dicts must have the keys and values of PyTorch's. Training that continues from PyTorch's dict must give PyTorch's
// weights.
void expect_forms_of_pytorch(bool adam, const Json& run, Json& to_resume) {
  Twin straight(adam, run["start"]);
  straight.steps(run["gradients"], 0, 3);
  expect_close(straight.weights(), run["weights"], "weights", false);
  for (const std::string form : kForms) {
    expect_close(straight.form(form), run[form], form, !adam);
    Twin twin(adam, run["weights"]);
    twin.load(run[form]);
    twin.steps(run["gradients"], 3, 5);
    expect_close(twin.weights(), run["end"], "resumed from " + form, false);
    to_resume.push_back({{"optimizer", adam ? "adamw" : "sgd"},
                         {"form", form},
                         {"weights", straight.weights()},
                         {"gradients", {run["gradients"][3], run["gradients"][4]}},
                         {"state", straight.form(form)}});
  }
}

TEST(StateDictOracle, FormsMatchPyTorchAndPyTorchResumesFromOurs) {
  const auto runs = state_dicts_oracle({"train"});
  Json to_resume = Json::array();
  for (const bool adam : {true, false}) expect_forms_of_pytorch(adam, runs[adam ? "adamw" : "sgd"], to_resume);
  const auto ends = state_dicts_oracle({"resume"}, to_resume.dump());
  ASSERT_EQ(ends.size(), 6u);
  for (size_t i = 0; i < ends.size(); ++i) {
    expect_close(ends[i], runs[i < 3 ? "adamw" : "sgd"]["end"], std::string("PyTorch from our ") + kForms[i % 3],
                 false);
  }
}

}  // namespace
}  // namespace tessera::testing
