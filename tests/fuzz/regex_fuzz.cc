// Fuzz target: a pattern up to the first newline, then the text that it splits. Matches must be in order and inside the
// text.
#include <cstdlib>

#include "tessera/base/error.h"
#include "tessera/base/text/utf8.h"
#include "tessera/text/tokenizer/regex.h"
#include "tests/fuzz/input_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tessera::text;
  const auto input = tessera::fuzz::text_of(data, size);
  const size_t newline = std::min(input.find('\n'), input.size());
  std::string text;
  tessera::append_lossy(input.substr(std::min(newline + 1, input.size())), text);
  try {
    const Regex regex(input.substr(0, newline), "fuzz");
    RegexScratch scratch;
    std::vector<Span> matches;
    regex.find_all(text, scratch, matches);
    uint32_t at = 0;
    for (const Span match : matches) {
      if (match.begin < at || match.end < match.begin || match.end > text.size()) std::abort();
      at = match.end;
    }
  } catch (const tessera::Error& error) {
    tessera::fuzz::check_message(error.what());
  }
  return 0;
}
