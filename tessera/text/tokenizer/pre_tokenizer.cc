#include "tessera/text/tokenizer/pre_tokenizer.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/text/tokenizer/byte_level.h"
#include "tessera/text/tokenizer/normalizer.h"
#include "tessera/text/tokenizer/unicode.h"
#include "tessera/text/tokenizer/word_splitter.h"

namespace tessera::text {
namespace {

enum class Behavior { kIsolated, kRemoved, kMergedWithPrevious, kMergedWithNext, kContiguous };

Behavior behavior_from(const std::string& name, const JsonReader& node) {
  if (name == "Isolated") return Behavior::kIsolated;
  if (name == "Removed") return Behavior::kRemoved;
  if (name == "MergedWithPrevious") return Behavior::kMergedWithPrevious;
  if (name == "MergedWithNext") return Behavior::kMergedWithNext;
  if (name == "Contiguous") return Behavior::kContiguous;
  node.at("behavior").fail("Isolated, Removed, MergedWithPrevious, MergedWithNext or Contiguous");
}

// Splits `piece` at the matches, whose byte positions are relative to the begin of the piece, and appends the result to
// `pieces`. `behavior` is the SplitDelimiterBehavior of the `tokenizers` library: it keeps a match as a piece, drops
// it, or joins it with a neighbour. `invert` exchanges matches and the text between them. Empty pieces are removed
// last, because an empty match still decides how its neighbours join.
void append_pieces(Behavior behavior, bool invert, Span piece, const std::vector<Span>& matches,
                   std::vector<Span>& pieces) {
  if (matches.empty() && !invert) {
    pieces.push_back(piece);
    return;
  }
  const size_t first = pieces.size();
  bool previous_match = false;
  const auto add = [&](Span span, bool is_match) {
    is_match ^= invert;
    if (is_match && behavior == Behavior::kRemoved) return;
    bool joins = false;
    if (behavior == Behavior::kMergedWithPrevious) joins = is_match && !previous_match;
    // With kMergedWithNext a match is joined with the text after the match, unless another match follows at once.
    if (behavior == Behavior::kMergedWithNext) joins = !is_match && previous_match;
    if (behavior == Behavior::kContiguous) joins = is_match == previous_match;
    if (joins && pieces.size() > first) {
      pieces.back().end = span.end;
    } else {
      pieces.push_back(span);
    }
    previous_match = is_match;
  };
  uint32_t at = piece.begin;
  for (const Span match : matches) {
    if (piece.begin + match.begin != at) add({at, piece.begin + match.begin}, false);
    add({piece.begin + match.begin, piece.begin + match.end}, true);
    at = piece.begin + match.end;
  }
  if (at != piece.end) add({at, piece.end}, false);
  const auto empty = [](const Span& span) { return span.begin == span.end; };
  pieces.erase(std::remove_if(pieces.begin() + static_cast<ptrdiff_t>(first), pieces.end(), empty), pieces.end());
}

// A step that splits each piece: cut(tokens, piece) appends the new pieces to tokens.cut.
template <class Cut>
PreTokenizerStep cut_pieces(Cut cut) {
  return [cut = std::move(cut)](PreTokens& tokens) {
    tokens.cut.clear();
    for (const Span piece : tokens.pieces) cut(tokens, piece);
    std::swap(tokens.pieces, tokens.cut);
  };
}

// A step that rewrites each piece: append(tokens, piece) appends the new text of the piece to tokens.building.
template <class Append>
PreTokenizerStep rewrite_pieces(Append append) {
  return [append = std::move(append)](PreTokens& tokens) {
    tokens.begin_rewrite();
    for (const Span piece : tokens.pieces) {
      const auto begin = static_cast<uint32_t>(tokens.building.text.size());
      append(tokens, piece);
      tokens.cut.push_back({begin, static_cast<uint32_t>(tokens.building.text.size())});
    }
    tokens.end_rewrite();
  };
}

PreTokenizerStep split_known_words(WordPattern pattern) {
  return cut_pieces([pattern](PreTokens& tokens, Span piece) {
    split_words(pattern, tokens.text, piece.begin, piece.end, tokens.cut);
  });
}

// Known patterns use the hand-written matcher. It returns every piece of the text, which is what "Isolated" keeps.
PreTokenizerStep split_pattern(TextPattern pattern, Behavior behavior, bool invert) {
  if (pattern.regex() && behavior == Behavior::kIsolated) {
    if (const auto known = known_pattern(pattern.regex()->pattern())) return split_known_words(*known);
  }
  return cut_pieces([pattern = std::move(pattern), behavior, invert](PreTokens& tokens, Span piece) {
    tokens.matches.clear();
    pattern.find_all(tokens.piece(piece), tokens.regex, tokens.matches);
    append_pieces(behavior, invert, piece, tokens.matches, tokens.cut);
  });
}

// Splits at characters of the given classes; each such character is one match.
PreTokenizerStep split_class(uint8_t classes, Behavior behavior) {
  return cut_pieces([classes, behavior, &table = char_table()](PreTokens& tokens, Span piece) {
    tokens.matches.clear();
    for (uint32_t at = piece.begin; at < piece.end;) {
      const auto c = decode_utf8(tokens.text.data() + at);
      if (char_class(table, c.code) & classes) {
        tokens.matches.push_back({at - piece.begin, at - piece.begin + c.length});
      }
      at += c.length;
    }
    append_pieces(behavior, false, piece, tokens.matches, tokens.cut);
  });
}

// Keeps the matches of \w+|[^\w\s]+ as pieces and drops the whitespace between them.
PreTokenizerStep split_whitespace() {
  enum { kGap, kWordRun, kSignRun };
  return cut_pieces([](PreTokens& tokens, Span piece) {
    int previous = kGap;
    for (uint32_t at = piece.begin; at < piece.end;) {
      const auto c = decode_utf8(tokens.text.data() + at);
      const uint8_t classes = char_class(c.code);
      const int kind = classes & kWord ? kWordRun : classes & kSpace ? kGap : kSignRun;
      if (kind != kGap && kind == previous) {
        tokens.cut.back().end += c.length;
      } else if (kind != kGap) {
        tokens.cut.push_back({at, at + c.length});
      }
      previous = kind;
      at += c.length;
    }
  });
}

// Adds a space in front of each piece that has none; the text is not copied when every piece has one.
PreTokenizerStep prefix_space() {
  const auto has_space = [](const PreTokens& tokens, Span piece) { return tokens.text[piece.begin] == ' '; };
  const auto prefix = rewrite_pieces([has_space](PreTokens& tokens, Span piece) {
    if (!has_space(tokens, piece)) tokens.append_bytes(" ", piece.begin);
    tokens.append_original(piece.begin, piece.end);
  });
  return [has_space, prefix](PreTokens& tokens) {
    if (!std::ranges::all_of(tokens.pieces, [&](Span piece) { return has_space(tokens, piece); })) prefix(tokens);
  };
}

PreTokenizerStep spell_bytes() {
  return rewrite_pieces([&alphabet = byte_alphabet()](PreTokens& tokens, Span piece) {
    for (uint32_t at = piece.begin; at < piece.end; ++at) {
      tokens.append_bytes(alphabet.utf8_of[static_cast<unsigned char>(tokens.text[at])], at);
    }
  });
}

// Returns whether Metaspace prepends its replacement character to `piece`. PrependScheme::kFirst prepends the character
// only to the piece at the beginning of the input. If PreTokens::origins is set, this is a piece whose first byte comes
// from input position 0. Otherwise it is the first piece of the text, provided that PreTokens::at_input_start is true.
bool prepends(PrependScheme scheme, const PreTokens& tokens, Span piece) {
  if (scheme != PrependScheme::kFirst) return scheme == PrependScheme::kAlways;
  if (tokens.origins) return tokens.origins[piece.begin].begin == 0;
  return tokens.at_input_start && piece.begin == 0;
}

// Metaspace without its split: spaces become `replacement`. A `replacement` is prepended if the scheme asks for it and
// the piece does not begin with a space or with `replacement`.
PreTokenizerStep replace_spaces(const std::string& replacement, PrependScheme scheme) {
  return rewrite_pieces([replacement, scheme](PreTokens& tokens, Span piece) {
    const std::string_view whole = tokens.piece(piece);
    if (prepends(scheme, tokens, piece) && whole[0] != ' ' && !whole.starts_with(replacement)) {
      tokens.append_bytes(replacement, piece.begin);
    }
    for (uint32_t at = piece.begin; at < piece.end;) {
      const size_t space = tokens.text.substr(0, piece.end).find(' ', at);
      const uint32_t stop = space == std::string_view::npos ? piece.end : static_cast<uint32_t>(space);
      tokens.append_original(at, stop);
      if (stop < piece.end) tokens.append_bytes(replacement, stop);
      at = stop + 1;
    }
  });
}

}  // namespace

void PreTokens::begin_rewrite() {
  building.clear();
  building.tracked = origins != nullptr;
  cut.clear();
}

void PreTokens::append_original(uint32_t begin, uint32_t end) {
  building.append(piece({begin, end}), origins ? origins + begin : nullptr);
}

void PreTokens::append_bytes(std::string_view bytes, uint32_t like_byte) {
  building.append(bytes, origins ? origins[like_byte] : Span{0, 0});
}

void PreTokens::end_rewrite() {
  std::swap(storage, building);
  std::swap(pieces, cut);
  text = storage.text;
  if (origins) origins = storage.origins.data();
}

PrependScheme prepend_scheme(const JsonReader& metaspace) {
  if (!metaspace.has("prepend_scheme")) {
    return metaspace.boolean("add_prefix_space", true) ? PrependScheme::kAlways : PrependScheme::kNever;
  }
  const std::string name = metaspace.string("prepend_scheme");
  if (name == "always") return PrependScheme::kAlways;
  if (name == "first") return PrependScheme::kFirst;
  if (name == "never") return PrependScheme::kNever;
  metaspace.at("prepend_scheme").fail("always, first or never");
}

PreTokenizer::PreTokenizer(const std::optional<JsonReader>& node) {
  if (node) add(*node, true);
}

void PreTokenizer::add(const JsonReader& node, bool last) {
  const std::string type = node.string("type");
  const auto classes = [&](uint8_t split_classes, Behavior behavior) {
    steps_.push_back(split_class(split_classes, behavior));
  };
  if (type == "Sequence") {
    const auto items = node.at("pretokenizers").items();
    for (size_t i = 0; i < items.size(); ++i) add(items[i], last && i + 1 == items.size());
  } else if (type == "ByteLevel") {
    if (node.boolean("add_prefix_space")) steps_.push_back(prefix_space());
    if (node.boolean("use_regex", true)) steps_.push_back(split_known_words(WordPattern::kGpt2));
    byte_level_ = last;
    if (!last) steps_.push_back(spell_bytes());  // later steps read the text in the byte-level alphabet
  } else if (type == "Split") {
    steps_.push_back(split_pattern(TextPattern::from_json(node.at("pattern")),
                                   behavior_from(node.string("behavior"), node), node.boolean("invert")));
  } else if (type == "Digits") {
    classes(kNumber, node.boolean("individual_digits", false) ? Behavior::kIsolated : Behavior::kContiguous);
  } else if (type == "Punctuation") {
    classes(kPunctuation, behavior_from(node.string("behavior", "Isolated"), node));
  } else if (type == "WhitespaceSplit") {
    classes(kSpace, Behavior::kRemoved);
  } else if (type == "Whitespace") {
    steps_.push_back(split_whitespace());
  } else if (type == "Metaspace") {
    const PrependScheme scheme = prepend_scheme(node);
    needs_origins_ |= scheme == PrependScheme::kFirst;
    std::string replacement;
    append_utf8(character_of(node, "replacement"), replacement);
    steps_.push_back(replace_spaces(replacement, scheme));
    if (node.boolean("split", true)) {
      steps_.push_back(split_pattern(TextPattern(replacement), Behavior::kMergedWithNext, /*invert=*/false));
    }
  } else {
    node.at("type").fail(
        "a supported pre-tokenizer: ByteLevel, Split, Digits, Metaspace, Punctuation, Whitespace, WhitespaceSplit, "
        "Sequence");
  }
}

}  // namespace tessera::text
