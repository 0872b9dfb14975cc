// Tests of context parallelism with whole models: the results of several ranks are compared with those of one rank.
#include <gmock/gmock.h>

#include "tessera/kernels/attention/context_layout.h"
#include "tessera/parallel/context_parallel/apply_context_parallel.h"
#include "tests/parallel/parallel_families.h"
#include "tests/support/peak_memory.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kContextRows = 2, kContextTokens = 19;  // 19 is not divisible by any number of chunks

struct ContextRows {
  std::string name;
  ModelInputs inputs;
  at::Tensor labels;
};

at::Tensor drawn_tokens(int64_t rows, int64_t tokens) {
  auto generator = at::detail::createCPUGenerator(9);
  return here(at::randint(0, 37, {rows, tokens}, generator, at::kLong));
}

ContextRows plain_context_rows(int64_t rows = kContextRows, int64_t tokens = kContextTokens) {
  const auto text = drawn_tokens(rows, tokens + 1);
  auto labels = text.narrow(1, 1, tokens).clone();
  labels.select(1, 0).fill_(kIgnoredLabel);
  return {"plain", {.tokens = text.narrow(1, 0, tokens).contiguous()}, labels};
}

// Three documents in one row, and two documents with padding behind them in the other. Positions start at 0 in each
// document.
ContextRows packed_context_rows() {
  auto out = plain_context_rows();
  out.name = "packed";
  const auto ids = here(at::zeros({kContextRows, kContextTokens}, at::kLong)), positions = at::zeros_like(ids);
  const auto document = [&](int64_t row, int64_t begin, int64_t end, int64_t id) {
    ids[row].narrow(0, begin, end - begin).fill_(id);
    positions[row].narrow(0, begin, end - begin).copy_(here(at::arange(end - begin, at::kLong)));
    out.labels[row][end - 1].fill_(kIgnoredLabel);
  };
  document(0, 0, 4, 3);
  document(0, 4, 5, 9);
  document(0, 5, kContextTokens, 4);
  document(1, 0, 11, 0);
  document(1, 11, 16, 1);
  document(1, 16, kContextTokens, -1);
  out.labels[1].narrow(0, 16, kContextTokens - 16).fill_(kIgnoredLabel);
  out.inputs.document_ids = ids;
  out.inputs.positions = positions;
  return out;
}

ContextRows part_of(const ContextRows& whole, const kernels::ContextLayout& layout, int64_t rank) {
  auto part = whole;
  part.inputs.visit_tensors([&](at::Tensor& tensor) { tensor = layout.shard(here(tensor), 1, rank); });
  part.labels = layout.shard(here(whole.labels), 1, rank);
  return part;
}

StepOutcome outcome_of(CausalLM& model, const ContextRows& rows, comm::Group* cp) {
  auto loss = model.loss_sum(rows.inputs, rows.labels);
  loss.backward();
  StepOutcome out;
  const auto sum = loss.detach().to(at::kDouble).reshape({1}).clone();
  if (cp != nullptr) comm::all_reduce(*cp, sum).wait();
  out.loss = sum.item<double>();
  for (const auto& named : model.named_parameters()) out.gradients[named.name] = whole(named.slot->parameter.grad());
  return out;
}

StepOutcome one_rank(const TinyFamily& family, const ContextRows& rows) {
  const auto model = random_model(config_of(family));
  auto out = outcome_of(*model, rows, nullptr);
  out.norm = optim::get_grad_norm(model->parameters());
  return out;
}

std::vector<TinyFamily> tested_families() {
  return {{"LlamaForCausalLM", 4, 2}, {"Qwen3ForCausalLM", 4, 2}, {"Gemma3ForCausalLM", 4, 2, kGemmaKeys}};
}

struct ContextLayouts {
  std::string name;
  int64_t ranks, tensor_ranks = 1;
  bool sequence_parallel = false;
  ActivationCheckpointing checkpointing = ActivationCheckpointing::kNone;
};

// FSDP shards over the ranks of context parallelism too, as it does for callers of parallelize_model.
StepOutcome over_ranks(const ContextLayouts& layout, const std::string& rotate, const TinyFamily& family,
                       const ContextRows& rows, const WorldPtr& world) {
  const auto mesh =
      init_device_mesh(world, test_device_type(), {layout.ranks, layout.tensor_ranks}, {"dp_shard", "tp"});
  const auto cp = mesh->slice({"dp_shard"});
  auto model = make_model(config_of(family), {.device = at::kMeta});
  apply_context_parallel(*model, cp, {.rotate_method = rotate});
  parallelize_model(
      *model,
      {.mesh = mesh, .sequence_parallel = layout.sequence_parallel, .activation_checkpointing = layout.checkpointing});
  to_empty(*model, test_device());
  const auto values = random_model(config_of(family));
  {
    const at::NoGradGuard no_grad;
    const auto from = values->named_parameters(), to = model->named_parameters();
    for (size_t i = 0; i < to.size(); ++i) {
      auto& parameter = to[i].slot->parameter;
      parameter.copy_(distribute_tensor(from[i].slot->parameter, device_mesh(parameter), placements(parameter)));
    }
  }
  set_gradient_divide_factor(*model, 1);
  const kernels::ContextLayout cut(rows.labels.size(1), layout.ranks);
  auto out = outcome_of(*model, part_of(rows, cut, cp->local_rank(0)), cp->group(0).get());
  out.norm = optim::get_grad_norm(model->parameters());
  return out;
}

TEST(ContextParallelModel, EqualsOneRankOnEveryLayoutFamilyAndCheckpointing) {
  using Checkpoints = ActivationCheckpointing;
  const std::vector<ContextLayouts> layouts = {
      {"cp 2", 2},
      {"cp 3", 3},
      {"cp 4", 4},
      {"cp 2, selective checkpoints", 2, 1, false, Checkpoints::kSelective},
      {"cp 4, full checkpoints", 4, 1, false, Checkpoints::kFull},
      {"cp 2 x tp 2", 2, 2},
      {"cp 2 x tp 2 with sequences", 2, 2, true},
      {"cp 2 x tp 2 with sequences, selective checkpoints", 2, 2, true, Checkpoints::kSelective}};
  for (const auto& family : tested_families()) {
    for (const auto& rows : {plain_context_rows(), packed_context_rows()}) {
      const auto wanted = one_rank(family, rows);
      for (const auto& layout : layouts) {
        on_threads(static_cast<int>(layout.ranks * layout.tensor_ranks), [&](const WorldPtr& world) {
          // Both rotation methods run for one family. The attention of the other families differs only in the
          // operations before it and in windows.
          const bool ring_only = family.architecture != "LlamaForCausalLM" && rows.name == "packed";
          const bool gathers_only = family.architecture != "LlamaForCausalLM" && !ring_only;
          for (const std::string rotate : {"allgather", "alltoall"}) {
            if ((rotate == "allgather" && ring_only) || (rotate == "alltoall" && gathers_only)) continue;
            expect_same_step(over_ranks(layout, rotate, family, rows, world), wanted,
                             fmt::format("{}, {}, {}, {}", layout.name, rotate, family.architecture, rows.name));
          }
        });
      }
    }
  }
}

TEST(ContextParallelModel, LogitsEqualOneRank) {
  const auto rows = packed_context_rows();
  const auto wanted = random_model(config_of(tested_families()[0]))->logits(rows.inputs).detach();
  on_threads(3, [&](const WorldPtr& world) {
    const auto mesh = init_device_mesh(world, test_device_type(), {3}, {"cp"});
    const auto model = random_model(config_of(tested_families()[0]));
    apply_context_parallel(*model, mesh);
    const kernels::ContextLayout layout(kContextTokens, 3);
    const c10::NoGradGuard no_grad;
    const auto found = layout.unshard(mesh->group(0), model->logits(part_of(rows, layout, world->rank()).inputs), 1);
    const auto read = here(rows.inputs.document_ids).ge(0).unsqueeze(2);
    EXPECT_TRUE(at::allclose(found * read, here(wanted) * read, 1e-4, 1e-5));
  });
}

// Peak memory of a rank in a forward and backward of `tokens` tokens per rank, without its parameters.
int64_t peak_of_ranks(int ranks, int64_t tokens, const std::string& rotate) {
  std::vector<int64_t> found(static_cast<size_t>(ranks));
  on_threads(ranks, [&](const WorldPtr& world) {
    const auto config = ModelConfig::parse(
        R"({"architectures": ["LlamaForCausalLM"], "vocab_size": 37, "hidden_size": 64, "intermediate_size": 160,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "initializer_range": 0.1,
        "max_position_embeddings": 8192, "torch_dtype": "float32", "rms_norm_eps": 1e-05})",
        "memory");
    const auto mesh = init_device_mesh(world, test_device_type(), {ranks}, {"cp"});
    const auto model = random_model(config);
    apply_context_parallel(*model, mesh, {.rotate_method = rotate});
    const auto rows =
        part_of(plain_context_rows(1, tokens * ranks), kernels::ContextLayout(tokens * ranks, ranks), world->rank());
    found[static_cast<size_t>(world->rank())] =
        peak_bytes_of(test_device(), [&] { model->loss_sum(rows.inputs, rows.labels).backward(); });
  });
  return *std::ranges::max_element(found);
}

TEST(ContextParallelModel, FourRanksTakeFourTimesTheTokensInTheSameMemory) {
  constexpr int64_t kOwn = 256;
  const double one = static_cast<double>(peak_of_ranks(1, kOwn, "alltoall"));
  const double same = static_cast<double>(peak_of_ranks(1, 4 * kOwn, "alltoall"));
  const double ring = static_cast<double>(peak_of_ranks(4, kOwn, "alltoall"));
  const double gathered = static_cast<double>(peak_of_ranks(4, kOwn, "allgather"));
  fmt::print("peak of {} tokens on one rank {} bytes, of {}: {}; over 4 ranks {} by the ring, {} gathered\n", kOwn, one,
             4 * kOwn, same, ring, gathered);
  EXPECT_GT(same, 3 * one) << "the recorder sees what grows";
  EXPECT_LE(ring, 1.1 * one);
  EXPECT_LE(gathered, 1.3 * one);
}

TEST(ContextParallelModel, InvalidMeshesAndInputsAreErrors) {
  on_threads(2, [](const WorldPtr& world) {
    const auto mesh = init_device_mesh(world, test_device_type(), {2, 1}, {"cp", "tp"});
    const auto model = random_model(config_of(tested_families()[0]));
    EXPECT_THAT(error_of([&] { apply_context_parallel(*model, mesh); }), HasSubstr("wanted a 1-d mesh"));
    EXPECT_THAT(error_of([&] { apply_context_parallel(*model, nullptr); }), HasSubstr("found no mesh"));
    EXPECT_THAT(error_of([&] { apply_context_parallel(*model, mesh->slice({"cp"}), {.rotate_method = "ring"}); }),
                HasSubstr("'ring'"));
    EXPECT_THAT(error_of([&] { apply_context_parallel(*model->blocks()[0], mesh->slice({"cp"})); }),
                HasSubstr("no DecoderModel"));
    apply_context_parallel(*model, mesh->slice({"cp"}));
    const auto tokens = here(at::zeros({1, 4}, at::kLong));
    EXPECT_THAT(error_of([&] { model->logits({.tokens = tokens, .logits_to_keep = 1}); }),
                HasSubstr("logits_to_keep (1)"));
    const auto uneven = here(at::zeros({1, world->rank() == 0 ? 2 : 5}, at::kLong));
    EXPECT_THAT(error_of([&] { model->logits({.tokens = uneven}); }), HasSubstr("Cut rows with ContextLayout::shard"));
  });
}

}  // namespace
}  // namespace tessera::testing
