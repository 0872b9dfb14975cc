// Tests the conversion of models and optimizers between FSDP1, FSDP2 and plain models: equal values, equal training
// afterwards, errors on all ranks, and the peak of memory.
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/fsdp1/state/convert_fsdp.h"
#include "tessera/fsdp1/state/model_state_dict.h"
#include "tessera/fsdp1/state/optim_state_dict.h"
#include "tessera/parallel/fsdp/fully_shard.h"
#include "tessera/state/optimizer_forms.h"
#include "tessera/state/sharded_tensor.h"
#include "tessera/state/state_dict.h"
#include "tests/fsdp1/net.h"
#include "tests/support/peak_memory.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

struct Flat {
  Fsdp1Net net;
  std::unique_ptr<optim::Optimizer> optimizer;
  Flat(const WorldPtr& world, bool original, int steps, uint64_t seed = 3) : net(seed, /*transposed=*/false) {
    wrap(net, world->group(), Wrapping::kEach, original);
    optimizer = adam_of(net);
    train(net, *optimizer, steps);
  }
};
struct Rows {
  Fsdp1Net net;
  std::unique_ptr<optim::Optimizer> optimizer;
  Rows(const MeshPtr& mesh, int steps, uint64_t seed = 3) : net(seed, /*transposed=*/false) {
    for (auto* layer : {net.first.get(), net.middle.get()}) fully_shard(*layer, {.mesh = mesh});
    fully_shard(net, {.mesh = mesh});
    optimizer = adam_of(net);
    train(net, *optimizer, steps);
  }
};

void expect_same_rows(const Rows& a, const Rows& b) {
  const auto left = optimizer_state_dict(*a.optimizer), right = optimizer_state_dict(*b.optimizer);
  const auto local = [](const StateDict& raw) {
    StateDict parts;
    for (const auto& [key, state] : raw.at("state").dict()) {
      StateDict part;
      for (const auto& [name, value] : state.dict()) {
        part.set(name, is_dtensor(value.tensor()) ? to_local(value.tensor().detach()) : value.tensor());
      }
      parts.set(key, part);
    }
    return parts;
  };
  EXPECT_EQ(state_difference(local(left), local(right)), "");
  EXPECT_EQ(a.optimizer->steps(), b.optimizer->steps());
}

double output_of(Fsdp1Net& net) {
  const c10::NoGradGuard no_grad;
  return net(at::ones({2, 3})).sum().item<double>();
}

std::vector<MeshPtr> meshes_of(const WorldPtr& world) {
  std::vector<MeshPtr> meshes = {init_device_mesh(world, "cpu", {world->size()}, {"dp"})};
  if (world->size() == 4) meshes.push_back(init_device_mesh(world, "cpu", {2, 2}, {"replicate", "shard"}));
  return meshes;
}

TEST(ConvertFsdp, ConvertsModelAndOptimizerFromFsdp1ToFsdp2AndBack) {
  for (const int size : {1, 2, 4}) {
    on_ranks(size, [](const WorldPtr& world) {
      for (const auto& mesh : meshes_of(world)) {
        for (const bool original : {false, true}) {
          Flat flat(world, original, 3);
          Rows rows(mesh, 3), to(mesh, 0, 8);
          copy_fsdp1_to_fsdp2(flat.net, to.net);
          copy_fsdp1_to_fsdp2(flat.net, *flat.optimizer, *to.optimizer);
          expect_same_rows(to, rows);
          EXPECT_NEAR(output_of(to.net), output_of(rows.net), 1e-4);

          Flat back(world, original, 0, 8);
          copy_fsdp2_to_fsdp1(rows.net, back.net);
          copy_fsdp2_to_fsdp1(*rows.optimizer, back.net, *back.optimizer);
          EXPECT_NEAR(output_of(back.net), output_of(flat.net), 1e-4);
          EXPECT_EQ(back.optimizer->steps(), 3);
          EXPECT_EQ(state_difference(optim_state_dict(back.net, *back.optimizer),
                                     optim_state_dict(flat.net, *flat.optimizer)),
                    "");
          // Both models train with equal values afterwards.
          train(back.net, *back.optimizer, 1, 3);
          train(to.net, *to.optimizer, 1, 3);
          EXPECT_NEAR(output_of(back.net), output_of(to.net), 1e-4);
        }
      }
    });
  }
}

// The sharded dict contains ShardedTensors.
TEST(ConvertFsdp, ShardedStateDictsLoadIntoFsdp2AndPlainModels) {
  for (const int size : {1, 2, 4}) {
    on_ranks(size, [](const WorldPtr& world) {
      for (const auto& mesh : meshes_of(world)) {
        for (const bool original : {false, true}) {
          Flat flat(world, original, 3);
          const StateDictTypeScope scope(flat.net, {.type = StateDictType::kSharded});
          const auto weights = fsdp1_state_dict(flat.net);
          const auto states = optim_state_dict(flat.net, *flat.optimizer);
          EXPECT_EQ(weights.at("first.weight").is_sharded(), world->size() > 1);
          Rows rows(mesh, 3), to(mesh, 1, 8);
          for (const bool by_name : {false, true}) {
            train(to.net, *to.optimizer, 1, 7);
            const auto given = by_name ? states : flatten_optimizer_dict(states);
            const auto keys = set_state_dict(to.net, {to.optimizer.get()}, weights, given);
            EXPECT_TRUE(keys.missing_keys.empty() && keys.unexpected_keys.empty());
            expect_same_rows(to, rows);
            EXPECT_NEAR(output_of(to.net), output_of(rows.net), 1e-4);
          }
          Fsdp1Net plain(8, /*transposed=*/false);
          const auto plain_optimizer = adam_of(plain);
          set_state_dict(plain, {plain_optimizer.get()}, weights, states);
          EXPECT_NEAR(output_of(plain), output_of(rows.net), 1e-4);
          EXPECT_EQ(plain_optimizer->steps(), 3);
        }
      }
    });
  }
}

TEST(ConvertFsdp, MismatchedShardedDictOnOneRankIsAnErrorOnAllRanksBeforeAnyChange) {
  on_ranks(3, [](const WorldPtr& world) {
    Flat flat(world, true, 1);
    Rows rows(init_device_mesh(world, "cpu", {3}, {"dp"}), 0, 8);
    const StateDictTypeScope scope(flat.net, {.type = StateDictType::kSharded});
    const auto before = output_of(rows.net);
    const auto failing = [&](const std::function<void(StateDict&)>& change) {
      auto weights = fsdp1_state_dict(flat.net);
      if (world->rank() == 1) change(weights);
      return message_of([&] { set_model_state_dict(rows.net, weights); });
    };
    EXPECT_THAT(failing([](StateDict& weights) { weights.erase("last.bias"); }), HasSubstr("the ranks differ"));
    EXPECT_THAT(
        failing([](StateDict& weights) { weights.set("last.bias", weights.at("first.weight")); }),
        HasSubstr("last.bias: a ShardedTensor of Float [1] over ranks 0,1,2 on rank 0, a ShardedTensor of Float [5, "
                  "3] over ranks 0,1,2 on rank 1"));
    EXPECT_THAT(failing([](StateDict& weights) { weights.set("mean", at::ones({3})); }),
                HasSubstr("rank 1: [state.set_model] Error(s) in loading state_dict: size mismatch for 'mean'"));
    EXPECT_THAT(failing([](StateDict& weights) {
                  auto other = std::make_shared<ShardedTensor>(*weights.at("again").sharded());
                  other->local_shards[0].tensor = other->local_shards[0].tensor + 1;
                  weights.set("again", other);
                }),
                HasSubstr("rank 1: [state.set_model] 'scale' and 'again' are one tensor of the model"));
    EXPECT_EQ(output_of(rows.net), before);
    auto states = optim_state_dict(flat.net, *flat.optimizer);
    states.at("state").dict().erase("first.bias");
    EXPECT_THAT(message_of([&] { set_optimizer_state_dict(rows.net, {rows.optimizer.get()}, states); }),
                HasSubstr("Missing optimizer state for parameter 'first.bias'"));
  });
}

TEST(ConvertFsdp, ReportsTensorsMissingInOneModelOnAllRanks) {
  struct Other : nn::Callable<Other> {
    at::Tensor scale;
    Other() { register_parameter("scale", scale, at::ones({7})); }
    at::Tensor forward(const at::Tensor& x) { return x * scale; }
  };
  on_ranks(2, [](const WorldPtr& world) {
    Flat flat(world, true, 0);
    Other other;
    fully_shard(other, {.mesh = init_device_mesh(world, "cpu", {2}, {"dp"})});
    EXPECT_THAT(message_of([&] { copy_fsdp1_to_fsdp2(flat.net, other); }),
                HasSubstr("the FSDP2 model has no such tensor"));
    EXPECT_THAT(message_of([&] { copy_fsdp2_to_fsdp1(other, flat.net); }), HasSubstr("Missing key(s)"));
  });
}

// Four equal weights in one unit. The flat parameter is four times the size that may be unsharded at once.
struct Wide : nn::Callable<Wide> {
  static constexpr int64_t kRows = 64, kColumns = 256, kBytes = kRows * kColumns * 4;
  at::Tensor a, b, c, d;
  Wide() {
    register_parameter("a", a, at::ones({kRows, kColumns}));
    register_parameter("b", b, at::ones({kRows, kColumns}));
    register_parameter("c", c, at::ones({kRows, kColumns}));
    register_parameter("d", d, at::ones({kRows, kColumns}));
  }
  at::Tensor forward(const at::Tensor& x) { return (x * a).sum() + (x * b).sum() + (x * c).sum() + (x * d).sum(); }
};

TEST(Fsdp1State, UnshardsAtMostTwoParametersAtOnce) {
  on_ranks(4, [](const WorldPtr& world) {
    const auto mesh = init_device_mesh(world, "cpu", {4}, {"dp"});
    for (const bool original : {false, true}) {
      Wide flat, rows;
      wrap_fsdp1(flat, {.group = world->group(), .use_orig_params = original});
      fully_shard(rows, {.mesh = mesh});
      const auto optimizer = adam_of(flat), row_optimizer = adam_of(rows);
      flat(at::ones({1, Wide::kColumns})).backward();
      optimizer->step();
      optimizer->zero_grad();
      rows(at::ones({1, Wide::kColumns})).backward();
      row_optimizer->step();
      const int64_t two = 2 * Wide::kBytes + 4096, shard = Wide::kBytes;  // shard: of one state of all four weights

      EXPECT_LE(peak_bytes_of([&] { copy_fsdp1_to_fsdp2(flat, rows); }), two);
      EXPECT_LE(peak_bytes_of([&] { copy_fsdp2_to_fsdp1(rows, flat); }), two);
      EXPECT_LE(peak_bytes_of([&] { copy_fsdp1_to_fsdp2(flat, *optimizer, *row_optimizer); }), two);
      // The results are the shards of two states.
      EXPECT_LE(peak_bytes_of([&] { copy_fsdp2_to_fsdp1(*row_optimizer, flat, *optimizer); }), two + 2 * shard);
      const StateDictTypeScope scope(flat, {.type = StateDictType::kSharded});
      StateDict chunks;
      const auto chunking = peak_bytes_of([&] { chunks = optim_state_dict(flat, *optimizer); });
      EXPECT_LE(chunking, two + 2 * shard);
      EXPECT_GE(chunking, 2 * shard);
      EXPECT_LE(peak_bytes_of([&] { optim_state_dict_to_load(flat, *optimizer, chunks); }), two + 2 * shard);
      const auto weights = fsdp1_state_dict(flat);
      EXPECT_TRUE(weights.at("a").is_sharded());
      EXPECT_LE(peak_bytes_of([&] { set_state_dict(rows, {row_optimizer.get()}, weights, chunks); }), two);
      // The whole dict is on rank 0 only. Other ranks receive one tensor at a time.
      const StateDictTypeScope rank0(flat, {.optim_state_dict_config = FullOptimStateDictConfig{.rank0_only = true}});
      StateDict whole;
      const auto saving = peak_bytes_of([&] { whole = optim_state_dict(flat, *optimizer); });
      if (world->rank() > 0) {
        EXPECT_LE(saving, two);
      }
      EXPECT_LE(peak_bytes_of([&] { optim_state_dict_to_load(flat, *optimizer, whole); }), two + 2 * shard);
    }
  });
}

}  // namespace
}  // namespace tessera::testing
