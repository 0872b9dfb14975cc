// The pre-tokenizers of tokenizer.json: ByteLevel, Split, Digits, Metaspace, Punctuation, Whitespace, WhitespaceSplit,
// Sequence. They split the normalized text into pieces, which the BPE model encodes one by one.
//
//   PreTokenizer pre(file.root().find("pre_tokenizer"));
//   PreTokens tokens; tokens.start(text, origins, at_input_start);
//   pre.apply(tokens);
//   for (Span piece : tokens.pieces) model.encode(tokens.text.substr(...))
//
// Immutable, thread-safe; a PreTokens belongs to one thread at a time.
#pragma once

#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include "tessera/text/tokenizer/aligned_text.h"
#include "tessera/text/tokenizer/regex.h"
#include "tessera/text/tokenizer/tokenizer_file.h"

namespace tessera::text {

struct PreTokens {
  std::string_view text;          // borrowed from the caller, or from `storage` after a rewrite
  const Span* origins = nullptr;  // input byte range of each byte of `text`; null when not tracked
  std::vector<Span> pieces;       // byte ranges in `text`; none is empty
  bool at_input_start = false;    // the text begins where the input begins

  RegexScratch regex;
  AlignedText storage, building;
  std::vector<Span> cut, matches;

  void start(std::string_view whole, const Span* byte_origins, bool starts_input) {
    text = whole;
    origins = byte_origins;
    at_input_start = starts_input;
    pieces.clear();
    if (!whole.empty()) pieces.push_back({0, static_cast<uint32_t>(whole.size())});
  }
  std::string_view piece(Span span) const { return text.substr(span.begin, span.end - span.begin); }
  // A step that changes the text calls begin_rewrite(), appends the new text of each piece to `building` and its range
  // to `cut`, and calls end_rewrite().
  void begin_rewrite();
  void append_original(uint32_t begin, uint32_t end);
  void append_bytes(std::string_view bytes, uint32_t like_byte);  // with the origin of text[like_byte]
  void end_rewrite();
};

using PreTokenizerStep = std::function<void(PreTokens& tokens)>;

class PreTokenizer {
 public:
  explicit PreTokenizer(const std::optional<JsonReader>& node);  // nullopt: no steps
  void apply(PreTokens& tokens) const {
    for (const auto& step : steps_) step(tokens);
  }
  // True when the last step is ByteLevel. apply() then does not spell the bytes in the byte-level alphabet; the BPE
  // model reads raw bytes.
  bool byte_level() const { return byte_level_; }
  // True when a step needs to know whether a piece begins at position 0 of the input (Metaspace with "first"). The
  // token ids can then depend on whether PreTokens::origins is set.
  bool needs_origins() const { return needs_origins_; }

 private:
  void add(const JsonReader& node, bool last);
  std::vector<PreTokenizerStep> steps_;
  bool byte_level_ = false;
  bool needs_origins_ = false;
};

enum class PrependScheme { kAlways, kFirst, kNever };
// Reads Metaspace's "prepend_scheme", or the older key "add_prefix_space".
PrependScheme prepend_scheme(const JsonReader& metaspace);

}  // namespace tessera::text
