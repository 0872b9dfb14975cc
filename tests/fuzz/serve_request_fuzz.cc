// Fuzz target: bodies of requests to `tessera serve`. The first byte chooses the endpoint. If the request has a
// grammar, the first tokens of an answer are generated.
#include <algorithm>
#include <cstdint>
#include <string_view>

#include "tessera/base/error.h"
#include "tessera/serve/api_error.h"
#include "tessera/serve/requests.h"
#include "tests/cli/tiny_tokenizer.h"

namespace {

const tessera::serve::ServedModel& served() {
  static const tessera::serve::ServedModel model = [] {
    tessera::serve::ServedModel made{
        .name = "tiny",
        .config = {},
        .defaults = {},
        .tokenizer = tessera::text::Tokenizer::from_json(
            tessera::testing::character_tokenizer("abcdefghijklmnopqrstuvwxyz .{}[]\":,1_"), "test"),
        .chat = tessera::text::ChatTemplate::parse(
            "{% for m in messages %}{{ m.role }}: {{ m.content }}. {% endfor %}{% if tools %}tools{% endif %}", "test"),
        .cache_tokens = 4096};
    made.config.vocab_size = 37;
    made.config.max_position_embeddings = made.config.context_tokens = 256;
    return made;
  }();
  return model;
}

// Chooses an allowed token, up to kTokens times, until the constraint is complete.
void begin(tessera::text::TokenConstraint& constraint) {
  constexpr size_t kTokens = 24;
  std::vector<int64_t> made;
  try {
    while (made.size() < kTokens && !constraint.complete(made)) {
      const auto allowed = constraint.allowed(made);
      made.push_back(std::find(allowed.rbegin(), allowed.rend(), true).base() - allowed.begin() - 1);
    }
  } catch (const tessera::Error& error) {
    if (error.kind() != tessera::ErrorKind::kConfig) __builtin_trap();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view body(reinterpret_cast<const char*>(data) + 1, size - 1);
  const auto endpoint = data[0] % 2 == 0 ? tessera::serve::Endpoint::kText : tessera::serve::Endpoint::kChat;
  try {
    const auto request = tessera::serve::read_request(body, endpoint, served());
    if (!request.choices.empty() && request.choices[0].options.constraint) {
      begin(*request.choices[0].options.constraint);
    }
  } catch (const tessera::serve::ApiError& error) {
    if (error.status() < 400 || error.status() > 499) __builtin_trap();  // the client's fault
  }
  return 0;
}
