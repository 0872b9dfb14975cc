// Fuzz target: tokenizer.json and a text. The input up to the first zero byte is the file; the rest is encoded with
// this tokenizer. Checks the properties of every file: the two encoders agree, offsets lie in the text, decoding gives
// UTF-8, and streamed text is the same.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "tessera/base/error.h"
#include "tessera/base/text/utf8.h"
#include "tessera/text/tokenizer.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

void exercise(const tessera::text::Tokenizer& tokenizer, std::string_view text) {
  using namespace tessera::text;
  const auto ids = tokenizer.encode(text);
  const auto encoding = tokenizer.encode_with_offsets(text);
  require(ids == encoding.ids && ids.size() == encoding.offsets.size());
  for (const auto& [begin, end] : encoding.offsets) require(begin <= end && end <= text.size());
  require(tessera::is_valid_utf8(tokenizer.decode(ids)));
  StreamDecoder stream(tokenizer);
  for (size_t i = 0; i < ids.size() && i < 32; ++i) require(tessera::is_valid_utf8(stream.push(ids[i])));
  require(tessera::is_valid_utf8(stream.finish()));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t zero = input.find('\0');
  try {
    const auto tokenizer = tessera::text::Tokenizer::from_json(input.substr(0, zero), "fuzz");
    exercise(tokenizer, "Hello w\xC3\xB6rld  '\xFFs 123\n");
    if (zero != std::string_view::npos) exercise(tokenizer, input.substr(zero + 1));
  } catch (const tessera::Error&) {
    // the expected result for an invalid file
  }
  return 0;
}
