// Tests of every legal layout of up to 8 ranks for a tiny Llama and a tiny Qwen3-MoE against one rank: the loss, the
// gradient norm and every gradient of a step, for all weights and for adapters. The rows are packed and have different
// numbers of tokens and labels.
#include <gtest/gtest.h>

#include <map>

#include "tessera/base/error.h"
#include "tessera/base/ignored_label.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/models/adapters/adapters.h"
#include "tessera/models/files/weights.h"
#include "tessera/nn/linear/quantized_linear.h"
#include "tessera/optim/optimizer.h"
#include "tessera/parallel/parallelize_model.h"
#include "tessera/train/run/run_layout.h"
#include "tessera/train/run/run_mesh.h"
#include "tessera/train/step/step.h"
#include "tests/support/ranks.h"
#include "tests/support/temp_folder.h"

namespace tessera::train {
namespace {

constexpr int64_t kRows = 8, kTokens = 13;
constexpr int64_t kLayers = 4, kExperts = 4;

ModelConfig tiny_of(const std::string& architecture, bool balance = false) {
  return ModelConfig::parse(
      fmt::format(R"({{"architectures": ["{}"], "vocab_size": 37, "hidden_size": 24, "intermediate_size": 22,
      "num_hidden_layers": {}, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 6,
      "max_position_embeddings": 64, "initializer_range": 0.3, "torch_dtype": "float32", "rms_norm_eps": 1e-05,
      "num_experts": {}, "num_experts_per_tok": 2, "moe_intermediate_size": 10, "norm_topk_prob": true,
      "output_router_logits": {}, "router_aux_loss_coef": 0.5}})",
                  architecture, kLayers, kExperts, balance),
      architecture);
}

// Row r has documents of r + 2 tokens, and padding behind them in odd rows. The third row has no labels. The last row
// is padding, as at the end of a run of whole epochs.
data::Batch packed_rows() {
  auto generator = at::detail::createCPUGenerator(9);
  const auto text = at::randint(0, 37, {kRows, kTokens + 1}, generator, at::kLong);
  auto labels = text.narrow(1, 1, kTokens).clone();
  const auto positions = at::zeros({kRows, kTokens}, at::kLong), documents = at::zeros_like(positions);
  for (int64_t row = 0; row < kRows; ++row) {
    const int64_t length = row + 2, used = row == kRows - 1 ? 0 : row % 2 == 0 ? kTokens : kTokens - 1 - row / 2;
    for (int64_t begin = 0, number = 0; begin < kTokens; begin += length, ++number) {
      const int64_t end = std::min(begin + length, kTokens);
      positions[row].narrow(0, begin, end - begin).copy_(at::arange(end - begin, at::kLong));
      documents[row].narrow(0, begin, end - begin).fill_(number);
      labels[row][end - 1].fill_(kIgnoredLabel);
    }
    labels[row].narrow(0, 0, row % 3).fill_(kIgnoredLabel);
    documents[row].narrow(0, used, kTokens - used).fill_(data::kPadding);
    labels[row].narrow(0, used, kTokens - used).fill_(kIgnoredLabel);
  }
  labels[2].fill_(kIgnoredLabel);
  return data::make_batch(text.narrow(1, 0, kTokens).contiguous(), labels, positions, documents);
}

data::Batch rows_of(const data::Batch& all, int64_t first, int64_t count) {
  const auto rows = [&](const at::Tensor& tensor) { return tensor.narrow(0, first, count); };
  return data::make_batch(rows(all.tokens), rows(all.labels), rows(all.positions), rows(all.document_ids));
}

enum class Adapters { kNone, kLora, kDora, kPackedLora, kPackedDora };

const char* name_of(Adapters kind) {
  switch (kind) {
    case Adapters::kNone:
      return "";
    case Adapters::kLora:
      return " LoRA";
    case Adapters::kDora:
      return " DoRA";
    case Adapters::kPackedLora:
      return " QLoRA";
    case Adapters::kPackedDora:
      return " DoRA over packed weights";
  }
  return "";
}
bool is_packed(Adapters kind) { return kind == Adapters::kPackedLora || kind == Adapters::kPackedDora; }

struct LayoutCase {
  std::string architecture;
  RunLayout layout;
  std::string schedule = "1F1B", rotate_method = "allgather";
  bool sequence_parallel = false;
  bool balance = false;  // with the load-balance loss of the routers
  Adapters adapters = Adapters::kNone;

  int ranks() const {
    return static_cast<int>(layout.dp_replicate * layout.dp_shard * layout.tp * layout.cp * layout.pp);
  }
  std::string text() const {
    return fmt::format("{}: dp_replicate {} dp_shard {} tp {}{} cp {} ({}) pp {} ({}) ep {}{}{}", architecture,
                       layout.dp_replicate, layout.dp_shard, layout.tp, sequence_parallel ? " with sequences" : "",
                       layout.cp, rotate_method, layout.pp, schedule, layout.ep, balance ? " balanced" : "",
                       name_of(adapters));
  }
  Recipe recipe() const {
    Recipe out;
    out.parallel.schedule = schedule;
    out.parallel.ep = layout.ep;
    return out;
  }
};

struct LayoutOutcome {
  StepResult result;
  std::map<std::string, at::Tensor> gradients;  // gradients of this rank's parameters
};

at::Tensor whole_of(const at::Tensor& tensor) {
  return (is_dtensor(tensor) ? full_tensor(tensor) : tensor).detach().clone().cpu();
}

// `model` may be on the meta device. Rows of packed weights begin inside blocks.
void add_case_adapters(CausalLM& model, Adapters kind) {
  if (is_packed(kind)) nn::quantize_linears(model, {.double_quant = true});
  add_adapters(model, {.rank = 3, .alpha = 6, .dora = kind == Adapters::kDora || kind == Adapters::kPackedDora});
}

// A folder of adapters. No adapter is zero, so every adapter has a gradient.
const std::filesystem::path& adapter_folder(const std::string& architecture, Adapters kind) {
  static const testing::TempFolder temp;
  static std::map<std::pair<std::string, Adapters>, std::filesystem::path> known;
  auto& path = known[{architecture, kind}];
  if (!path.empty()) return path;
  path = temp / fmt::format("{}-{}", architecture, static_cast<int>(kind));
  const at::NoGradGuard no_grad;
  const auto model = make_model(tiny_of(architecture), {});
  add_case_adapters(*model, kind);
  init_weights(*model, 5);
  init_adapters(*model, 7);
  auto generator = at::detail::createCPUGenerator(8);
  for (const auto& [name, linear] : adapted_linears(*model)) linear->lora_B->weight.normal_(0, 0.3, generator);
  save_adapters(*model, path);
  return path;
}

std::shared_ptr<CausalLM> make_case_model(const LayoutCase& which, const ParallelizeModelOptions& options,
                                          const pipeline::PipelineOptions& stages) {
  const auto config = tiny_of(which.architecture, which.balance);
  if (which.adapters == Adapters::kNone) {
    const auto model = make_parallel_model(config, at::kFloat, options, stages);
    init_weights(*model, 5, testing::test_device());
    return model;
  }
  const auto model = make_model(config, {.dtype = at::kFloat, .device = c10::Device(at::kMeta)});
  add_case_adapters(*model, which.adapters);
  pipeline::keep_stages(*model, stages);
  parallelize_model(*model, options);
  to_empty(*model, options.mesh->device());
  init_weights(*model, 5, testing::test_device());
  load_adapters(*model, adapter_folder(which.architecture, which.adapters));
  return model;
}

// The optimizer is plain gradient descent with a learning rate of 1, so the change of a parameter is its gradient.
LayoutOutcome train_one_step(const LayoutCase& which, const std::shared_ptr<comm::World>& world) {
  const RunMesh place(which.layout, testing::test_device_type(), world);
  const auto config = tiny_of(which.architecture, which.balance);
  const auto stages = pipeline_options(which.recipe(), config, place.mesh());
  const auto model =
      make_case_model(which,
                      {.mesh = place.mesh(),
                       .ep = which.layout.ep,
                       .cp_rotate_method = which.rotate_method,
                       .sequence_parallel = which.sequence_parallel,
                       .replicate = {.init_sync = false, .broadcast_buffers = false, .rebuild_buckets = false}},
                      stages);
  const auto optimizer = optim::make_sgd(*model, {.lr = 1});
  TrainStep step(*model, *optimizer, world->group(),
                 {.max_grad_norm = 0, .is_counted = place.is_counted(), .pipeline = stages});
  const at::NoGradGuard no_grad;
  LayoutOutcome out;
  for (const auto& named : model->named_parameters()) out.gradients[named.name] = whole_of(named.slot->parameter);
  const int64_t rows = kRows / place.data_size();
  std::vector<data::Batch> micro_batches;
  for (int64_t row = 0; row < rows; ++row) {
    micro_batches.push_back(place.local_tokens(rows_of(packed_rows(), place.data_rank() * rows + row, 1)));
  }
  {
    const at::AutoGradMode grad(true);
    out.result = step.run(micro_batches, 1);
  }
  for (const auto& named : model->named_parameters()) out.gradients[named.name].sub_(whole_of(named.slot->parameter));
  return out;
}

const LayoutOutcome& one_rank(const LayoutCase& which) {
  static std::map<std::tuple<std::string, bool, Adapters>, LayoutOutcome> known;
  auto& out = known[{which.architecture, which.balance, which.adapters}];
  if (out.gradients.empty()) {
    out = train_one_step(
        {.architecture = which.architecture, .layout = {}, .balance = which.balance, .adapters = which.adapters},
        comm::World::single());
  }
  return out;
}

void expect_equals_one_rank(const LayoutCase& which) {
  SCOPED_TRACE(which.text());
  const auto& wanted = one_rank(which);
  testing::run_ranks({.size = which.ranks()}, [&](const std::shared_ptr<comm::World>& world) {
    const auto found = train_one_step(which, world);
    const auto what = which.text();
    EXPECT_NEAR(found.result.loss, wanted.result.loss, 1e-5 * wanted.result.loss) << what;
    EXPECT_NEAR(found.result.grad_norm, wanted.result.grad_norm, 1e-5 * wanted.result.grad_norm) << what;
    EXPECT_EQ(found.result.balance_loss.has_value(), which.balance) << what;
    if (which.balance) {
      EXPECT_NEAR(*found.result.balance_loss, *wanted.result.balance_loss, 1e-5 * *wanted.result.balance_loss) << what;
    }
    EXPECT_EQ(found.result.label_tokens, wanted.result.label_tokens) << what;
    EXPECT_EQ(found.result.tokens, wanted.result.tokens) << what;
    for (const auto& [name, gradient] : found.gradients) {
      const auto& one = wanted.gradients.at(name);
      const double most = one.abs().max().item<double>(), off = (gradient - one).abs().max().item<double>();
      EXPECT_LE(off, 1e-4 * most) << what << ", " << name;
    }
  });
}

// A different schedule for each layout, if the schedule supports the layout's stages and micro-batches.
std::string schedule_of(size_t number, const RunLayout& layout) {
  static const std::vector<std::string> kAll = {"1F1B",          "Interleaved1F1B", "GPipe",    "InterleavedZeroBubble",
                                                "ZBVZeroBubble", "LoopedBFS",       "DualPipeV"};
  const int64_t micro_batches = kRows / (layout.dp_replicate * layout.dp_shard);
  for (size_t i = 0; i < kAll.size(); ++i) {
    const auto& name = kAll[(number + i) % kAll.size()];
    const int stages = pipeline::schedule_traits(name).one_stage_per_rank ? 1 : 2;
    if (stages * layout.pp > kLayers) continue;
    try {
      pipeline::make_schedule(name, {static_cast<int>(layout.pp), stages, static_cast<int>(micro_batches)});
      return name;
    } catch (const Error&) {
    }
  }
  return "";
}

// Sizes are powers of two. Sizes of 3 are used too where no size must be divisible.
std::vector<LayoutCase> all_layouts(const std::string& architecture) {
  const bool moe = architecture.starts_with("Qwen3Moe");
  std::vector<LayoutCase> out;
  const auto sizes = {1, 2, 4, 8};
  for (const int64_t replicate : sizes) {
    for (const int64_t shard : sizes) {
      for (const int64_t tp : {1, 2, 4}) {
        for (const int64_t cp : {1, 2, 3, 4, 8}) {
          for (const int64_t pp : {1, 2, 3, 4}) {
            const int64_t stage = replicate * shard * tp * cp;
            if (stage * pp > 8 || stage * pp == 1) continue;
            RunLayout layout{.dp_replicate = replicate, .dp_shard = shard, .tp = tp, .cp = cp, .pp = pp};
            const auto schedule = schedule_of(out.size(), layout);
            if (schedule.empty()) continue;
            // For models with experts each layout has one of the possible ep sizes, in turn.
            if (moe) {
              std::vector<int64_t> eps;
              for (const int64_t ep : {2, 4, 1}) {
                if (stage % ep == 0) eps.push_back(ep);
              }
              layout.ep = eps[out.size() % eps.size()];
            }
            out.push_back({architecture, layout, schedule, out.size() % 2 == 0 ? "allgather" : "alltoall",
                           tp > 1 && out.size() % 3 == 0, moe && out.size() % 4 == 3});
          }
        }
      }
    }
  }
  return out;
}

// The layouts are shared among this number of test cases, so that several cases run in parallel.
constexpr size_t kShares = 8;
class EveryLayout : public ::testing::TestWithParam<std::tuple<std::string, size_t>> {};

TEST_P(EveryLayout, EqualsOneRank) {
  const auto& [architecture, share] = GetParam();
  const auto all = all_layouts(architecture);
  ASSERT_GE(all.size(), 60u);
  for (size_t i = share; i < all.size() && !HasFatalFailure(); i += kShares) expect_equals_one_rank(all[i]);
}

// Frozen parameters have no gradient. A stage may have no adapters.
TEST_P(EveryLayout, AdaptersEqualOneRank) {
  const auto& [architecture, share] = GetParam();
  const auto all = all_layouts(architecture);
  const auto kind =
      std::array{Adapters::kLora, Adapters::kDora, Adapters::kPackedLora, Adapters::kPackedDora}[share % 4];
  for (size_t i = share; i < all.size() && !HasFatalFailure(); i += kShares) {
    auto which = all[i];
    which.balance = false;
    which.adapters = kind;
    expect_equals_one_rank(which);
  }
  const auto& gradients = one_rank({.architecture = architecture, .layout = {}, .adapters = kind}).gradients;
  size_t learnt = 0;
  for (const auto& [name, gradient] : gradients) {
    const bool adapter = name.find(".lora_") != name.npos;
    EXPECT_EQ(gradient.count_nonzero().item<int64_t>() > 0, adapter) << name;
    learnt += adapter ? 1 : 0;
  }
  EXPECT_GE(learnt, 2u * 4 * kLayers);
}

INSTANTIATE_TEST_SUITE_P(, EveryLayout,
                         ::testing::Combine(::testing::Values("LlamaForCausalLM", "Qwen3MoeForCausalLM"),
                                            ::testing::Range<size_t>(0, kShares)),
                         [](const auto& info) {
                           return fmt::format("{}{}", std::get<0>(info.param), std::get<1>(info.param));
                         });

TEST(CheckLayout, RefusesInvalidLayouts) {
  const auto why = [](const std::string& architecture, const RunLayout& layout, Recipe recipe = {}) -> std::string {
    auto config = tiny_of(architecture);
    config.experts.capacity_factor = recipe.model.expert_capacity_factor;
    try {
      check_layout(recipe, layout, config);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kConfig);
      return error.what();
    }
    return "";
  };
  const std::string llama = "LlamaForCausalLM", moe = "Qwen3MoeForCausalLM";
  const auto holds = [](const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos ? ::testing::AssertionSuccess() : ::testing::AssertionFailure() << text;
  };
  EXPECT_EQ(why(llama, {.tp = 4, .pp = 2, .micro_batches = 2}), "");
  EXPECT_TRUE(holds(why(llama, {.tp = 8}), "must be divisible by TP size (8)"));
  EXPECT_TRUE(holds(why(llama, {.dp_shard = 2, .ep = 2}), "has no experts"));
  EXPECT_TRUE(holds(why(moe, {.dp_shard = 3, .ep = 3}), "wanted a divisor of the 4 experts"));
  EXPECT_TRUE(holds(why(llama, {.pp = 8, .micro_batches = 8}), "stages"));
  EXPECT_TRUE(holds(why(llama, {.pp = 4, .micro_batches = 2}), "Number of microbatches (2) must be greater"));
  EXPECT_TRUE(holds(why(llama, {.pp = 4, .micro_batches = 2}), "Lower train.local_batch_size"));
  Recipe recipe;
  recipe.data.sequence_length = 2;
  EXPECT_TRUE(holds(why(llama, {.cp = 4}, recipe), "wanted a token for each rank"));
  recipe = {};
  recipe.lora.rank = 4;
  recipe.lora.quantize = "gguf";
  EXPECT_TRUE(holds(why(llama, {}, recipe), "wanted a .gguf file"));
  recipe = {};
  recipe.model.expert_capacity_factor = 1.25;
  EXPECT_EQ(why(moe, {.dp_shard = 2, .pp = 2, .ep = 2, .micro_batches = 2}, recipe), "");
  EXPECT_TRUE(holds(why(moe, {.tp = 2}, recipe), "found 1.25 with 4 experts, tp 2"));
  EXPECT_TRUE(holds(why(moe, {.cp = 2}, recipe), "ranks that have whole sequences"));
  EXPECT_TRUE(holds(why(llama, {}, recipe), "with 0 experts"));
  recipe = {};
  recipe.parallel.layers_per_stage = 2;
  EXPECT_TRUE(holds(why(llama, {}, recipe), "layers_per_stage"));
  EXPECT_EQ(why(llama, {.pp = 2, .micro_batches = 2}, recipe), "");
  recipe.parallel.layers_per_stage = 1;
  EXPECT_TRUE(holds(why(llama, {.pp = 2, .micro_batches = 2}, recipe),
                    "found 1 for 4 layers on 2 ranks with 1F1B, "
                    "wanted 2, 3, or null"));
}

}  // namespace
}  // namespace tessera::train
