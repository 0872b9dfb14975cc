// Hand-written matchers for the split patterns of most byte-level tokenizers: those of GPT-2, Llama 3 and Qwen 2. They
// split a text exactly as the regular expression does, and faster. In these patterns every character is in a match.
//
//   if (auto kind = known_pattern(regex)) split_words(*kind, text, 0, text.size(), pieces);
//
// Thread-safe.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "tessera/text/tokenizer/aligned_text.h"

namespace tessera::text {

enum class WordPattern { kGpt2, kLlama3, kQwen2 };

std::string_view pattern_text(WordPattern kind);                   // the regular expression
std::optional<WordPattern> known_pattern(std::string_view regex);  // the pattern with exactly this text
// Appends the words of text[begin, end) as spans of `text`, which is valid UTF-8.
void split_words(WordPattern kind, std::string_view text, uint32_t begin, uint32_t end, std::vector<Span>& pieces);

}  // namespace tessera::text
