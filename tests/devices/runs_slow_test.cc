// Tests runs on the pretend device with the demo's model, cut to two layers, and its tokenizer: in fp32 and bf16, on 1,
// 2 and 4 ranks.
#include "tests/devices/runs.h"

namespace tessera::train {
namespace {

class PretendDemo : public ::testing::TestWithParam<Ways> {};

TEST_P(PretendDemo, ResumesOnTheCpuAndBack) {
  const TinyRun runs;
  const auto assets = testing::asset("smollm2");
  if (GetParam().experts) {
    runs.have_experts(2);
  } else {
    auto config = nlohmann::json::parse(read_file(assets / "config.json"));
    config["num_hidden_layers"] = 2;
    runs.write("base/config.json", config.dump());
    for (const char* name : {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}) {
      runs.write(std::string("base/") + name, read_file(assets / name));
    }
  }
  expect_resumes_on_the_cpu_and_back(runs, GetParam());
}

// The model's nine heads are divided over three ranks.
std::vector<Ways> all_ways() {
  std::vector<Ways> ways = {{"Alone", 1, {}},
                            {"Fsdp2", 2, {}},
                            {"Fsdp4", 4, {"train.local_batch_size=1"}},
                            {"Hsdp", 4, {"parallel.dp_replicate=2", "train.local_batch_size=1"}},
                            {"Ddp", 2, {"parallel.dp_replicate=2", "parallel.dp_shard=1"}},
                            {"Tp", 3, {"parallel.tp=3"}},
                            {"Pp", 2, {"parallel.pp=2"}},
                            {"Ep2", 2, {"parallel.ep=2"}, true},
                            {"Ep4", 4, {"parallel.ep=4", "train.local_batch_size=1"}, true},
                            {"Cp", 2, {"parallel.cp=2"}},
                            {"Lora", 2, {"model.lora.rank=2"}}};
  for (size_t i = 0, count = ways.size(); i < count; ++i) ways.push_back(in_half(ways[i], ways[i].name));
  return ways;
}

INSTANTIATE_TEST_SUITE_P(, PretendDemo, ::testing::ValuesIn(all_ways()), [](const auto& info) {
  return std::string(info.param.name) + (info.param.tolerance > 1e-3 ? "Half" : "");
});

}  // namespace
}  // namespace tessera::train
