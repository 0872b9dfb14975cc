// Schemas of random pydantic models: the grammar must accept pydantic's instances, and pydantic must accept the
// grammar's texts.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>

#include "tessera/base/text/json.h"
#include "tessera/text/grammar/json_schema.h"
#include "tests/support/process.h"
#include "tests/text/grammar_draw.h"

namespace tessera::text {
namespace {

TEST(JsonSchemaOracle, PydanticAcceptsGrammarTextsAndTheGrammarAcceptsInstances) {
  constexpr int kModels = 400, kTexts = 25;
  const auto seed = std::to_string(std::random_device()());
  const auto drawn = testing::run_python("tests/text/oracle/schema_oracle.py", {"draw", seed, std::to_string(kModels)});
  ASSERT_EQ(drawn.exit_code, 0) << drawn.err;
  const auto models = parse_json(drawn.out, "models", {.max_bytes = size_t{1} << 30, .exact_numbers = true});
  ASSERT_EQ(models.size(), static_cast<size_t>(kModels));
  std::mt19937_64 draw(std::stoull(seed));
  Json texts = Json::array();
  int instances = 0, whole = 0;
  for (const auto& model : models) {
    GrammarBuilder build;
    JsonParts json(build);
    const auto root = JsonSchema(json, JsonReader(model["schema"], "schema")).value();
    GrammarStates states(std::move(build).finish(root));
    for (const auto& instance : model["instances"]) {
      ++instances;
      EXPECT_TRUE(takes(states, instance.get<std::string>()))
          << "seed " << seed << ": " << instance.get<std::string>() << "\n"
          << model["schema"].dump();
    }
    auto& of_model = texts.emplace_back(Json::array());
    for (int i = 0; i < kTexts; ++i) {
      if (auto text = drawn_text(states, draw); !text.empty()) of_model.push_back(std::move(text));
    }
    whole += static_cast<int>(of_model.size());
  }
  EXPECT_GT(whole, kModels * kTexts / 2);
  const auto checked = testing::run_python("tests/text/oracle/schema_oracle.py",
                                           {"check", seed, std::to_string(kModels)}, {.input = texts.dump()});
  ASSERT_EQ(checked.exit_code, 0) << checked.err;
  for (const auto& wrong : Json::parse(checked.out)) {
    ADD_FAILURE() << "seed " << seed << ": " << wrong[1].get<std::string>() << "\n"
                  << wrong[2].get<std::string>() << "\n"
                  << models[wrong[0].get<size_t>()]["schema"].dump();
  }
  fmt::print("{} instances, {} drawn texts of {} models, seed {}\n", instances, whole, kModels, seed);
}

}  // namespace
}  // namespace tessera::text
