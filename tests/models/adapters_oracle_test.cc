// Tests of adapters against PEFT: Tessera loads PEFT's adapters, PEFT loads Tessera's adapters, and both give the same
// logits and gradients.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tessera/formats/safetensors/safetensors.h"
#include "tessera/formats/safetensors/safetensors_writer.h"
#include "tessera/models/adapters/adapters.h"
#include "tests/models/tiny.h"
#include "tests/support/alone_on_device.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

struct AdapterCase {
  AdapterConfig ours;
  json theirs;  // arguments of PEFT's LoraConfig
};

std::vector<AdapterCase> adapter_cases() {
  return {{{.rank = 3, .alpha = 6, .target_modules = {"q_proj", "v_proj"}},
           {{"r", 3}, {"lora_alpha", 6}, {"target_modules", {"q_proj", "down_proj"}}, {"lora_dropout", 0.1}}},
          {{.rank = 4, .alpha = 8, .rslora = true, .dora = true},
           {{"r", 2}, {"lora_alpha", 8}, {"target_modules", "all-linear"}, {"use_dora", true}, {"use_rslora", true}}},
          {{.rank = 2, .alpha = 2, .target_modules = {R"(model\.layers\.1\..*_proj)"}},
           {{"r", 2}, {"target_modules", R"(model\.layers\.0\.mlp\..*_proj)"}, {"init_lora_weights", "gaussian"}}}};
}

std::shared_ptr<CausalLM> base_model(const fs::path& dir) {
  auto model = from_pretrained(dir, at::kFloat, testing::test_device());
  model->train(false);
  return model;
}

// Changes lora_B and the magnitudes, which would otherwise have their initial values.
void disturb(CausalLM& model) {
  const at::NoGradGuard no_grad;
  int64_t seed = 3;
  for (const auto& [path, linear] : adapted_linears(model)) {
    for (const auto& named : linear->named_parameters()) {
      const at::Tensor& parameter = named.slot->parameter;
      if (named.name.starts_with("lora_B")) {
        auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(++seed));
        parameter.copy_(at::normal(0, 0.2, parameter.sizes(), generator));
      } else if (named.name.starts_with("lora_magnitude")) {
        parameter.mul_(testing::here(at::linspace(0.8, 1.2, parameter.numel())));
      }
    }
  }
}

void expect_logits_and_gradients(CausalLM& model, const at::Tensor& tokens, const SafetensorsFile& answer,
                                 const std::string& prefix) {
  const auto logits = model.logits({.tokens = tokens});
  EXPECT_LT((logits.cpu() - answer.tensor(prefix + ".logits")).abs().max().item<double>(), 1e-5) << prefix;
  model.loss_sum({.tokens = tokens}, testing::next_labels(tokens)).backward();
  int64_t compared = 0;
  for (const auto& named : model.named_parameters()) {
    const at::Tensor& parameter = named.slot->parameter;
    if (named.name.find(".lora_") == std::string::npos) {
      EXPECT_FALSE(parameter.requires_grad() || parameter.grad().defined()) << named.name << " is frozen";
      continue;
    }
    auto name = "base_model.model." + named.name;
    if (name.ends_with("lora_magnitude_vector.weight")) name.resize(name.size() - 7);
    ASSERT_TRUE(answer.contains(prefix + ".grad." + name)) << name;
    const auto theirs = answer.tensor(prefix + ".grad." + name);
    EXPECT_LT((parameter.grad().cpu() - theirs).abs().max().item<double>(),
              1e-4 * theirs.abs().max().item<double>() + 1e-6)
        << prefix << " " << name;
    ++compared;
  }
  EXPECT_GT(compared, 5);
}

TEST(AdaptersOracle, EqualPeftInBothDirections) {
  const testing::TempFolder folder;
  const auto cases = adapter_cases();
  save_pretrained(*testing::tiny_model(), folder / "base", {});
  const auto tokens = testing::tiny_tokens(2, 9);
  {
    SafetensorsWriter writer(folder / "tokens.safetensors",
                             {{"tokens", at::kLong, {2, 9}}, {"labels", at::kLong, {2, 9}}});
    writer.write("tokens", tokens.cpu());
    writer.write("labels", testing::next_labels(tokens).cpu());
    writer.finish();
  }
  json theirs = json::array();
  std::vector<std::shared_ptr<CausalLM>> models;
  for (size_t i = 0; i < cases.size(); ++i) {
    auto model = base_model(folder / "base");
    add_adapters(*model, cases[i].ours);
    init_adapters(*model, 11);
    disturb(*model);
    save_adapters(*model, folder / fmt::format("ours_{}", i), {.base = (folder / "base").string()});
    save_pretrained(*model, folder / fmt::format("merged_{}", i), {}, {.merge_adapters = true});
    theirs.push_back(cases[i].theirs);
    models.push_back(model);
  }
  const auto run = testing::run_python("tests/models/oracle/peft_adapters.py", {(folder / "").string(), theirs.dump()},
                                       {.timeout_seconds = 300});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  for (size_t i = 0; i < cases.size(); ++i) {
    const auto answer = SafetensorsFile::open(folder / fmt::format("answer_{}.safetensors", i));
    expect_logits_and_gradients(*models[i], tokens, *answer, "ours");
    const auto merged = models[i]->logits({.tokens = tokens});
    EXPECT_LT((merged.cpu() - answer->tensor("merged.logits")).abs().max().item<double>(), 2e-5) << i;
    EXPECT_GT((merged - base_model(folder / "base")->logits({.tokens = tokens})).abs().max().item<double>(), 1e-2)
        << "the adapter does something";

    const auto path = folder / fmt::format("theirs_{}", i);
    auto model = base_model(folder / "base");
    add_adapters(*model, read_adapter_config(path));
    load_adapters(*model, path);
    expect_logits_and_gradients(*model, tokens, *answer, "theirs");
  }
}

}  // namespace
}  // namespace tessera
