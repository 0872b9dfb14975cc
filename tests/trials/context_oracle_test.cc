// Tests of generation beyond max_position_embeddings with dynamic rotary embeddings, against transformers.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tessera/base/files/file.h"
#include "tessera/models/files/weights.h"
#include "tessera/models/generation/engine.h"
#include "tessera/models/generation/generate.h"
#include "tessera/models/generation/load.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using Tokens = std::vector<int64_t>;

GenerationRequest request_into(Tokens& made, const Tokens& prompt, int64_t count) {
  GenerationOptions options;
  options.max_new_tokens = count;
  return {.prompt = prompt, .options = options, .on_token = [&made](const NewToken& token) {
            made.push_back(token.token);
            return true;
          }};
}

TEST(DynamicRope, MatchesTransformersBeyondTheContextAloneAndInABatch) {
  const testing::TempFolder folder;
  const auto run = testing::run_python("tests/trials/oracle/dynamic_rope.py", {folder.path().string()});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const auto cases = nlohmann::json::parse(read_file(folder / "continuations.json"));
  ASSERT_EQ(cases.size(), 5U);
  const auto model = from_pretrained(folder / "model");
  EXPECT_EQ(model->config().context_tokens, 128);
  const auto in_rows = load_for_generation(folder / "model", "", at::kCPU);
  // Prompts are computed in blocks, and later sequences can share their pages.
  Engine engine(in_rows, {.pages = 64, .prompt_block = 24});
  std::vector<Tokens> made(2 * cases.size());
  size_t next = 0;
  for (int pass = 0; pass < 2; ++pass) {
    for (const auto& each : cases) {
      const auto prompt = each["prompt"].get<Tokens>();
      const auto tokens = each["tokens"].get<Tokens>();
      GenerationOptions options;
      options.max_new_tokens = static_cast<int64_t>(tokens.size());
      if (pass == 0) {
        EXPECT_EQ(generate(*model, prompt, options), tokens) << prompt.size();
        EXPECT_EQ(generate(*in_rows, prompt, options), tokens) << prompt.size();
      }
      engine.add(request_into(made[next++], prompt, options.max_new_tokens));
    }
    while (engine.step()) {
    }
  }
  for (size_t i = 0; i < made.size(); ++i) EXPECT_EQ(made[i], cases[i % cases.size()]["tokens"].get<Tokens>()) << i;
}

}  // namespace
}  // namespace tessera
