// `tessera generate` as a user runs it, with a tiny random model. Expected texts come from generate().
#include "tessera/models/generation/generate.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tessera/base/files/file.h"
#include "tessera/base/files/unique_fd.h"
#include "tests/cli/tiny_tokenizer.h"
#include "tests/models/tiny.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using testing::ProcessResult;

class Generate : public ::testing::Test {
 protected:
  void SetUp() override {
    model_ = testing::tiny_model();
    save_pretrained(*model_, dir(), {});
    publish_file(dir() / "tokenizer.json", testing::character_tokenizer("abcdefghijklmnopqrstuvwxyz .,:;!?()'-"));
  }
  std::filesystem::path dir() const { return folder_ / "model"; }
  ProcessResult run(std::vector<std::string> more) const {
    std::vector<std::string> all = {testing::program(), "generate", "--model", dir().string()};
    all.insert(all.end(), more.begin(), more.end());
    return testing::run_process(all, {.input = "the cat"});
  }
  testing::TempFolder folder_;
  std::shared_ptr<CausalLM> model_;
};

TEST_F(Generate, JsonHoldsPromptTokensAndText) {
  const auto found = run({"--prompt", "the cat", "--max-new-tokens", "9", "--json"});
  ASSERT_EQ(found.exit_code, 0) << found.err;
  const auto object = nlohmann::json::parse(found.out);
  const std::vector<int64_t> prompt = {19, 7, 4, 26, 2, 0, 19};
  EXPECT_EQ(object["prompt_tokens"], prompt);
  GenerationOptions options;
  options.max_new_tokens = 9;
  options.stop_tokens = {2, 3};
  EXPECT_EQ(object["tokens"], generate(*model_, prompt, options));
  const auto tokens = object["tokens"].get<std::vector<int64_t>>();
  const auto ends = std::ranges::count_if(tokens, [](int64_t token) { return token == 2 || token == 3; });
  EXPECT_EQ(object["text"].get<std::string>().size(), tokens.size() - static_cast<size_t>(ends))
      << "one character a token, none of the token that ends the text";
}

TEST_F(Generate, ContextLengthFollowsTheFlag) {
  const std::string full(64, 'a');
  const auto longer = run({"--prompt", full, "-c", "70", "--json"});
  ASSERT_EQ(longer.exit_code, 0) << longer.err;
  EXPECT_NE(longer.err.find("the model's own context is 64 tokens"), std::string::npos) << longer.err;
  GenerationOptions options;
  options.context_tokens = 70;
  options.stop_tokens = {2, 3};
  const auto tokens = generate(*model_, std::vector<int64_t>(64, 0), options);
  EXPECT_LE(tokens.size(), 6U);
  EXPECT_EQ(nlohmann::json::parse(longer.out)["tokens"], tokens);
  const auto shorter = run({"--prompt", std::string(8, 'a'), "--max-model-len", "8"});
  EXPECT_EQ(shorter.exit_code, 2);
  EXPECT_NE(shorter.err.find("context is 8"), std::string::npos) << shorter.err;
  EXPECT_EQ(run({"--prompt", "a", "--ctx-size", "0"}).out, run({"--prompt", "a"}).out);
}

TEST_F(Generate, StreamedTextAndStandardInputGiveTheSameText) {
  const auto object = nlohmann::json::parse(run({"--prompt", "the cat", "--max-new-tokens", "9", "--json"}).out);
  EXPECT_EQ(run({"--prompt", "-", "--max-new-tokens", "9"}).out, object["text"].get<std::string>() + "\n");
}

TEST_F(Generate, SeedRepeatsAndTemperatureZeroIsGreedy) {
  const auto sampled = run({"--prompt", "a", "--temperature", "1.5", "--seed", "4"});
  EXPECT_EQ(sampled.exit_code, 0) << sampled.err;
  EXPECT_EQ(run({"--prompt", "a", "--temperature", "1.5", "--seed", "4"}).out, sampled.out);
  EXPECT_EQ(run({"--prompt", "a", "--temperature", "0"}).out, run({"--prompt", "a"}).out);
}

TEST_F(Generate, ShardedOverRanksPrintsTheSameTextOnce) {
  const auto one = run({"--prompt", "the cat", "--max-new-tokens", "9", "--json"});
  for (const char* ranks : {"2", "3"}) {
    const auto several = run({"--prompt", "the cat", "--max-new-tokens", "9", "--json", "--nproc", ranks});
    ASSERT_EQ(several.exit_code, 0) << several.err;
    EXPECT_EQ(several.out, one.out);
  }
  const auto text = nlohmann::json::parse(one.out)["text"].get<std::string>();
  EXPECT_EQ(run({"--prompt", "-", "--max-new-tokens", "9", "--nproc", "2"}).out, text + "\n");
  const std::vector<std::string> sample = {"--prompt", "a", "--temperature", "1.5", "--seed", "4"};
  auto on_two = sample;
  on_two.insert(on_two.end(), {"--nproc", "2"});
  EXPECT_EQ(run(on_two).out, run(sample).out);
}

TEST_F(Generate, ChatAppliesTheChatTemplate) {
  publish_file(
      dir() / "chat_template.jinja",
      "{% for m in messages %}({{ m.role }}) {{ m.content }}{% endfor %}{% if add_generation_prompt %}: {% endif %}");
  const auto found = run({"--prompt", "hi", "--chat", "--json", "--max-new-tokens", "2"});
  ASSERT_EQ(found.exit_code, 0) << found.err;
  EXPECT_EQ(nlohmann::json::parse(found.out)["prompt_tokens"].size(), std::string("(user) hi: ").size());
}

TEST_F(Generate, StopStringsEndTheTextBeforeThem) {
  const auto text = nlohmann::json::parse(run({"--prompt", "the cat", "--max-new-tokens", "20", "--json"}).out)["text"]
                        .get<std::string>();
  const auto stop = text.substr(4, 2);
  const auto expected = text.substr(0, text.find(stop));
  EXPECT_EQ(run({"--prompt", "the cat", "--max-new-tokens", "20", "--stop", "zzzz", "--stop", stop}).out,
            expected + "\n");
  EXPECT_EQ(
      nlohmann::json::parse(
          run({"--prompt", "the cat", "--max-new-tokens", "20", "--json", "--stop", stop, "--nproc", "2"}).out)["text"],
      expected);
}

TEST_F(Generate, JsonSchemaConstrainsTheText) {
  publish_file(dir() / "tokenizer.json", testing::character_tokenizer("abcdefghijklmnopqrstuvwxyz {}[]\":,-1_"));
  publish_file(folder_ / "schema.json",
               R"({"type": "array", "items": {"enum": ["yes", "no", true]}, "minItems": 2, "maxItems": 4})");
  const auto schema = (folder_ / "schema.json").string();
  const auto fits = [](const std::string& text) {
    const auto json = nlohmann::json::parse(text, nullptr, false);
    return json.is_array() && json.size() >= 2 && json.size() <= 4;
  };
  for (const char* seed : {"1", "2"}) {
    const auto found = run({"--prompt", "the cat", "--seed", seed, "--json-schema", schema, "--max-new-tokens", "50"});
    ASSERT_EQ(found.exit_code, 0) << found.err;
    EXPECT_TRUE(fits(found.out)) << found.out;
  }
  publish_file(folder_ / "in.jsonl", "{\"prompt\": \"a\"}\n{\"prompt\": \"the cat\"}\n");
  const auto batch = run({"--batch", (folder_ / "in.jsonl").string(), "--json-schema", schema, "--max-new-tokens", "50",
                          "--temperature", "1"});
  ASSERT_EQ(batch.exit_code, 0) << batch.err;
  std::istringstream lines(batch.out);
  int count = 0;
  for (std::string line; std::getline(lines, line); ++count) {
    const auto object = nlohmann::json::parse(line);
    EXPECT_TRUE(fits(object["text"])) << line;
    EXPECT_EQ(object["finish_reason"], "stop");
  }
  EXPECT_EQ(count, 2);
  publish_file(folder_ / "schema.json", R"({"type": "string", "pattern": "a"})");
  const auto refused = run({"--prompt", "a", "--json-schema", schema});
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_NE(refused.err.find("schema.json: found 'pattern'"), std::string::npos) << refused.err;
}

TEST_F(Generate, BatchOutputFollowsTheOrderOfTheInputLines) {
  const auto text_of = [&](const std::string& prompt) {
    return nlohmann::json::parse(run({"--prompt", prompt, "--max-new-tokens", "9", "--json"}).out)["text"]
        .get<std::string>();
  };
  publish_file(
      folder_ / "in.jsonl",
      "{\"id\": \"x\", \"prompt\": \"the cat\"}\n\n{\"prompt\": \"a\"}\n{\"id\": 3, \"prompt\": \"the cat sat\"}");
  const auto file = (folder_ / "in.jsonl").string();
  const auto found = run({"--batch", file, "--max-new-tokens", "9"});
  ASSERT_EQ(found.exit_code, 0) << found.err;
  std::istringstream lines(found.out);
  std::vector<nlohmann::json> rows;
  for (std::string line; std::getline(lines, line);) rows.push_back(nlohmann::json::parse(line));
  ASSERT_EQ(rows.size(), 3U);
  EXPECT_EQ(rows[0]["id"], "x");
  EXPECT_FALSE(rows[1].contains("id"));
  EXPECT_EQ(rows[2]["id"], 3);
  EXPECT_EQ(rows[0]["text"], text_of("the cat"));
  EXPECT_EQ(rows[1]["text"], text_of("a"));
  EXPECT_EQ(rows[2]["text"], text_of("the cat sat"));
  EXPECT_EQ(run({"--batch", file, "--max-new-tokens", "9", "--nproc", "2"}).out, found.out);
  publish_file(folder_ / "in.jsonl", "{\"prompt\": \"a\"}\n{\"prompt\": 5}\n");
  const auto wrong = run({"--batch", file});
  EXPECT_EQ(wrong.exit_code, 3);
  EXPECT_EQ(wrong.out, "") << "every line is looked at first";
  EXPECT_NE(wrong.err.find("in.jsonl:2"), std::string::npos) << wrong.err;
}

TEST_F(Generate, AChatKeepsItsHistoryUntilItIsCleared) {
  publish_file(dir() / "chat_template.jinja", "{% for m in messages %}({{ m.role }}) {{ m.content }}{% endfor %}: ");
  const auto chat = [&](const std::string& input) {
    return testing::run_process({testing::program(), "generate", "--model", dir().string(), "--chat", "--system",
                                 "be kind", "--max-new-tokens", "4"},
                                {.input = input});
  };
  const auto first = chat("hi\n"), twice = chat("hi\nhi\n"), cleared = chat("hi\n/clear\nhi\n/exit\nhi\n");
  ASSERT_EQ(first.exit_code, 0) << first.err;
  EXPECT_EQ(cleared.out, first.out + first.out);
  ASSERT_EQ(twice.exit_code, 0) << twice.err;
  EXPECT_EQ(twice.out.substr(0, first.out.size()), first.out);
  EXPECT_NE(twice.out, cleared.out) << "the second answer knows the first";
  EXPECT_EQ(chat("").out, "");
  const auto full = chat("hi\nhi\nhi\nhi\n/clear\nhi\n");
  EXPECT_EQ(full.exit_code, 0);
  EXPECT_NE(full.err.find("context is 64"), std::string::npos) << full.err;
  EXPECT_EQ(full.out.substr(full.out.size() - first.out.size()), first.out) << "and goes on";
}

TEST_F(Generate, UsesAndReportsTheGenerationConfig) {
  publish_file(dir() / "generation_config.json", R"({"do_sample": true, "temperature": 1.5, "max_new_tokens": 7})");
  const auto found = run({"--prompt", "a"});
  EXPECT_NE(found.err.find("max_new_tokens 7, do_sample, temperature 1.5"), std::string::npos) << found.err;
  EXPECT_EQ(found.out, run({"--prompt", "a", "--temperature", "1.5"}).out);
  EXPECT_EQ(found.out.size(), 8U);
  const auto greedy = run({"--prompt", "a", "--temperature", "0", "--max-new-tokens", "7"});
  EXPECT_NE(greedy.out, found.out);
  EXPECT_EQ(greedy.err.find("generation_config"), std::string::npos) << greedy.err;
}

TEST_F(Generate, GeneratesWithLowPrecisionWeights) {
  for (const char* dtype : {"bfloat16", "int8", "int4", "float16"}) {
    const auto found = run({"--prompt", "the cat", "--max-new-tokens", "9", "--dtype", dtype});
    EXPECT_EQ(found.exit_code, 0) << found.err;
    EXPECT_GE(found.out.size(), 2U);
  }
}

// The output of a program whose standard output is a terminal.
std::string shown_on_a_terminal(const std::vector<std::string>& arguments, const std::string& input) {
  const UniqueFd terminal(::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
  EXPECT_EQ(::grantpt(terminal.get()) | ::unlockpt(terminal.get()), 0);
  const UniqueFd side(::open(::ptsname(terminal.get()), O_RDWR | O_NOCTTY | O_CLOEXEC));
  int in[2];
  EXPECT_EQ(::pipe2(in, O_CLOEXEC), 0);
  std::vector<char*> words;
  for (const auto& argument : arguments) words.push_back(const_cast<char*>(argument.c_str()));
  words.push_back(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(in[0], 0);
    ::dup2(side.get(), 1);
    ::execvp(words[0], words.data());
    ::_exit(127);
  }
  UniqueFd input_end(in[1]);
  const UniqueFd read_end(in[0]);
  EXPECT_EQ(::write(input_end.get(), input.data(), input.size()), static_cast<ssize_t>(input.size()));
  input_end.reset();
  std::string shown;
  const auto read_some = [&] {
    char buffer[4096];
    pollfd look{.fd = terminal.get(), .events = POLLIN, .revents = 0};
    if (::poll(&look, 1, 100) <= 0) return false;
    const ssize_t got = ::read(terminal.get(), buffer, sizeof buffer);
    if (got > 0) shown.append(buffer, static_cast<size_t>(got));
    return got > 0;
  };
  int status = 0;
  while (::waitpid(child, &status, WNOHANG) == 0) read_some();
  while (read_some()) {
  }
  EXPECT_EQ(status, 0) << shown;
  return shown;
}

TEST_F(Generate, OutputToATerminalEscapesControlCharacters) {
  std::string characters = "abcdef";
  for (char c = 1; c < 0x20; ++c) characters += c;
  publish_file(dir() / "tokenizer.json", testing::character_tokenizer(characters));
  publish_file(dir() / "chat_template.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}");
  const auto is_obeyed = [](char c) {
    return static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\r' && c != '\t';  // the terminal adds \r to \n
  };
  const std::vector<std::string> generate = {testing::program(), "generate", "--model", dir().string(),
                                             "--max-new-tokens", "40",       "--seed",  "1"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), generate.begin(), generate.end());
    return more;
  };
  const auto prompt = with({"--prompt", "abc"}), chat = with({"--chat"}), json = with({"--prompt", "abc", "--json"});
  for (const auto& arguments : {prompt, chat, json}) {
    const auto shown = shown_on_a_terminal(arguments, "abc\n");
    EXPECT_GT(shown.size(), 40U) << shown;
    EXPECT_EQ(std::ranges::count_if(shown, is_obeyed), 0) << shown;
    EXPECT_NE(shown.find(arguments == json ? "\\u00" : "\\x"), std::string::npos) << shown;
  }
  const auto piped = testing::run_process(prompt).out;
  EXPECT_GT(std::ranges::count_if(piped, is_obeyed), 0) << "a file gets the text as it is";
}

TEST_F(Generate, ErrorsHaveTheirExitCodeAndOneLine) {
  const auto expect = [](const ProcessResult& result, int code, const std::string& part) {
    EXPECT_EQ(result.exit_code, code) << result.err;
    EXPECT_NE(result.err.find(part), std::string::npos) << result.err;
    EXPECT_EQ(result.out, "");
  };
  expect(run({"--prompt", "a", "--nproc", "-1"}), 2, "wanted 1 to 4096");
  expect(run({"--prompt", "a", "--nproc", "0"}), 2, "wanted 1 to 4096");
  expect(run({"--prompt", "", "--nproc", "2"}), 2, "holds no token");
  expect(run({"--prompt", "a", "--top-p", "2"}), 2, "top_p");
  expect(run({"--prompt", ""}), 2, "holds no token");
  expect(run({"--prompt", "a", "--chat"}), 2, "no chat template");
  expect(run({"--prompt", "a", "--dtype", "int3"}), 2, "int3");
  expect(run({"--prompt", "a", "--dtype", "int4", "--nproc", "2"}), 2, "one rank");
  expect(run({}), 2, "--batch FILE");
  expect(run({"--prompt", "a", "--batch", "x"}), 2, "cannot be used with --prompt");
  expect(run({"--prompt", "a", "--system", "x"}), 2, "Add --chat");
  expect(run({"--batch", "/nowhere/x.jsonl"}), 3, "/nowhere/x.jsonl");
  expect(run({"--prompt", "a", "--temperature", "nan"}), 2, "temperature");
  expect(run({"--prompt", std::string(64, 'a')}), 2, "context is 64");
  std::filesystem::resize_file(dir() / "model.safetensors", 2000);
  expect(run({"--prompt", "a"}), 3, "cut off");
  std::filesystem::remove(dir() / "config.json");
  expect(run({"--prompt", "a"}), 3, "config.json");
}

}  // namespace
}  // namespace tessera
