// Tests of `tessera train` on conversations with tool calls, with the tokenizer and the chat template of Qwen3.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera::trials {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// The conversations: one call; two calls in a message; two rounds of calls, the first before the last user message; a
// call with reasoning; a call as the last message; and ShareGPT's form, in its own file.
constexpr const char* kMessages =
    R"({"messages": [{"role": "user", "content": "Weather in Oslo?"}, {"role": "assistant", "content": null, "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Oslo\"}"}}]}, {"role": "tool", "content": "rain"}, {"role": "assistant", "content": "It rains."}], "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]}
{"messages": [{"role": "user", "content": "Oslo and Rome?"}, {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}, {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}]}, {"role": "tool", "content": "rain"}, {"role": "tool", "content": "sun"}, {"role": "assistant", "content": "Rain and sun."}]}
{"messages": [{"role": "user", "content": "Oslo?"}, {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}]}, {"role": "tool", "content": "rain"}, {"role": "assistant", "content": "Rain."}, {"role": "user", "content": "Rome?"}, {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}]}, {"role": "tool", "content": "sun"}, {"role": "assistant", "content": "Sun."}]}
{"messages": [{"role": "user", "content": "Oslo?"}, {"role": "assistant", "content": "", "reasoning_content": "I ask.", "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}]}, {"role": "tool", "content": "rain"}, {"role": "assistant", "content": "Rain."}]}
{"messages": [{"role": "user", "content": "Oslo?"}, {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}]}]}
)";
constexpr const char* kShareGpt =
    R"({"conversations": [{"from": "human", "value": "Oslo?"}, {"from": "function_call", "value": "{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\"}}"}, {"from": "observation", "value": "rain"}, {"from": "gpt", "value": "Rain."}]}
)";

TEST(ToolTraining, TrainsOnQwen3ToolCalls) {
  const testing::TempFolder folder;
  const auto write = [&](const std::string& name, const std::string& content) {
    std::filesystem::create_directories((folder / name).parent_path());
    std::ofstream(folder / name, std::ios::binary) << content;
    return (folder / name).string();
  };
  write("base/config.json", R"({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936,
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 8, "max_position_embeddings": 1024, "initializer_range": 0.1, "torch_dtype": "float32",
    "tie_word_embeddings": true, "eos_token_id": 151645})");
  for (const char* name : {"tokenizer.json", "tokenizer_config.json"}) {
    std::filesystem::copy_file(testing::asset("tokenizers/qwen3") / name, folder / "base" / name);
  }
  std::filesystem::copy_file(testing::asset("templates") / "Qwen-Qwen3-0.6B.jinja",
                             folder / "base/chat_template.jinja");
  const auto recipe =
      write("recipe.yaml", "model: {path: " + (folder / "base").string() + ", init: random}\ndata: {train: [" +
                               write("calls.jsonl", kMessages) + ", " + write("sharegpt.jsonl", kShareGpt) +
                               "], sequence_length: 384, cache: off}\noptimizer: {lr: 1.0e-2}\n"
                               "train: {steps: 3, global_batch_size: 2, local_batch_size: 1, validate_every: 0}\n"
                               "checkpoint: {every: 0, export: final}\nlog: {tensorboard: false}\n");
  const auto run = testing::run_process(
      {testing::program(), "train", recipe, "--nproc", "1", "checkpoint.dir=" + (folder / "run").string()});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_THAT(run.out + run.err, HasSubstr("JSON lines, chats"));
  EXPECT_THAT(run.out + run.err, Not(HasSubstr("does not learn")));
  EXPECT_TRUE(std::filesystem::exists(folder / "run/model/model.safetensors"));
}

}  // namespace
}  // namespace tessera::trials
