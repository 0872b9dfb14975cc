// llama.cpp's server against ours: both must generate the same text from a GGUF file that we wrote.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tessera/models/gguf/gguf_convert.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera::serve {
namespace {

using nlohmann::json;

std::vector<std::string> texts_of(const std::string& server, const std::string& model, const std::string& how) {
  const json request = {
      {"prompts", {"In the beginning God created the", "The capital of France is", "def add(a, b):\n"}}, {"new", 24}};
  const auto run = testing::run_python("bench/peers/serve.py", {server, model, how},
                                       {.input = request.dump() + "\n",
                                        .environment = {{"TESSERA_PROGRAM", testing::program()}},
                                        .timeout_seconds = 300});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  const auto at = run.out.find("{\"seconds\"");
  if (at == std::string::npos) return {};
  return json::parse(run.out.substr(at, run.out.find('\n', at) - at))["texts"].get<std::vector<std::string>>();
}

TEST(LlamaCpp, ReadsOurGgufFileAndGeneratesTheSameText) {
  const testing::TempFolder folder;
  const auto file = (folder / "model.gguf").string();
  folder_to_gguf(testing::asset("smollm2"), file, {.type = GgmlType::kF32});
  const auto ours = texts_of("tessera", file, "");
  ASSERT_EQ(ours.size(), 3u);
  EXPECT_EQ(texts_of("llama.cpp", file, "3"), ours);
}

}  // namespace
}  // namespace tessera::serve
