#include "tessera/text/tokenizer/post_processor.h"

#include <algorithm>
#include <limits>
#include <unordered_map>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/text/tokenizer/unicode.h"

namespace tessera::text {
namespace {

constexpr uint32_t kSpelledSpace = 0x120;  // the space in the byte-level alphabet

bool counts_as_space(uint32_t code) { return code == kSpelledSpace || (char_class(code) & kSpace); }

bool is_tail(char c) { return (static_cast<unsigned char>(c) & 0xC0) == 0x80; }

// Whether text[0, end) has at least `count` characters.
bool has_chars(std::string_view text, size_t end, size_t count) {
  for (size_t at = 0; at < end && count > 0; ++at) count -= !is_tail(text[at]);
  return count == 0;
}

// Removes the spaces of a token from its offsets, like the `tokenizers` library: the range becomes shorter by one
// character for each space at the beginning or end of the token's string. The library counts characters; the offsets
// here are bytes, so the loops move by whole UTF-8 characters.
void trim(std::string_view text, Offsets& offsets, const std::vector<int32_t>& ids, bool add_prefix_space,
          const std::function<const std::string&(int32_t)>& token_of) {
  for (size_t i = 0; i < ids.size(); ++i) {
    const std::string& token = token_of(ids[i]);
    auto& [begin, end] = offsets[i];
    size_t leading = 0, trailing = 0;
    for (size_t at = 0; at < token.size() && counts_as_space(decode_utf8(token.data() + at).code); ++leading) {
      at += utf8_length(token[at]);
    }
    for (const char* p = token.data() + token.size(); p > token.data(); ++trailing) {
      p = previous_char(p);
      if (!counts_as_space(decode_utf8(p).code)) break;
    }
    if (leading > 0) {
      const bool is_first = i == 0 || begin == 0;
      if (is_first && add_prefix_space && leading == 1) leading = 0;
      for (; leading > 0 && begin < end; --leading) {
        do ++begin;
        while (begin < end && is_tail(text[begin]));
      }
    }
    if (trailing == 0 || !has_chars(text, end, trailing)) continue;
    for (; trailing > 0 && end > begin; --trailing) {
      do --end;
      while (end > begin && is_tail(text[end]));
    }
  }
}

}  // namespace

PostProcessor::PostProcessor(const std::optional<JsonReader>& node) {
  if (node) add(*node);
}

void PostProcessor::add(const JsonReader& node) {
  const std::string type = node.string("type");
  if (type == "Sequence") {
    for (const auto& item : node.at("processors").items()) add(item);
  } else if (type == "ByteLevel") {
    Stage stage;
    stage.trims = true;
    stage.add_prefix_space = node.boolean("add_prefix_space");
    if (node.boolean("trim_offsets")) stages_.push_back(std::move(stage));
  } else if (type == "TemplateProcessing") {
    stages_.push_back(read_template(node));
  } else {
    node.at("type").fail("a supported post-processor: TemplateProcessing, ByteLevel, Sequence");
  }
}

// Reads the "single" template: the ids before and after the text, which is the piece "Sequence A". Templates for pairs
// of texts are not read.
PostProcessor::Stage PostProcessor::read_template(const JsonReader& node) {
  Stage stage;
  bool text_seen = false;
  std::unordered_map<std::string, JsonReader> special;
  for (auto& [name, token] : node.at("special_tokens").members()) special.emplace(name, std::move(token));
  for (const auto& piece : node.at("single").items()) {
    if (piece.has("Sequence")) {
      const std::string id = piece.at("Sequence").string("id");
      if (id != "A" || text_seen) piece.fail("sequence " + quote(id) + (text_seen ? " again" : ""), "sequence A once");
      text_seen = true;
      continue;
    }
    const std::string id = piece.at("SpecialToken").string("id");
    const auto found = special.find(id);
    if (found == special.end()) node.at("special_tokens").fail("no token " + quote(id), "one");
    for (const auto& value : found->second.at("ids").items()) {
      const uint64_t token = value.as_unsigned();
      if (token > static_cast<uint64_t>(std::numeric_limits<int32_t>::max())) {
        value.fail("id " + std::to_string(token), "less than 2^31");
      }
      (text_seen ? stage.after : stage.before).push_back(static_cast<int32_t>(token));
    }
  }
  if (!text_seen) node.at("single").fail("no sequence A", "one");
  return stage;
}

void PostProcessor::apply(bool add_special_tokens, std::string_view text, std::vector<int32_t>& ids, Offsets* offsets,
                          const std::function<const std::string&(int32_t)>& token_of) const {
  for (const Stage& stage : stages_) {
    if (stage.trims) {
      if (offsets) trim(text, *offsets, ids, stage.add_prefix_space, token_of);
      continue;
    }
    if (!add_special_tokens) continue;
    ids.insert(ids.begin(), stage.before.begin(), stage.before.end());
    ids.insert(ids.end(), stage.after.begin(), stage.after.end());
    if (!offsets) continue;
    offsets->insert(offsets->begin(), stage.before.size(), {0, 0});
    offsets->insert(offsets->end(), stage.after.size(), {0, 0});
  }
}

}  // namespace tessera::text
