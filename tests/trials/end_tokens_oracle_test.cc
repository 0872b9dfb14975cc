// Tests of where chats end, against llama.cpp and transformers.
#include <gtest/gtest.h>

#include <fstream>

#include "tessera/models/gguf/gguf_convert.h"
#include "tessera/text/tokenizer.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"
#include "tests/trials/chain_model.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::asset;
using testing::ChainFolder;
using testing::kChainEos;
using testing::kChainTurnEnd;
using testing::run_process;
using testing::run_python;
using testing::TempFolder;

std::vector<json> ask_llama_cpp(const std::vector<json>& questions) {
  std::string input;
  for (const auto& question : questions) input += question.dump() + "\n";
  const auto run = run_python("tests/trials/oracle/llama_cpp_says.py", {}, {.input = input, .timeout_seconds = 300});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  std::vector<json> answers;
  std::istringstream lines(run.out);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("{")) answers.push_back(json::parse(line));
  }
  answers.resize(questions.size());
  return answers;
}

// GGUF files as other converters have written them, and GGUF files of our converter.
TEST(EndTokensOracle, GgufChatsEndWhereLlamaCppEndsThem) {
  TempFolder folder;
  std::vector<fs::path> files;
  for (const int32_t type : {1, 3, 4}) {
    for (const auto eos : {std::optional<uint32_t>(kChainEos), std::optional<uint32_t>(kChainTurnEnd)}) {
      files.push_back(folder / fmt::format("{}-{}.gguf", type, *eos));
      testing::write_chain_gguf(files.back(), {.eos = eos, .turn_end_type = type});
    }
  }
  files.push_back(folder / "eot.gguf");
  testing::write_chain_gguf(files.back(), {.eos = kChainEos, .eot = kChainTurnEnd});
  const std::vector<ChainFolder> folders = {
      {.generation_config = R"({"eos_token_id": [257, 260]})"},
      {.config_eos = "[257, 260]"},
      {},
      // An end token that llama.cpp does not know by its text: "b" in "abc".
      {.generation_config = R"({"eos_token_id": [257, 98]})", .chat_template = testing::kChainTemplate},
  };
  for (size_t i = 0; i < folders.size(); ++i) {
    testing::write_chain_folder(folder / fmt::format("hf{}", i), folders[i]);
    files.push_back(folder / fmt::format("exported{}.gguf", i));
    folder_to_gguf(folder / fmt::format("hf{}", i), files.back(), {.type = GgmlType::kF32});
  }
  std::vector<json> questions;
  for (const auto& file : files) questions.push_back({{"model", file.string()}, {"chat", "hi"}});
  const auto answers = ask_llama_cpp(questions);
  for (size_t i = 0; i < files.size(); ++i) {
    SCOPED_TRACE(files[i].filename());
    const auto run = run_process({testing::program(), "generate", "--model", files[i].string(), "--chat", "--prompt",
                                  "hi", "--max-new-tokens", "20", "--json"});
    ASSERT_EQ(run.exit_code, 0) << run.err;
    EXPECT_EQ(json::parse(run.out)["text"], answers[i].value("text", "none"));
    EXPECT_EQ(answers[i].value("finish", "none"), "stop");
  }
}

// A byte-level vocabulary without the name of a pre-tokenizer.
TEST(EndTokensOracle, WithoutAPreTokenizerTextIsSplitAsInLlamaCpp) {
  TempFolder folder;
  const std::vector<std::string> merges = {"1 2", "12 3", "123 4", ". .", ".. .", "' s", "d s", "\u0120 x", "! x"};
  const std::vector<std::string> texts = {
      "1234 12345", "a..b...c", "it's", "ads x !x", " x  x\n x", "$12$34+<=>^~|", "\u00e9\u00e9\u4e2d12\u0663",
      "x\t\tx  ",   "12a3 .x",  ""};
  std::vector<std::string> made;
  for (auto merge : merges) made.push_back(merge.erase(merge.find(' '), 1));
  std::vector<json> questions;
  for (const char* pre : {"", "default", "gpt-2"}) {
    const auto file = folder / fmt::format("{}.gguf", *pre ? pre : "none");
    testing::write_chain_gguf(
        file, {.pre = *pre ? std::optional<std::string>(pre) : std::nullopt, .merges = merges, .more_tokens = made});
    questions.push_back({{"model", file.string()}, {"texts", texts}});
  }
  const auto answers = ask_llama_cpp(questions);
  EXPECT_NE(answers[0], answers[2]) << "the texts tell the two apart";
  for (size_t i = 0; i < questions.size(); ++i) {
    const fs::path file = questions[i]["model"].get<std::string>();
    SCOPED_TRACE(file.filename());
    gguf_to_folder(file, folder / file.stem());
    const auto tokenizer = text::Tokenizer::from_folder(folder / file.stem());
    for (size_t t = 0; t < texts.size(); ++t) {
      EXPECT_EQ(json(tokenizer.encode(texts[t])), answers[i]["ids"][t]) << texts[t];
    }
    folder_to_gguf(folder / file.stem(), folder / (file.stem().string() + "-back.gguf"), {.type = GgmlType::kF32});
    const auto back = GgufFile::open(folder / (file.stem().string() + "-back.gguf"));
    EXPECT_EQ(back->find_string("tokenizer.ggml.pre"), i == 2 ? "gpt-2" : "default");
  }
}

// A base model, whose generation_config.json lists only the end of a document, is trained on a chat.
TEST(EndTokensOracle, AModelTrainedOnAChatStopsByItselfInEveryProgram) {
  TempFolder folder;
  const auto base = folder / "base";
  fs::create_directories(base);
  for (const char* name : {"tokenizer.json", "tokenizer_config.json"}) {
    fs::copy_file(asset("tokenizers/qwen3") / name, base / name);
  }
  auto config = json::parse(read_file(base / "tokenizer_config.json"));
  config["eos_token"] = "<|endoftext|>";  // Qwen's base models have this eos_token
  publish_file(base / "tokenizer_config.json", config.dump());
  publish_file(base / "config.json",
               R"({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "vocab_size": 151936, "max_position_embeddings": 256, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "initializer_range": 0.02, "tie_word_embeddings": true, "torch_dtype": "float32", "bos_token_id": 151643,
    "eos_token_id": 151643})");
  publish_file(base / "generation_config.json", R"({"bos_token_id": 151643, "eos_token_id": 151643})");
  const json chat = {
      {"messages", {{{"role", "user"}, {"content", "hi"}}, {{"role", "assistant"}, {"content", "Yes!"}}}}};
  std::ofstream(folder / "chats.jsonl") << chat.dump() << "\n" << chat.dump() << "\n";
  publish_file(folder / "recipe.yaml", "model: {path: " + base.string() + ", init: random}\ndata: {train: [" +
                                           (folder / "chats.jsonl").string() +
                                           "], sequence_length: 64, packing: false, cache: \"off\"}\n"
                                           "optimizer: {lr: 0.02, weight_decay: 0.0}\n"
                                           "schedule: {name: constant, warmup_steps: 0}\n"
                                           "train: {steps: 60, global_batch_size: 1, local_batch_size: 1}\n"
                                           "checkpoint: {every: 0, dir: " +
                                           (folder / "run").string() + "}\n");
  const auto trained =
      run_process({testing::program(), "train", (folder / "recipe.yaml").string()}, {.timeout_seconds = 300});
  ASSERT_EQ(trained.exit_code, 0) << trained.err;
  const auto model = folder / "run" / "model";
  EXPECT_EQ(json::parse(read_file(model / "generation_config.json"))["eos_token_id"], json({151643, 151645}));

  const auto ours = run_process({testing::program(), "generate", "--model", model.string(), "--chat", "--prompt", "hi",
                                 "--max-new-tokens", "30", "--json"});
  ASSERT_EQ(ours.exit_code, 0) << ours.err;
  const auto generated = json::parse(ours.out);
  EXPECT_EQ(generated["tokens"].back(), 151645) << generated;
  EXPECT_TRUE(generated["text"].get<std::string>().ends_with("Yes!")) << generated;
  EXPECT_EQ(ours.err.find("texts end at"), std::string::npos) << ours.err;

  const auto run = run_python("tests/trials/oracle/chat_in_programs.py", {testing::program(), model.string(), "hi"},
                              {.timeout_seconds = 300});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const auto others = json::parse(run.out.substr(run.out.rfind("{\"serve\"")));
  EXPECT_EQ(others["serve"]["text"], generated["text"]);
  EXPECT_EQ(others["serve"]["finish"], "stop");
  EXPECT_EQ(others["transformers"]["tokens"], generated["tokens"]);
  EXPECT_EQ(others["transformers"]["text"], generated["text"]);
}

}  // namespace
}  // namespace tessera
