// Bodies of requests to `tessera serve`: the first byte says which endpoint.
#include <cstdint>
#include <string_view>

#include "tessera/serve/api_error.h"
#include "tessera/serve/requests.h"
#include "tests/cli/tiny_tokenizer.h"

namespace {

const tessera::serve::Served& served() {
  static const tessera::serve::Served model = [] {
    tessera::serve::Served made{
        .name = "tiny",
        .config = {},
        .defaults = {},
        .tokenizer = tessera::text::Tokenizer::from_json(
            tessera::testing::character_tokenizer("abcdefghijklmnopqrstuvwxyz .,:;!?()'-"), "test"),
        .chat = tessera::text::ChatTemplate::parse(
            "{% for m in messages %}{{ m.role }}: {{ m.content }}. {% endfor %}{% if tools %}tools{% endif %}", "test"),
        .cache_tokens = 4096};
    made.config.vocab_size = 37;
    made.config.max_position_embeddings = 256;
    return made;
  }();
  return model;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view body(reinterpret_cast<const char*>(data) + 1, size - 1);
  const auto endpoint = data[0] % 2 == 0 ? tessera::serve::Endpoint::kText : tessera::serve::Endpoint::kChat;
  try {
    tessera::serve::read_request(body, endpoint, served());
  } catch (const tessera::serve::ApiError& error) {
    if (error.status() < 400 || error.status() > 499) __builtin_trap();  // the client's fault
  }
  return 0;
}
