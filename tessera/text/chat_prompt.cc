#include "tessera/text/chat_prompt.h"

#include <algorithm>
#include <string>
#include <string_view>

#include "tessera/base/json.h"
#include "tessera/base/utf8.h"

namespace tessera::text {
namespace {

// Stands in rendered text behind the first character of what only looks like a special token. No character: Unicode
// keeps it for such uses, and text in which it comes has it from nobody.
constexpr std::string_view kMark = "\xEF\xB7\x90";  // U+FDD0
constexpr std::string_view kNoCharacter = "\xEF\xBF\xBD";

void replace_all(std::string& text, std::string_view what, std::string_view by) {
  for (size_t at = 0; (at = text.find(what, at)) != text.npos; at += by.size()) text.replace(at, what.size(), by);
}

// Marks every text in the value; true where one was marked.
bool mark_texts(Json& value, const Tokenizer& tokenizer) {
  bool marked = false;
  if (value.is_string()) {
    auto& text = value.get_ref<std::string&>();
    replace_all(text, kMark, kNoCharacter);
    std::vector<size_t> places;
    for (const auto& [begin, end] : tokenizer.special_tokens_in(text)) {
      const size_t inside = begin + utf8_length(text[begin]);
      if (inside < end) places.push_back(inside);
    }
    std::sort(places.begin(), places.end());
    places.erase(std::unique(places.begin(), places.end()), places.end());
    std::string with;
    size_t done = 0;
    for (const size_t place : places) {
      with.append(text, done, place - done).append(kMark);
      done = place;
    }
    if (places.empty()) return false;
    text = with.append(text, done);
    return true;
  }
  if (value.is_object()) {
    for (auto& [key, member] : value.items()) {
      if (key != "role") marked |= mark_texts(member, tokenizer);
    }
  } else if (value.is_array()) {
    for (auto& item : value) marked |= mark_texts(item, tokenizer);
  }
  return marked;
}

// Takes the marks out of the text; where they stood.
std::vector<size_t> take_marks(std::string& text) {
  std::vector<size_t> places;
  std::string without;
  size_t done = 0;
  for (size_t at = 0; (at = text.find(kMark, done)) != text.npos; done = at + kMark.size()) {
    without.append(text, done, at - done);
    places.push_back(without.size());
  }
  text = without.append(text, done);
  return places;
}

}  // namespace

std::vector<TokenId> chat_prompt(const ChatTemplate& chat, const Tokenizer& tokenizer, const Json& messages,
                                 const Json& extra) {
  auto safe = messages;
  const bool marked = mark_texts(safe, tokenizer);
  auto text = chat.render(safe, /*add_generation_prompt=*/true, extra).text;
  const auto barriers = marked ? take_marks(text) : std::vector<size_t>();
  return tokenizer.encode(text, {.add_special_tokens = false, .barriers = barriers});
}

}  // namespace tessera::text
