// Tests of expert parallelism: the results of several ranks are compared with those of one rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/files/file.h"
#include "tessera/dtensor/debug/comm_debug.h"
#include "tessera/optim/nemo/gradient_scaling.h"
#include "tessera/parallel/experts/expert_parallel.h"
#include "tests/parallel/parallel_families.h"
#include "tests/parallel/styled.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using namespace testing;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int64_t kRows = 6, kLength = 5;

struct ExpertLayout {
  std::string name;
  int64_t replicas, shards, tensor_ranks, ep;
  bool sequence_parallel = false;
  int ranks() const { return static_cast<int>(replicas * shards * tensor_ranks); }
  int64_t parts() const { return replicas * shards; }
  MeshPtr mesh(const WorldPtr& world) const {
    return init_device_mesh(world, test_device_type(), {replicas, shards, tensor_ranks},
                            {"dp_replicate", "dp_shard", "tp"});
  }
};

const std::vector<ExpertLayout> kLayouts = {{"ep 2", 1, 2, 1, 2},
                                            {"ep 3", 1, 3, 1, 3},
                                            {"ep 4 with no shards", 1, 4, 1, 4},
                                            {"ep 2 x dp_shard 2", 1, 4, 1, 2},
                                            {"ep 2 x dp_replicate 2", 2, 1, 1, 2},
                                            {"ep 3 x hsdp 2 x 3", 2, 3, 1, 3},
                                            {"ep 4 x hsdp 2 x 2", 2, 2, 1, 4},
                                            {"tp 2", 1, 1, 2, 1},
                                            {"tp 2 with sequences", 1, 1, 2, 1, true},
                                            {"ep 2 x tp 2", 1, 1, 2, 2},
                                            {"ep 2 x tp 2 with sequences", 1, 1, 2, 2, true},
                                            {"ep 2 x dp_shard 2 x tp 2", 1, 2, 2, 2},
                                            {"ep 4 x dp_shard 2 x tp 2", 1, 2, 2, 4},
                                            {"ep 4 x dp_shard 2 x tp 2 with sequences", 1, 2, 2, 4, true},
                                            {"ep 2 x tp 4", 1, 1, 4, 2},
                                            {"ep 4 x dp_shard 4 x tp 2, shards of 2 and 1", 1, 4, 2, 4}};

constexpr const char* kTwelveExperts =
    R"(, "num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 10, "norm_topk_prob": true)";

TinyFamily experts_with(const std::string& more = "") {
  return {"Qwen3MoeForCausalLM", 8, 4, std::string(kTwelveExperts) + more};
}

std::shared_ptr<CausalLM> parallel_model(const ModelConfig& config, const ExpertLayout& layout, const WorldPtr& world,
                                         ActivationCheckpointing checkpointing) {
  return random_model(config, ParallelizeModelOptions{.mesh = layout.mesh(world),
                                                      .ep = layout.ep,
                                                      .sequence_parallel = layout.sequence_parallel,
                                                      .activation_checkpointing = checkpointing});
}

// Makes embeddings that point in nearly the same direction, and routers that send this direction to one expert.
void send_all_to_one_expert(CausalLM& model) {
  const at::NoGradGuard no_grad;
  for (const auto& named : model.named_parameters()) {
    auto& parameter = named.slot->parameter;
    at::Tensor wanted;
    if (named.name.ends_with("embed_tokens.weight")) wanted = whole(parameter) + 5;
    if (named.name.ends_with("gate.weight")) {
      wanted = whole(parameter) * 0.05;
      wanted[5].add_(0.1);
    }
    if (!wanted.defined()) continue;
    parameter.copy_(is_dtensor(parameter) ? distribute_tensor(wanted, device_mesh(parameter), placements(parameter))
                                          : wanted);
  }
}

// Outcome with the load-balance loss. The load of all ranks is known between forward and backward.
StepOutcome balanced_outcome(CausalLM& model, int64_t rows, int64_t length, int64_t part, int64_t parts,
                             comm::Group* world, int64_t ranks_with_same_rows, const at::Tensor& document_ids) {
  auto generator = at::detail::createCPUGenerator(9);
  const auto text = here(at::randint(0, 37, {rows, length + 1}, generator, at::kLong));
  const auto take = [&](const at::Tensor& all) {
    return all.tensor_split(parts, 0)[static_cast<size_t>(part)].contiguous();
  };
  auto labels = text.narrow(1, 1, length).masked_fill(here(document_ids).lt(0), kIgnoredLabel);
  if (world != nullptr) set_gradient_divide_factor(model, 1);
  const auto statistics = nn::router_statistics(model);
  statistics->begin();
  auto loss = model.loss_sum({.tokens = take(text.narrow(1, 0, length)), .document_ids = take(here(document_ids))},
                             take(labels)) /
              static_cast<double>(rows * length);
  StepOutcome out;
  if (world != nullptr) {
    out.loss = reduce_router_statistics(*statistics, *world).item<double>();
  } else {
    statistics->finish(statistics->sums());
    out.loss = statistics->loss().item<double>();
  }
  loss.backward();
  statistics->end();
  const auto sum = loss.detach().to(at::kDouble).cpu().reshape({1}).clone();
  if (world != nullptr) comm::all_reduce(*world, sum).wait();
  out.loss += sum.item<double>() / static_cast<double>(ranks_with_same_rows);
  out.norm = optim::get_grad_norm(model.parameters());
  for (const auto& named : model.named_parameters()) out.gradients[named.name] = whole(named.slot->parameter.grad());
  return out;
}

// The number of rows is not divisible by the ranks.
TEST(ExpertParallel, EqualsOneRankOnEveryLayout) {
  const auto family = experts_with();
  const auto wanted = one_rank_outcome(family, kRows, kLength);
  for (const auto& layout : kLayouts) {
    on_threads(layout.ranks(), [&](const WorldPtr& world) {
      const auto model = parallel_model(config_of(family), layout, world, ActivationCheckpointing::kNone);
      const auto found = step_outcome(*model, kRows, kLength, world->rank() / layout.tensor_ranks, layout.parts(),
                                      world->group().get(), layout.tensor_ranks);
      expect_same_step(found, wanted, layout.name);
    });
  }
}

TEST(ExpertParallel, EqualsOneRankWithLayersThatHaveNoExperts) {
  const auto family = experts_with(R"(, "mlp_only_layers": [0])");
  const auto wanted = one_rank_outcome(family, kRows, kLength);
  for (const size_t index : {size_t{3}, size_t{12}, size_t{13}}) {
    const auto& layout = kLayouts[index];
    on_threads(layout.ranks(), [&](const WorldPtr& world) {
      const auto model = parallel_model(config_of(family), layout, world, ActivationCheckpointing::kNone);
      const auto found = step_outcome(*model, kRows, kLength, world->rank() / layout.tensor_ranks, layout.parts(),
                                      world->group().get(), layout.tensor_ranks);
      expect_same_step(found, wanted, layout.name);
    });
  }
}

// The second step prefetches. The groups of the experts differ from the groups of the layers around them.
TEST(ExpertParallel, EqualsOneRankWithPrefetch) {
  const auto family = experts_with();
  const auto wanted = one_rank_outcome(family, kRows, kLength);
  const auto& layout = kLayouts[3];
  on_threads(layout.ranks(), [&](const WorldPtr& world) {
    const auto model = parallel_model(config_of(family), layout, world, ActivationCheckpointing::kNone);
    set_prefetch(*model, true);
    for (int step = 0; step < 2; ++step) {
      model->zero_grad();
      const auto found = step_outcome(*model, kRows, kLength, world->rank(), layout.parts(), world->group().get(),
                                      /*ranks_with_same_rows=*/1);
      expect_same_step(found, wanted, fmt::format("step {}", step));
    }
  });
}

TEST(ExpertParallel, EqualsOneRankWithActivationCheckpointing) {
  const auto family = experts_with();
  const auto wanted = one_rank_outcome(family, kRows, kLength);
  for (const size_t index : {size_t{3}, size_t{11}}) {
    const auto& layout = kLayouts[index];
    on_threads(layout.ranks(), [&](const WorldPtr& world) {
      for (const auto how :
           {ActivationCheckpointing::kMlp, ActivationCheckpointing::kSelective, ActivationCheckpointing::kFull}) {
        const auto model = parallel_model(config_of(family), layout, world, how);
        const auto found = step_outcome(*model, kRows, kLength, world->rank() / layout.tensor_ranks, layout.parts(),
                                        world->group().get(), layout.tensor_ranks);
        expect_same_step(found, wanted, fmt::format("{}, checkpointing {}", layout.name, static_cast<int>(how)));
      }
    });
  }
}

// All tokens of all ranks choose the same experts. The rank with these experts computes; the other ranks get zeros.
TEST(ExpertParallel, OneRankMayGetAllTokens) {
  auto family = experts_with();
  family.more = R"(, "num_experts": 12, "num_experts_per_tok": 1, "moe_intermediate_size": 10)";
  const auto one = random_model(config_of(family));
  send_all_to_one_expert(*one);
  const auto wanted = step_outcome(*one, kRows, kLength, 0, 1, nullptr, 1);
  const auto& used = wanted.gradients.at("model.layers.0.mlp.experts.down_proj");
  EXPECT_EQ(used.abs().amax({1, 2}).gt(0).sum().item<int64_t>(), 1) << "one expert takes all";
  for (const size_t index : {size_t{1}, size_t{2}, size_t{3}, size_t{12}}) {
    const auto& layout = kLayouts[index];
    on_threads(layout.ranks(), [&](const WorldPtr& world) {
      const auto model = parallel_model(config_of(family), layout, world, ActivationCheckpointing::kNone);
      send_all_to_one_expert(*model);
      const auto found = step_outcome(*model, kRows, kLength, world->rank() / layout.tensor_ranks, layout.parts(),
                                      world->group().get(), layout.tensor_ranks);
      expect_same_step(found, wanted, layout.name);
    });
  }
}

TEST(ExpertParallel, DropsTheTokensOfOneRankAndRefusesTensorParallel) {
  const auto family = experts_with();
  auto config = config_of(family);
  config.experts.capacity_factor = 0.5;
  const auto wanted = step_outcome(*random_model(config), kRows, kLength, 0, 1, nullptr, 1);
  EXPECT_GT(std::abs(wanted.loss - one_rank_outcome(family, kRows, kLength).loss), 1e-4) << "some are dropped";
  for (const auto& layout : kLayouts) {
    on_threads(layout.ranks(), [&](const WorldPtr& world) {
      if (layout.tensor_ranks > 1) {
        EXPECT_THAT([&] { parallel_model(config, layout, world, ActivationCheckpointing::kNone); },
                    ThrowsMessage<Error>(HasSubstr("capacity_factor 0.5 with tensor parallelism")));
        return;
      }
      for (const auto how : {ActivationCheckpointing::kNone, ActivationCheckpointing::kFull}) {
        const auto model = parallel_model(config, layout, world, how);
        const auto found = step_outcome(*model, kRows, kLength, world->rank(), layout.parts(), world->group().get(),
                                        /*ranks_with_same_rows=*/1);
        expect_same_step(found, wanted, layout.name);
      }
    });
  }
}

TEST(ExpertParallel, LoadBalanceLossCountsAllNonPaddingTokens) {
  const auto family = experts_with(R"(, "output_router_logits": true, "router_aux_loss_coef": 0.7)");
  auto ids = here(at::zeros({kRows, kLength}, at::kLong));
  ids.narrow(1, 3, 2).fill_(1);
  ids[1].narrow(0, 2, 3).fill_(-1);
  ids[4].fill_(-1);
  const auto wanted = balanced_outcome(*random_model(config_of(family)), kRows, kLength, 0, 1, nullptr, 1, ids);
  for (const size_t index : {size_t{1}, size_t{3}, size_t{6}, size_t{11}, size_t{13}}) {
    const auto& layout = kLayouts[index];
    on_threads(layout.ranks(), [&](const WorldPtr& world) {
      for (const auto how : {ActivationCheckpointing::kNone, ActivationCheckpointing::kFull}) {
        const auto model = parallel_model(config_of(family), layout, world, how);
        const auto found = balanced_outcome(*model, kRows, kLength, world->rank() / layout.tensor_ranks, layout.parts(),
                                            world->group().get(), layout.tensor_ranks, ids);
        expect_same_step(found, wanted, layout.name);
      }
    });
  }
}

// Ranks have 0, 3, 6 and 9 tokens, or one token for two ranks of tensor parallelism.
TEST(ExpertParallel, RanksWithoutTokensTakePart) {
  const nn::MoEOptions options{.width = 6, .inner = 5, .experts = 8, .experts_per_token = 2};
  const auto x = Values(8)({18, 6}, 1.0), weights = Values(9)({18, 6}, 1.0);
  const auto rows_of = [](const at::Tensor& all, int64_t rank) {
    return here(all.narrow(0, 3 * rank * (rank - 1) / 2, 3 * rank).clone());
  };
  nn::MoE one(options, {});
  draw(one);
  auto leaf = x.clone().set_requires_grad(true);
  const auto wanted = one(leaf, nn::NonPaddingMask{});
  (wanted * weights).sum().backward();
  on_threads(4, [&](const WorldPtr& world) {
    nn::MoE block(options, {.device = test_device()});
    draw(block);
    apply_expert_parallel(
        block, {.mesh = make_expert_mesh(init_device_mesh(world, test_device_type(), {4}, {"dp_shard"}), 4)});
    auto own = rows_of(x, world->rank()).set_requires_grad(true);
    const auto y = block(own, nn::NonPaddingMask{});
    (y * rows_of(weights, world->rank())).sum().backward();
    EXPECT_TRUE(at::allclose(y, rows_of(wanted, world->rank()), 1e-4, 1e-6));
    EXPECT_TRUE(at::allclose(own.grad(), rows_of(leaf.grad(), world->rank()), 1e-4, 1e-6));
    for (const bool up : {false, true}) {
      const auto& found = up ? block.experts->gate_up_proj : block.experts->down_proj;
      const auto& theirs = up ? one.experts->gate_up_proj : one.experts->down_proj;
      EXPECT_TRUE(at::allclose(whole(found.grad()), here(theirs.grad()), 1e-4, 1e-5));
    }
  });
  on_threads(2, [&](const WorldPtr& world) {
    nn::MoE block(options, {.device = test_device()});
    draw(block);
    const auto tp = init_device_mesh(world, test_device_type(), {2}, {"tp"});
    apply_expert_parallel(block, {.mesh = make_expert_mesh(tp, 2), .tensor_parallel = tp});
    const auto y = block(here(x.narrow(0, 4, 1)), nn::NonPaddingMask{});
    EXPECT_TRUE(at::allclose(y, here(wanted.narrow(0, 4, 1)), 1e-4, 1e-6));
  });
}

// The scaling of NeMo AutoModel: FSDP averages gradients, the loss is multiplied by FSDP's number of ranks, and
// gradients of experts are divided afterwards.
TEST(ExpertParallel, AveragedGradientsOfExpertsAreScaled) {
  const auto family = experts_with();
  const auto wanted = one_rank_outcome(family, kRows, kLength);
  const ExpertLayout layout{"", 1, 4, 1, 2};
  on_threads(4, [&](const WorldPtr& world) {
    const auto model = parallel_model(config_of(family), layout, world, ActivationCheckpointing::kNone);
    auto generator = at::detail::createCPUGenerator(9);
    const auto text = here(at::randint(0, 37, {kRows, kLength + 1}, generator, at::kLong));
    const auto own = text.tensor_split(4, 0)[static_cast<size_t>(world->rank())];
    auto labels = own.narrow(1, 1, kLength).clone();
    labels.select(1, 0).fill_(kIgnoredLabel);
    const auto loss = model->loss_sum({.tokens = own.narrow(1, 0, kLength).contiguous()}, labels);
    (loss / static_cast<double>(kRows * (kLength - 1)) * 4).backward();
    StepOutcome found;
    found.loss = wanted.loss;
    found.norm = optim::scale_grads_and_clip_grad_norm(
        1e9, {model.get()},
        {.moe_mesh = make_expert_mesh(layout.mesh(world), 2), .ep_axis_name = "ep", .dp_group_size = 4});
    for (const auto& named : model->named_parameters()) {
      found.gradients[named.name] = whole(named.slot->parameter.grad());
    }
    expect_same_step(found, wanted, "averaged");
  });
}

TEST(ExpertParallel, ComputesInBFloat16) {
  const auto family = experts_with();
  const auto wanted = one_rank_outcome(family, kRows, kLength);
  for (const size_t index : {size_t{3}, size_t{13}}) {
    const auto& layout = kLayouts[index];
    on_threads(layout.ranks(), [&](const WorldPtr& world) {
      const auto model =
          random_model(config_of(family),
                       ParallelizeModelOptions{.mesh = layout.mesh(world),
                                               .mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat},
                                               .ep = layout.ep,
                                               .sequence_parallel = layout.sequence_parallel});
      const auto found = step_outcome(*model, kRows, kLength, world->rank() / layout.tensor_ranks, layout.parts(),
                                      world->group().get(), layout.tensor_ranks);
      EXPECT_NEAR(found.loss, wanted.loss, 0.02 * wanted.loss) << layout.name;
      EXPECT_NEAR(found.norm, wanted.norm, 0.1 * wanted.norm) << layout.name;
    });
  }
}

TEST(ExpertParallel, AllToAllSendsOnlyTokensOfRemoteExperts) {
  on_threads(4, [](const WorldPtr& world) {
    nn::MoE block({.width = 16, .inner = 8, .experts = 8, .experts_per_token = 3}, {.device = test_device()});
    {
      const at::NoGradGuard no_grad;
      Values values(4);
      for (const auto& parameter : block.parameters()) parameter.copy_(values(parameter.sizes().vec()));
    }
    const auto mesh = make_expert_mesh(init_device_mesh(world, test_device_type(), {4}, {"dp_shard"}), 4);
    apply_expert_parallel(block, {.mesh = mesh});
    Values values(static_cast<uint64_t>(20 + world->rank()));
    const int64_t tokens = 5 + 4 * world->rank();
    const auto x = values({tokens, 16}, 1.0).requires_grad_(true);
    at::Tensor chosen;
    block.gate->register_forward_hook([&](nn::Module&, nn::TensorRefs& outputs) { chosen = outputs[0]->clone(); });
    CommDebugMode forward;
    const auto y = block(x, nn::NonPaddingMask{});
    const int64_t forward_bytes = forward.bytes(CommKind::kAllToAll);
    EXPECT_EQ(forward.all_to_alls(), 3) << "counts, there, back";
    EXPECT_EQ(forward.total(), 3);
    // Rows that this rank receives, and rows that return to this rank: the counts of 2 experts from 3 ranks.
    const auto elsewhere = chosen.div(2, "floor").ne(world->rank()).sum();
    auto sent = at::zeros({4}, at::kLong);
    for (int64_t rank = 0; rank < 4; ++rank) {
      if (rank != world->rank()) sent[rank] = chosen.div(2, "floor").eq(rank).sum();
    }
    auto coming = sent.clone();
    comm::all_reduce(*world->group(), coming).wait();
    const int64_t row_bytes = 16 * 4;
    const int64_t rows = coming[world->rank()].item<int64_t>() + elsewhere.item<int64_t>();
    EXPECT_EQ(forward_bytes, rows * row_bytes + 3 * 2 * 8);
    EXPECT_LE(elsewhere.item<int64_t>(), tokens * 3);
    CommDebugMode backward;
    y.sum().backward();
    EXPECT_EQ(backward.bytes(CommKind::kAllToAll), rows * row_bytes);
    EXPECT_EQ(backward.total(), 2);
  });
}

// Experts have another mesh than the other parameters. Each element counts once.
TEST(ExpertParallel, ExpertAndDenseParametersHaveDifferentMeshes) {
  on_threads(4, [](const WorldPtr& world) {
    const ExpertLayout layout{"", 1, 2, 2, 2};
    const auto model = parallel_model(config_of(experts_with()), layout, world, ActivationCheckpointing::kNone);
    std::map<std::string, std::string> shown;
    for (const auto& named : model->named_parameters()) {
      shown[named.name] =
          to_string(placements(named.slot->parameter)) + " " + device_mesh(named.slot->parameter)->to_string();
    }
    const std::string experts = "DeviceMesh((ep_shard=2, ep=2), '" + test_device_type() + "')",
                      dense = "DeviceMesh((dp_shard=2, tp=2), '" + test_device_type() + "')";
    EXPECT_EQ(shown["model.layers.0.mlp.experts.gate_up_proj"], "(_S(0, 2), S(0)) " + experts);
    EXPECT_EQ(shown["model.layers.1.mlp.experts.down_proj"], "(_S(0, 2), S(0)) " + experts);
    EXPECT_EQ(shown["model.layers.0.mlp.gate.weight"], "(S(0), R) " + dense);
    EXPECT_EQ(shown["model.layers.0.self_attn.q_proj.weight"], "(_S(0, 2), S(0)) " + dense);
  });
}

TEST(ExpertParallel, LoadsAndSavesTheSameFolder) {
  const TempFolder folder;
  const auto one = random_model(config_of(experts_with()));
  save_pretrained(*one, folder / "one", {});
  std::vector<at::Tensor> wanted;
  for (const auto& parameter : one->parameters()) wanted.push_back(parameter.detach());
  for (const size_t index : {size_t{2}, size_t{3}, size_t{12}}) {
    const auto& layout = kLayouts[index];
    const auto again = folder / fmt::format("again{}", index);
    on_threads(layout.ranks(), [&](const WorldPtr& world) {
      const auto model =
          make_parallel_model(config_of(experts_with()), at::kFloat, {.mesh = layout.mesh(world), .ep = layout.ep});
      load_pretrained(*model, folder / "one");
      const at::NoGradGuard no_grad;
      const auto parameters = model->parameters();
      for (size_t i = 0; i < wanted.size(); ++i) EXPECT_TRUE(at::equal(whole(parameters[i]), here(wanted[i]))) << i;
      save_pretrained(*model, again, {});
    });
    EXPECT_EQ(read_file(again / "model.safetensors"), read_file(folder / "one" / "model.safetensors")) << layout.name;
  }
}

TEST(ExpertParallel, RefusesInvalidOptionsBeforeAnyParameterChanges) {
  on_threads(4, [](const WorldPtr& world) {
    const auto refusal = [&](const TinyFamily& family, const ExpertLayout& layout) {
      const auto model = make_model(config_of(family), {.device = at::kMeta});
      const auto text = error_of([&] { parallelize_model(*model, {.mesh = layout.mesh(world), .ep = layout.ep}); });
      for (const auto& parameter : model->parameters()) EXPECT_FALSE(is_dtensor(parameter)) << text;
      return text;
    };
    EXPECT_THAT(refusal(experts_with(), {"", 1, 4, 1, 3}), HasSubstr("4 ranks"));
    EXPECT_THAT(
        refusal({"Qwen3MoeForCausalLM", 8, 4, R"(, "num_experts": 6, "num_experts_per_tok": 2)"}, {"", 1, 2, 2, 4}),
        HasSubstr("num_experts (6) must be divisible by EP size (4)"));
    EXPECT_THAT(refusal({"LlamaForCausalLM"}, {"", 1, 4, 1, 2}), HasSubstr("has no experts"));
    EXPECT_THAT(error_of([&] { apply_expert_parallel(*make_model(config_of(experts_with())), {}); }),
                HasSubstr("(ep_shard, ep)"));
  });
}

}  // namespace
}  // namespace tessera
