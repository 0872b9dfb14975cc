// Tests Muon against torch.optim.Muon and 8-bit AdamW against torchao's, 50 steps each; tests the WSD schedule against
// transformers'.
#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tessera/formats/safetensors/safetensors.h"
#include "tessera/optim/optimizer.h"
#include "tessera/optim/quantized_moments.h"
#include "tessera/optim/schedule.h"
#include "tests/support/alone_on_device.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera::optim {
namespace {

using nlohmann::json;

constexpr int kSteps = 50;

struct Matrices : nn::Callable<Matrices> {
  at::Tensor wide, tall, square, small;
  explicit Matrices(const SafetensorsFile& file) {
    const auto start = [&](const std::string& name) { return testing::here(file.tensor("start." + name)).clone(); };
    register_parameter("wide", wide, start("wide"));
    register_parameter("tall", tall, start("tall"));
    register_parameter("square", square, start("square"));
    register_parameter("small", small, start("small"));
  }
};

std::vector<std::shared_ptr<const SafetensorsFile>> run_oracle(const std::string& name, const json& all_options,
                                                               const testing::TempFolder& folder) {
  const auto run = testing::run_python("tests/optim/oracle/long_run.py",
                                       {name, all_options.dump(), std::to_string(kSteps), (folder / "").string()});
  if (run.exit_code != 0) throw std::runtime_error(run.err);
  std::vector<std::shared_ptr<const SafetensorsFile>> files;
  for (size_t i = 0; i < all_options.size(); ++i) {
    files.push_back(SafetensorsFile::open(folder / fmt::format("{}.safetensors", i)));
  }
  return files;
}

void take_steps(Matrices& model, Optimizer& optimizer, const SafetensorsFile& file) {
  for (int step = 0; step < kSteps; ++step) {
    for (const auto& named : model.named_parameters()) {
      const at::Tensor& parameter = named.slot->parameter;
      parameter.mutable_grad() =
          testing::here(file.tensor(fmt::format("gradient.{}.{}", step, named.name))) + 0.5 * parameter.detach();
    }
    optimizer.step();
  }
}

double largest_difference(const at::Tensor& a, const at::Tensor& b) {
  return (a.detach().to(at::kCPU, at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
}

TEST(MuonOracle, FiftyStepsEqualPyTorch) {
  testing::TempFolder folder;
  const json all = {
      json{{"lr", 0.02}}, json{{"lr", 0.01}, {"weight_decay", 0.3}, {"adjust_lr_fn", "match_rms_adamw"}},
      json{{"lr", 0.02}, {"nesterov", false}, {"momentum", 0.8}, {"ns_steps", 3}, {"ns_coefficients", {2, -1.5, 0.5}}}};
  const auto files = run_oracle("muon", all, folder);
  for (size_t i = 0; i < all.size(); ++i) {
    const auto& options = all[i];
    const auto& file = files[i];
    Matrices model(*file);
    MuonOptions own{.lr = options["lr"],
                    .weight_decay = options.value("weight_decay", 0.1),
                    .momentum = options.value("momentum", 0.95),
                    .nesterov = options.value("nesterov", true),
                    .ns_steps = options.value("ns_steps", 5),
                    .adjust_lr_fn = options.value("adjust_lr_fn", "original")};
    if (options.contains("ns_coefficients")) {
      own.ns_coefficients = options["ns_coefficients"].get<std::vector<double>>();
    }
    const auto optimizer = make_muon(model, own);
    take_steps(model, *optimizer, *file);
    for (const auto& named : model.named_parameters()) {
      // Our matrix products may run on other kernels than Python's. The differences in bfloat16 rounding add up over
      // the steps.
      EXPECT_LT(largest_difference(named.slot->parameter, file->tensor("end." + named.name)), 2e-3) << named.name;
      EXPECT_LT(largest_difference(optimizer->state(named.name).at("momentum_buffer"),
                                   file->tensor("state." + named.name + ".momentum_buffer")),
                1e-3)
          << named.name;
    }
    const auto moved = largest_difference(file->tensor("end.square"), file->tensor("start.square"));
    EXPECT_GT(moved, 0.05) << "the steps are much larger than what is allowed";
  }
}

TEST(AdamW8bitOracle, FiftyStepsEqualTorchao) {
  TESSERA_CPU_ONLY("8-bit AdamW is refused on accelerators");
  testing::TempFolder folder;
  const json all = {json{{"lr", 0.01}}, json{{"lr", 0.02}, {"weight_decay", 0.3}, {"betas", {0.8, 0.95}}}};
  const auto files = run_oracle("adamw8bit", all, folder);
  for (size_t i = 0; i < all.size(); ++i) {
    const auto& options = all[i];
    const auto& file = files[i];
    Matrices model(*file);
    const auto betas = options.value("betas", std::vector<double>{0.9, 0.999});
    const auto optimizer = make_adamw8bit(model, {{.lr = options["lr"],
                                                   .beta1 = betas[0],
                                                   .beta2 = betas[1],
                                                   .weight_decay = options.value("weight_decay", 0.01)}});
    EXPECT_TRUE(dynamic_map(true).equal(file->tensor("map.signed")));
    EXPECT_TRUE(dynamic_map(false).equal(file->tensor("map.unsigned")));
    take_steps(model, *optimizer, *file);
    for (const auto& named : model.named_parameters()) {
      EXPECT_LT(largest_difference(named.slot->parameter, file->tensor("end." + named.name)), 1e-6) << named.name;
      const auto state = optimizer->state(named.name);
      const bool quantized = named.name == "tall" || named.name == "square";
      ASSERT_EQ(state.contains("exp_avg_codes"), quantized) << named.name;
      for (const std::string& key : quantized ? std::vector<std::string>{"exp_avg_codes", "exp_avg_sq_codes",
                                                                         "exp_avg_scale", "exp_avg_sq_scale"}
                                              : std::vector<std::string>{"exp_avg", "exp_avg_sq"}) {
        const auto theirs = file->tensor("state." + named.name + "." + key);
        if (key.ends_with("_codes")) {
          const auto differ = state.at(key).ne(theirs).sum().item<int64_t>();
          EXPECT_LE(differ, theirs.numel() / 1000) << named.name << " " << key;
        } else {
          EXPECT_TRUE(state.at(key).allclose(theirs, 1e-5, 1e-9)) << named.name << " " << key;
        }
      }
    }
  }
}

TEST(Schedule, WsdEqualsTransformers) {
  const int64_t warmup = 4, decay = 6, total = 20, count = total + 3;
  const auto run = testing::run_python(
      "tests/optim/oracle/wsd.py",
      {std::to_string(warmup), std::to_string(decay), std::to_string(total), std::to_string(count), "0.0", "0.1"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const auto all = json::parse(run.out);
  for (const auto& [text, rates] : all.items()) {
    const double floor = std::stod(text);
    for (const auto& [type, theirs] : rates.items()) {
      for (const bool by_ratio : {false, true}) {
        ScheduleOptions options{
            .name = "wsd", .lr = 1, .warmup_steps = warmup, .total_steps = total, .min_lr_ratio = floor};
        options.decay_type = type;
        if (by_ratio) {
          options.decay_ratio = 0.3;
        } else {
          options.decay_steps = decay;
        }
        const Schedule schedule(options);
        // transformers begins the warm-up at the floor. Our warm-up begins at 0 and is one step ahead.
        for (int64_t step = floor == 0 ? 0 : warmup; step < count; ++step) {
          const double expected = theirs[static_cast<size_t>(step < warmup ? step + 1 : step)];
          EXPECT_NEAR(schedule.at(step), expected, 1e-12) << type << " step " << step;
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera::optim
