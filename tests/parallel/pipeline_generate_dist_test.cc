// Tests of text generation with models whose layers, tokens, heads and weights are distributed over ranks. The
// generated tokens are equal to the tokens of one rank.
#include <gmock/gmock.h>

#include "tessera/models/generation/generate.h"
#include "tests/parallel/pipeline_model.h"

namespace tessera::testing {
namespace {

struct GenerationCase {
  std::vector<std::pair<std::string, int64_t>> mesh;
  const char* schedule = "1F1B";
  int stages_per_rank = 1;
  bool sequence_parallel = false;
  const char* changes = "";
};

std::string text_of(const GenerationCase& which) {
  std::string out = which.schedule;
  for (const auto& [dim, size] : which.mesh) out += fmt::format(", {} {}", dim, size);
  return out + ", " + which.changes;
}

const std::vector<int64_t> kPrompt = {3, 1, 4, 1, 5};
const GenerationOptions kOptions{.max_new_tokens = 14, .stop_tokens = {}};

MeshPtr mesh_of(const GenerationCase& which, const WorldPtr& world) {
  std::vector<int64_t> sizes;
  std::vector<std::string> names;
  for (const auto& [dim, size] : which.mesh) {
    names.push_back(dim);
    sizes.push_back(size);
  }
  return init_device_mesh(world, test_device_type(), sizes, names);
}

void expect_generates_as_one_rank(const GenerationCase& which) {
  const auto changes = layers(4, which.changes);
  const auto wanted = generate(*tiny_model(changes), kPrompt, kOptions);
  ASSERT_EQ(wanted.size(), 14u);
  int ranks = 1;
  for (const auto& [dim, size] : which.mesh) ranks *= static_cast<int>(size);
  on_threads(ranks, [&](const WorldPtr& world) {
    const auto mesh = mesh_of(which, world);
    ParallelizeModelOptions parallel{.mesh = mesh, .sequence_parallel = which.sequence_parallel};
    if (mesh->ndim() == 1 && mesh->has_dim("pp")) parallel.mesh = nullptr;
    PipelineRig rig(changes, {.mesh = mesh, .schedule = which.schedule, .stages_per_rank = which.stages_per_rank},
                    parallel);
    rig.model->train(false);
    for (int time = 0; time < 2; ++time) {
      EXPECT_EQ(rig.pipeline->generate(kPrompt, kOptions, world->group().get()), wanted) << text_of(which);
    }
    if (!mesh->has_dim("cp") && !mesh->has_dim("dp_shard")) {
      // Training continues between generations.
      const auto batches = documents(4, 8);
      EXPECT_NO_THROW(rig.pipeline->step(here(batches), {.loss_divisor = labels_in(batches)})) << text_of(which);
    }
  });
}

TEST(PipelineGenerate, GeneratesTheTokensOfOneRank) {
  for (const auto& which :
       std::vector<GenerationCase>{{{{"pp", 2}}},
                                   {{{"pp", 4}}},
                                   {{{"pp", 2}}, "Interleaved1F1B", 2},
                                   {{{"pp", 2}}, "ZBVZeroBubble", 2},  // the first rank has the last stage
                                   {{{"pp", 3}}, "1F1B", 1, false, R"("tie_word_embeddings": true)"}}) {
    expect_generates_as_one_rank(which);
  }
}

TEST(PipelineGenerate, GeneratesTheTokensOfOneRankWithOtherMeshDims) {
  for (const auto& which : std::vector<GenerationCase>{
           {{{"pp", 2}, {"dp_shard", 2}}},
           {{{"pp", 2}, {"dp_shard", 2}}, "DualPipeV", 2},
           {{{"pp", 2}, {"tp", 2}}},
           {{{"pp", 2}, {"tp", 2}}, "1F1B", 1, true},
           {{{"dp_shard", 1}, {"cp", 2}}},
           {{{"pp", 2}, {"dp_shard", 1}, {"cp", 2}}},
           {{{"dp_shard", 1}, {"cp", 3}},
            "1F1B",
            1,
            false,
            R"("architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4)"}}) {
    expect_generates_as_one_rank(which);
  }
}

// A stop ends generation on all ranks in the same step. An invalid prompt is an error on all ranks before any data is
// sent.
TEST(PipelineGenerate, StopsAndFailsOnAllRanks) {
  const auto changes = layers(2);
  const auto whole = generate(*tiny_model(changes), kPrompt, kOptions);
  const GenerationOptions stops{.max_new_tokens = 14, .stop_tokens = {whole[3]}};
  const auto wanted = generate(*tiny_model(changes), kPrompt, stops);
  on_threads(2, [&](const WorldPtr& world) {
    PipelineRig rig(changes, {.mesh = stages_mesh(world)});
    EXPECT_EQ(rig.pipeline->generate(kPrompt, stops), wanted);
    EXPECT_THAT(error_of([&] { rig.pipeline->generate({}, kOptions); }), ::testing::HasSubstr("holds no token"));
    EXPECT_EQ(rig.pipeline->generate(kPrompt, stops), wanted);
  });
}

}  // namespace
}  // namespace tessera::testing
