// Fuzz target: any bytes as tokenizer_config.json beside a small tokenizer. The special tokens and the chat template
// are read and used, or refused.
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/text/chat/chat_template.h"
#include "tessera/text/tokenizer.h"
#include "tests/fuzz/input_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tessera::text;
  const auto& folder = tessera::fuzz::input_folder();
  static const bool once = [&] {
    folder.put("tokenizer.json",
               R"({"added_tokens": [{"id": 3, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": true}],
                   "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}})");
    return true;
  }();
  static_cast<void>(once);
  folder.put("tokenizer_config.json", tessera::fuzz::text_of(data, size));
  try {
    Tokenizer::from_folder(folder.path()).encode("abba");
  } catch (const tessera::Error& error) {
    tessera::fuzz::check_message(error.what());
  }
  try {
    const nlohmann::ordered_json messages = {{{"role", "user"}, {"content", "ab"}}};
    const auto chat = ChatTemplate::from_folder(folder.path());
    if (chat && size < 4096) chat->render(messages, true);
  } catch (const tessera::Error& error) {
    tessera::fuzz::check_message(error.what());
  }
  return 0;
}
