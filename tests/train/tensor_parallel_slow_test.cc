// Slow tests: twenty steps of the real program on every layout, and a change of the layout after half of the steps.
#include <gmock/gmock.h>

#include "tests/train/tiny_run.h"

namespace tessera::train {
namespace {

struct SlowLayout {
  std::string name;
  int ranks;
  std::vector<std::string> overrides;
};

const std::vector<std::string> kSequences = {"parallel.sequence_parallel=true"};

std::vector<std::string> joined(std::vector<std::string> all, const std::vector<std::string>& more) {
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

// Head counts with their layouts: tp divides 8 and 4 heads, three ranks divide 6 and 3, and four ranks share 2
// key-value heads.
struct HeadsAndLayouts {
  int heads, kv_heads;
  std::vector<SlowLayout> layouts;
};

const std::vector<HeadsAndLayouts> kSlowLayouts = {
    {8,
     4,
     {{"dp-2", 2, {}},
      {"tp-2", 2, {"parallel.tp=2"}},
      {"tp-2-sequences", 2, joined({"parallel.tp=2"}, kSequences)},
      {"tp-4", 4, {"parallel.tp=4"}},
      {"tp-4-sequences", 4, joined({"parallel.tp=4"}, kSequences)},
      {"dp-2-tp-2", 4, {"parallel.tp=2"}},
      {"dp-2-tp-2-sequences", 4, joined({"parallel.tp=-1", "parallel.dp_shard=2"}, kSequences)},
      {"hsdp-2-2", 4, {"parallel.dp_replicate=2", "parallel.dp_shard=2"}},
      {"ddp-2-tp-2", 4, {"parallel.dp_replicate=2", "parallel.dp_shard=1", "parallel.tp=2"}},
      {"hsdp-2-2-tp-2", 8, {"parallel.dp_replicate=2", "parallel.tp=2"}},
      {"hsdp-2-2-tp-2-sequences", 8, joined({"parallel.dp_replicate=2", "parallel.tp=2"}, kSequences)}}},
    {6, 3, {{"tp-3", 3, {"parallel.tp=3"}}, {"tp-3-sequences", 3, joined({"parallel.tp=3"}, kSequences)}}},
    {4, 2, {{"tp-4-shared-heads", 4, {"parallel.tp=4", "parallel.replicate_kv=true"}}}}};

// 47 tokens per row are not divisible by any number of ranks. One rank takes four micro-batches per step, two ranks
// take two each, four ranks take one each.
class TwentySteps : public ::testing::TestWithParam<size_t> {
 protected:
  TwentySteps() {
    const auto& each = kSlowLayouts.at(GetParam());
    runs_.write("base/config.json",
                fmt::format(R"({{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 260,
      "hidden_size": 32, "intermediate_size": 46, "num_hidden_layers": 2, "num_attention_heads": {}, "head_dim": 8,
      "num_key_value_heads": {}, "max_position_embeddings": 128, "initializer_range": 0.1, "torch_dtype": "float32",
      "rms_norm_eps": 1e-05, "tie_word_embeddings": true, "bos_token_id": 258, "eos_token_id": 258}})",
                            each.heads, each.kv_heads));
  }
  const std::vector<SlowLayout>& layouts() const { return kSlowLayouts.at(GetParam()).layouts; }
  void run(const std::string& dir, const SlowLayout& layout, const std::vector<std::string>& more) {
    const auto overrides = joined(joined({"data.sequence_length=47", "train.local_batch_size=3", "checkpoint.every=10",
                                          "checkpoint.export=never"},
                                         layout.overrides),
                                  more);
    const auto result = testing::run_process(runs_.command(dir, layout.ranks, overrides), {.timeout_seconds = 600});
    ASSERT_EQ(result.exit_code, 0) << dir << ": " << result.err;
  }
  void train_one_rank() {
    run("one", {"one", 1, {}}, {"train.steps=20"});
    ASSERT_EQ(runs_.metrics("one").size(), 20U);
    EXPECT_LT(runs_.metrics("one").back()["loss"], 0.8 * runs_.metrics("one").front()["loss"].get<double>());
  }

  TinyRun runs_;
};

TEST_P(TwentySteps, EqualOneRankWithAndWithoutActivationCheckpointing) {
  ASSERT_NO_FATAL_FAILURE(train_one_rank());
  const std::vector<std::string> kinds = {"full", "selective", "mlp"};  // one kind for each layout, in turn
  for (size_t i = 0; i < layouts().size(); ++i) {
    for (const auto& checkpointing : {std::string("none"), kinds[i % kinds.size()]}) {
      const auto dir = layouts()[i].name + "-" + checkpointing;
      ASSERT_NO_FATAL_FAILURE(
          run(dir, layouts()[i], {"train.steps=20", "parallel.activation_checkpointing=" + checkpointing}));
      expect_same_run(runs_, dir, "one");
    }
  }
}

// Each layout trains the first half, and the next layout of the list trains the second half. One rank is in the list,
// too.
TEST_P(TwentySteps, ResumeOnAnotherLayout) {
  ASSERT_NO_FATAL_FAILURE(train_one_rank());
  auto ring = layouts();
  ring.push_back({"one", 1, {}});
  for (size_t i = 0; i < ring.size(); ++i) {
    const auto &first = ring[i], &then = ring[(i + 1) % ring.size()];
    const auto dir = first.name + "-then-" + then.name;
    ASSERT_NO_FATAL_FAILURE(run(dir, first, {"train.steps=10"}));
    ASSERT_NO_FATAL_FAILURE(run(dir, then, {"train.steps=20"}));
    expect_same_run(runs_, dir, "one");
  }
}

INSTANTIATE_TEST_SUITE_P(, TwentySteps, ::testing::Range(size_t{0}, kSlowLayouts.size()), [](const auto& info) {
  return fmt::format("{}HeadsFor{}", kSlowLayouts.at(info.param).heads, kSlowLayouts.at(info.param).kv_heads);
});

}  // namespace
}  // namespace tessera::train
