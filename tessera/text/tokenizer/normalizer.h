// The normalizers of tokenizer.json, which change the text before it is split into words: NFC, NFD, NFKC, NFKD,
// Prepend, Replace, Lowercase, Strip, StripAccents, Sequence.
//
//   Normalizer normalizer(file.root().find("normalizer"));
//   NormalizeScratch scratch;
//   normalizer.apply(aligned, scratch);
//
// The Unicode tables are newer than those of the `tokenizers` library: StripAccents, NFKC, NFKD and the order of
// combining marks differ on characters that were added after Unicode 9. Immutable, thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/text/tokenizer/aligned_text.h"
#include "tessera/text/tokenizer/regex.h"
#include "tessera/text/tokenizer/tokenizer_file.h"

namespace tessera::text {

struct NormalizeScratch {
  RegexScratch regex;
  AlignedText other;
  std::vector<Span> matches;

  // Clears `other`, copies text.tracked to it, and returns it. A NormalizerStep then writes the normalized text into
  // `other`.
  AlignedText& begin_other(const AlignedText& text) {
    other.clear();
    other.tracked = text.tracked;
    return other;
  }
};

using NormalizerStep = std::function<void(AlignedText& text, NormalizeScratch& scratch)>;

class Normalizer {
 public:
  explicit Normalizer(const std::optional<JsonReader>& node);  // nullopt: no steps
  bool empty() const { return steps_.empty(); }
  void apply(AlignedText& text, NormalizeScratch& scratch) const {
    for (const auto& step : steps_) step(text, scratch);
  }

 private:
  void add(const JsonReader& node);
  std::vector<NormalizerStep> steps_;
};

// A pattern of a Replace or Split step: {"String": ...} or {"Regex": ...}.
class TextPattern {
 public:
  static TextPattern from_json(const JsonReader& node);
  explicit TextPattern(std::string literal) : literal_(std::move(literal)) {}
  // Appends the byte ranges of all matches of the pattern in `text` to `matches`, in order and without overlap.
  void find_all(std::string_view text, RegexScratch& scratch, std::vector<Span>& matches) const;
  const Regex* regex() const { return regex_.get(); }

 private:
  TextPattern() = default;
  std::string literal_;
  std::shared_ptr<const Regex> regex_;
};

}  // namespace tessera::text
