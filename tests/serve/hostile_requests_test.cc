// The cost of the most expensive schemas: with all requests in memory at once, the counted and the used bytes must stay
// within the stated bounds.
#include "tests/serve/hostile_requests.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "tessera/serve/api_error.h"
#include "tessera/serve/requests.h"
#include "tests/cli/tiny_tokenizer.h"
#include "tests/support/heap_bytes.h"
#include "tests/support/sanitized.h"

namespace tessera::serve {
namespace {

using ::testing::HasSubstr;

constexpr const char* kLetters = "abcdefghijklmnopqrstuvwxyz .{}[]\":,1_0";

ServedModel served_without_model() {
  ServedModel made{
      .name = "tiny",
      .config = {},
      .defaults = {},
      .tokenizer = text::Tokenizer::from_json(testing::character_tokenizer(kLetters), "test"),
      .chat = text::ChatTemplate::parse(
          "{% for m in messages %}{{ m.role }}: {{ m.content }}. {% endfor %}{% if tools %}tools{% endif %}", "test"),
      .cache_tokens = 4096};
  made.config.vocab_size = 38;
  made.config.max_position_embeddings = made.config.context_tokens = 4096;
  return made;
}

const std::vector<testing::HostileRequest>& all_requests() {
  static const auto requests = testing::hostile_requests();
  return requests;
}

std::string refusal_of(const testing::HostileRequest& request, const ServedModel& served,
                       std::vector<CompletionRequest>* held = nullptr) {
  const auto endpoint = request.path == "/v1/completions" ? Endpoint::kText : Endpoint::kChat;
  try {
    auto read = read_request(request.body.dump(), endpoint, served);
    if (held) held->push_back(std::move(read));
    return "";
  } catch (const ApiError& error) {
    EXPECT_TRUE(error.status() == 400 || error.status() == 503) << request.name << ": " << error.what();
    return error.what();
  }
}

TEST(HostileRequests, AreRefusedOrStayWithinTheMemoryLimit) {
  const auto served = served_without_model();
  refusal_of(all_requests().at(9), served);  // makes the objects that exist once
  const int64_t before = testing::heap_bytes();
  std::vector<CompletionRequest> held;
  std::map<std::string, std::string> refusals;
  for (const auto& request : all_requests()) {
    refusals[request.name] = refusal_of(request, served, &held);
    EXPECT_LE(served.forms->bytes(), AnswerForms::kMostBytes) << request.name;
  }
  EXPECT_GT(held.size(), 15U);
  for (const char* as : {", completion", ", several choices", ", tool"}) {
    EXPECT_THAT(refusals[std::string("names of 500 bytes") + as], HasSubstr("the grammar takes over 4 MiB"));
    EXPECT_THAT(refusals[std::string("depth") + as], HasSubstr("at most 10000 schemas"));
    EXPECT_THAT(refusals[std::string("no value") + as], HasSubstr("no text that ends"));
    EXPECT_THAT(refusals[std::string("no end") + as], HasSubstr("no text that ends"));
    EXPECT_EQ(refusals[std::string("few lengths") + as], "");
    EXPECT_EQ(refusals[std::string("values") + as], "") << "a tree of 1 MB";
  }
  // All accepted requests generate at the same time, in slices as in an engine.
  constexpr int kRounds = 2, kSlices = 8;
  for (int round = 0; round < kRounds; ++round) {
    for (auto& request : held) {
      for (auto& choice : request.choices) {
        try {
          std::vector<int64_t> made;
          for (int slice = 0; slice < kSlices; ++slice) {
            if (!choice.options.constraint->prepare_allowed_tokens(made, 20'000)) continue;
            const auto allowed = choice.options.constraint->allowed(made);
            made.push_back(std::ranges::find(allowed, true) - allowed.begin());
          }
        } catch (const Error& error) {
          EXPECT_EQ(error.kind(), ErrorKind::kConfig);
        }
      }
      const auto counted = static_cast<int64_t>(served.forms->bytes());
      EXPECT_LE(counted, static_cast<int64_t>(AnswerForms::kMostBytes + held.size() * (size_t{4} << 20)));
      if (testing::kSanitized) continue;
      // Besides the grammars, the requests themselves take memory.
      EXPECT_LT(testing::heap_bytes() - before, counted * 5 / 4 + (int64_t{32} << 20));
    }
  }
  held.clear();
  EXPECT_LE(served.forms->bytes(), AnswerForms::kMostBytes / 2) << "what is kept for requests to come";
}

}  // namespace
}  // namespace tessera::serve
