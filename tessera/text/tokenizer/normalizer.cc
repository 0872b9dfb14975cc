#include "tessera/text/tokenizer/normalizer.h"

#include <utf8proc.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/text/tokenizer/unicode.h"

namespace tessera::text {
namespace {

// NFC, NFD, NFKC and NFKD, by utf8proc. The `tokenizers` library normalizes the whole text; here each cluster (see
// operator()) is normalized alone. The result is the same, because no character combines with a character of another
// cluster.
class UnicodeForm {
 public:
  UnicodeForm(bool compose, bool compatibility)
      : compose_(compose),
        compatibility_(compatibility),
        options_(static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_DECOMPOSE |
                                                (compatibility ? UTF8PROC_COMPAT : 0))) {}

  // A cluster starts at a character that cannot join the character before it. Clusters that the form cannot change are
  // copied; for NFC these are the clusters without a kNfcUnsafe character.
  void operator()(AlignedText& text, NormalizeScratch& scratch) const {
    const CharTable& table = char_table();
    const std::string& in = text.text;
    if (!needs_work(in, table)) return;
    AlignedText& out = scratch.begin_other(text);
    std::vector<DecomposedCharacter> parts;
    for (size_t begin = 0; begin < in.size();) {
      size_t end = begin;
      bool changes = false;
      do {
        const auto c = decode_utf8(in.data() + end);
        changes |= changes_alone(c.code, table);
        end += c.length;
      } while (end < in.size() && joins_before(decode_utf8(in.data() + end).code, table));
      if (changes) {
        normalize_cluster(text, begin, end, parts, out);
      } else {
        out.append(text, begin, end);
      }
      begin = end;
    }
    std::swap(text, out);
  }

 private:
  bool changes_alone(uint32_t code, const CharTable& table) const {
    if (code < 0x80) return false;
    if (compose_ && !compatibility_) return char_class(table, code) & kNfcUnsafe;
    return true;
  }
  bool needs_work(const std::string& text, const CharTable& table) const {
    for (size_t i = 0; i < text.size();) {
      const auto c = decode_utf8(text.data() + i);
      if (changes_alone(c.code, table)) return true;
      i += c.length;
    }
    return false;
  }
  // Whether the first character of the decomposition of `code` may combine with the character before it.
  bool joins_before(uint32_t code, const CharTable& table) const {
    if (code < 0x80) return false;
    if (compose_ && !compatibility_ && !(char_class(table, code) & kNfcUnsafe)) return false;
    utf8proc_int32_t parts[32];
    int boundary = 0;
    const auto count = utf8proc_decompose_char(static_cast<utf8proc_int32_t>(code), parts, 32, options_, &boundary);
    return count > 0 && (char_class(table, static_cast<uint32_t>(parts[0])) & kNfcUnsafe);
  }
  struct DecomposedCharacter {
    utf8proc_int32_t code;
    uint8_t combining_class;
    uint32_t sources;  // input characters that it replaces: 1 for the first part of a decomposition, 0 for the others
  };

  // Decomposes, orders and composes the characters of one cluster (see operator()). Each output character gets an
  // origin, which is a byte range of the tokenizer's input. Origins follow the `tokenizers` library: an output
  // character that replaces n > 0 input characters has the origin of the first of these; an output character that
  // replaces none has the origin of the previous input character.
  void normalize_cluster(const AlignedText& text, size_t begin, size_t end, std::vector<DecomposedCharacter>& parts,
                         AlignedText& out) const {
    parts.clear();
    for (size_t at = begin; at < end; at += utf8_length(text.text[at])) {
      utf8proc_int32_t codes[32];
      int boundary = 0;
      const auto code = static_cast<utf8proc_int32_t>(decode_utf8(text.text.data() + at).code);
      const auto count = utf8proc_decompose_char(code, codes, 32, options_, &boundary);
      TESSERA_CHECK(count >= 0 && count <= 32, ErrorKind::kInternal,
                    "[text.encode] U+{:04X} decomposes into {} characters", code, count);
      for (utf8proc_ssize_t i = 0; i < count; ++i) {
        const auto combining = static_cast<uint8_t>(utf8proc_get_property(codes[i])->combining_class);
        parts.push_back({codes[i], combining, i == 0 ? 1u : 0u});
      }
    }
    order_marks(parts);
    if (compose_) compose(parts);
    std::string character;
    size_t cursor = begin, previous = begin;  // the next input character, and the input character before it
    for (const DecomposedCharacter& part : parts) {
      character.clear();
      append_utf8(static_cast<uint32_t>(part.code), character);
      out.append(character, text.origin(part.sources > 0 ? cursor : previous));
      for (uint32_t i = 0; i < part.sources && cursor < end; ++i) {
        previous = cursor;
        cursor += utf8_length(text.text[cursor]);
      }
      if (cursor == end) cursor = previous;
    }
  }

  // Unicode's canonical ordering: sorts each run of combining marks by combining class, and keeps equal classes in
  // order.
  static void order_marks(std::vector<DecomposedCharacter>& parts) {
    for (auto at = parts.begin(); at != parts.end();) {
      const auto is_starter = [](const DecomposedCharacter& part) { return part.combining_class == 0; };
      const auto first = std::find_if_not(at, parts.end(), is_starter);
      at = std::find_if(first, parts.end(), is_starter);
      std::stable_sort(first, at, [](const DecomposedCharacter& a, const DecomposedCharacter& b) {
        return a.combining_class < b.combining_class;
      });
    }
  }

  // Unicode's canonical composition: a character is merged into the last starter if the two have a composition and no
  // kept character between them has the same or a higher combining class.
  static void compose(std::vector<DecomposedCharacter>& parts) {
    constexpr size_t kNone = ~size_t{0};
    size_t starter = kNone, kept = 0;
    int last_class = -1;  // combining class of the last kept character after the starter; -1: there is none
    for (const DecomposedCharacter part : parts) {
      if (starter != kNone && last_class < static_cast<int>(part.combining_class)) {
        utf8proc_int32_t pair[2] = {parts[starter].code, part.code};
        if (utf8proc_normalize_utf32(pair, 2, static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE)) ==
            1) {
          parts[starter].code = pair[0];
          parts[starter].sources += part.sources;
          continue;
        }
      }
      parts[kept] = part;
      if (part.combining_class == 0) {
        starter = kept;
        last_class = -1;
      } else {
        last_class = part.combining_class;
      }
      ++kept;
    }
    parts.resize(kept);
  }

  bool compose_, compatibility_;
  utf8proc_option_t options_;
};

NormalizerStep prepend(std::string prefix) {
  return [prefix = std::move(prefix)](AlignedText& text, NormalizeScratch&) {
    if (text.text.empty()) return;
    check_text_size(text.text.size() + prefix.size());
    text.text.insert(0, prefix);
    if (text.tracked) text.origins.insert(text.origins.begin(), prefix.size(), text.origins.front());
  };
}

// Each byte of a replacement gets the origin (AlignedText::origins: a byte range of the input) of the last byte of the
// replaced match.
NormalizerStep replace(TextPattern pattern, std::string content) {
  return [pattern = std::move(pattern), content = std::move(content)](AlignedText& text, NormalizeScratch& scratch) {
    scratch.matches.clear();
    pattern.find_all(text.text, scratch.regex, scratch.matches);
    if (scratch.matches.empty()) return;
    check_text_size(text.text.size() + scratch.matches.size() * content.size());
    AlignedText& out = scratch.begin_other(text);
    size_t at = 0;
    for (const Span match : scratch.matches) {
      out.append(text, at, match.begin);
      const size_t last = match.end > 0 ? match.end - 1 : 0;
      out.append(content, text.text.empty() ? Span{0, 0} : text.origin(last));
      at = match.end;
    }
    out.append(text, at, text.text.size());
    std::swap(text, out);
  };
}

// A step that rewrites each character: append(code, text, span, out) appends to `out` the replacement of the character
// `code` at `span` of `text`.
template <class Append>
NormalizerStep rewrite_characters(Append append) {
  return [append](AlignedText& text, NormalizeScratch& scratch) {
    AlignedText& out = scratch.begin_other(text);
    for (size_t at = 0; at < text.text.size();) {
      const auto c = decode_utf8(text.text.data() + at);
      append(c.code, text, Span{static_cast<uint32_t>(at), static_cast<uint32_t>(at + c.length)}, out);
      at += c.length;
    }
    std::swap(text, out);
  };
}

void append_lower(uint32_t code, const AlignedText& text, Span span, AlignedText& out) {
  std::string lower;
  if (code == 0x130) {
    lower = "i\xCC\x87";  // the one character with a longer lower case
  } else {
    append_utf8(static_cast<uint32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(code))), lower);
  }
  out.append(lower, text.origin(span.begin));
}

void append_unless_mark(uint32_t code, const AlignedText& text, Span span, AlignedText& out) {
  if (!(char_class(code) & kMark)) out.append(text, span.begin, span.end);
}

NormalizerStep strip(bool left, bool right) {
  return [left, right](AlignedText& text, NormalizeScratch&) {
    const std::string& in = text.text;
    size_t begin = 0, end = in.size();
    const auto is_space = [&](size_t at) { return char_class(decode_utf8(in.data() + at).code) & kSpace; };
    while (left && begin < end && is_space(begin)) begin += utf8_length(in[begin]);
    while (right && begin < end) {
      const auto last = static_cast<size_t>(previous_char(in.data() + end) - in.data());
      if (!is_space(last)) break;
      end = last;
    }
    text.text.erase(end).erase(0, begin);
    if (!text.tracked) return;
    text.origins.erase(text.origins.begin() + static_cast<ptrdiff_t>(end), text.origins.end());
    text.origins.erase(text.origins.begin(), text.origins.begin() + static_cast<ptrdiff_t>(begin));
  };
}

}  // namespace

Normalizer::Normalizer(const std::optional<JsonReader>& node) {
  if (node) add(*node);
}

void Normalizer::add(const JsonReader& node) {
  const std::string type = node.string("type");
  const auto form = [&](bool compose, bool compatibility) { steps_.push_back(UnicodeForm(compose, compatibility)); };
  if (type == "NFC") {
    form(true, false);
  } else if (type == "NFD") {
    form(false, false);
  } else if (type == "NFKC") {
    form(true, true);
  } else if (type == "NFKD") {
    form(false, true);
  } else if (type == "Prepend") {
    steps_.push_back(prepend(node.string("prepend")));
  } else if (type == "Replace") {
    steps_.push_back(replace(TextPattern::from_json(node.at("pattern")), node.string("content")));
  } else if (type == "Lowercase") {
    steps_.push_back(rewrite_characters(append_lower));
  } else if (type == "Strip") {
    steps_.push_back(strip(node.boolean("strip_left"), node.boolean("strip_right")));
  } else if (type == "StripAccents") {
    steps_.push_back(rewrite_characters(append_unless_mark));
  } else if (type == "Sequence") {
    for (const auto& item : node.at("normalizers").items()) add(item);
  } else {
    node.at("type").fail(
        "a supported normalizer: NFC, NFD, NFKC, NFKD, Prepend, Replace, Lowercase, Strip, StripAccents, Sequence");
  }
}

TextPattern TextPattern::from_json(const JsonReader& node) {
  TextPattern pattern;
  if (node.has("Regex")) {
    pattern.regex_ = std::make_shared<const Regex>(node.string("Regex"), node.name());
  } else if (node.has("String")) {
    pattern.literal_ = node.string("String");
  } else {
    node.fail("neither String nor Regex", "one of them");
  }
  return pattern;
}

void TextPattern::find_all(std::string_view text, RegexScratch& scratch, std::vector<Span>& matches) const {
  if (regex_) return regex_->find_all(text, scratch, matches);
  if (literal_.empty()) return;
  for (size_t at = text.find(literal_); at != std::string_view::npos; at = text.find(literal_, at + literal_.size())) {
    matches.push_back({static_cast<uint32_t>(at), static_cast<uint32_t>(at + literal_.size())});
  }
}

}  // namespace tessera::text
