// Tests of an engine whose model is distributed over several ranks, by tensor parallelism or with a shard of each layer
// on every rank. The generated tokens are equal to the tokens of one rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/models/generation/engine.h"
#include "tessera/models/generation/engine_follower.h"
#include "tests/parallel/parallel_families.h"

namespace tessera::testing {
namespace {

// Prompts with a common prefix: one is longer than a block, and one is sampled.
std::vector<GenerationRequest> requests() {
  std::vector<GenerationRequest> all;
  for (int64_t i = 0; i < 5; ++i) {
    GenerationRequest request{.options = {.max_new_tokens = 6 + i, .sample = i == 3, .seed = 9, .stop_tokens = {}}};
    for (int64_t place = 0; place < (i == 2 ? 29 : 18 + i); ++place) {
      request.prompt.push_back((place * place + (place < 17 ? 0 : i)) % 37);
    }
    all.push_back(std::move(request));
  }
  return all;
}

// Runs all requests together. The callback of one request cancels the request after two tokens.
std::vector<std::vector<int64_t>> tokens_of(Engine& engine) {
  auto all = requests();
  std::vector<std::vector<int64_t>> found(all.size());
  for (size_t i = 0; i < all.size(); ++i) {
    all[i].on_token = [&found, i](const NewToken& made) {
      EXPECT_FALSE(made.error) << made.error->what();
      found[i].push_back(made.token);
      return i != 4 || found[i].size() < 2;
    };
    engine.add(std::move(all[i]));
  }
  while (engine.step()) {
  }
  return found;
}

const EngineOptions kFewPages{.pages = 9, .max_sequences = 4, .prompt_block = 16};

TEST(DistributedGeneration, GeneratesTheTokensOfOneRank) {
  for (const auto& family : all_families(4, 2)) {
    Engine one(random_model(config_of(family)), kFewPages);
    const auto wanted = tokens_of(one);
    EXPECT_EQ(wanted[4].size(), 2U);
    for (const auto& [dim, ranks] : {std::pair("tp", 2), std::pair("dp_shard", 2), std::pair("dp_shard", 3)}) {
      on_threads(ranks, [&](const WorldPtr& world) {
        const auto mesh = init_device_mesh(world, test_device_type(), {ranks}, {dim});
        const auto model = random_model(config_of(family), ParallelizeModelOptions{.mesh = mesh});
        if (world->rank() > 0) return run_engine_follower(*model, *world->group());
        auto options = kFewPages;
        options.group = world->group();
        Engine engine(model, options);
        engine.keep_alive();
        EXPECT_EQ(tokens_of(engine), wanted) << family.architecture << ", " << dim << " " << ranks;
        EXPECT_GT(engine.counts().shared_tokens, 0);
        engine.keep_alive();
        EXPECT_EQ(tokens_of(engine), wanted) << "again, with pages that are filled";
      });
    }
  }
}

// An error that ends a step on one rank ends the engine on all ranks.
TEST(DistributedGeneration, ErrorOfOneStepEndsAllRanks) {
  on_threads(2, [](const WorldPtr& world) {
    const auto mesh = init_device_mesh(world, test_device_type(), {2}, {"tp"});
    const auto model = random_model(config_of({"LlamaForCausalLM"}), ParallelizeModelOptions{.mesh = mesh});
    const auto fails = [](nn::Module&, nn::TensorRefs&) { raise(ErrorKind::kInternal, "this layer fails"); };
    model->blocks().back()->register_forward_hook(fails);
    if (world->rank() > 0) {
      EXPECT_THROW(run_engine_follower(*model, *world->group()), Error);
      return;
    }
    auto options = kFewPages;
    options.group = world->group();
    Engine engine(model, options);
    engine.add({.prompt = {1, 2, 3}});
    EXPECT_THROW(engine.step(), Error);
  });
}

// The callback runs on the first rank only. Its exception is thrown on all ranks, and the group can be used again.
TEST(DistributedGeneration, ExceptionOfTheCallbackIsThrownOnAllRanks) {
  on_threads(2, [](const WorldPtr& world) {
    const auto mesh = init_device_mesh(world, test_device_type(), {2}, {"tp"});
    const auto model = random_model(config_of({"LlamaForCausalLM"}), ParallelizeModelOptions{.mesh = mesh});
    const std::vector<int64_t> prompt = {3, 1, 4};
    const auto generate_until = [&](int64_t stop, bool throws) {
      int64_t calls = 0;
      return generate(
          *model, prompt, {.max_new_tokens = 9, .stop_tokens = {}},
          [&](int64_t) {
            if (++calls == stop && throws) raise(ErrorKind::kConfig, "the reader of the tokens fails");
            return calls < stop;
          },
          world->group().get());
    };
    EXPECT_THAT(error_of([&] { generate_until(3, true); }), ::testing::HasSubstr("rank 0: the reader of the tokens"));
    EXPECT_EQ(generate_until(3, false).size(), 3U);
  });
}

}  // namespace
}  // namespace tessera::testing
