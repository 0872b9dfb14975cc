#include "tessera/text/chat/chat_prompt.h"

#include <algorithm>
#include <string>
#include <string_view>

#include "tessera/base/text/json.h"
#include "tessera/base/text/utf8.h"
#include "tessera/text/chat/chat_messages.h"
#include "tessera/text/jinja/marks.h"

namespace tessera::text {
namespace {

// The marks around a string in user input that looks like a control token. The template engine compares and strips
// texts as if they had no marks (jinja/marks.h).
constexpr std::string_view kBegin = "\xEF\xB7\x90";  // U+FDD0
constexpr std::string_view kEnd = "\xEF\xB7\x91";    // U+FDD1
constexpr std::string_view kNoCharacter = "\xEF\xBF\xBD";

// Puts marks around the strings of control tokens in values that a client sends. The marks pass through the template,
// so remove_marks() finds in the rendered text which strings came from the client and which from the template.
class ControlTokenMarker {
 public:
  ControlTokenMarker(const ChatTemplate& chat, const Tokenizer& tokenizer) : chat_(chat), tokenizer_(tokenizer) {}

  // Puts marks around the control tokens in every string of the value, including the keys of objects.
  void mark(Json& value) {
    if (value.is_string()) {
      value = marked(value.get_ref<const std::string&>());
    } else if (value.is_array()) {
      for (auto& item : value) mark(item);
    } else if (value.is_object()) {
      Json::object_t object;
      object.reserve(value.size());
      for (auto& [key, member] : value.items()) {
        mark(member);
        // Keys are distinct, so the member is appended: ordered_json's operator[] would search all earlier keys.
        object.Json::object_t::Container::emplace_back(marked(key), std::move(member));
      }
      value = std::move(object);
    }
  }

  bool any() const { return any_; }

 private:
  // The text with marks around each control token. Marks that the client's text already contains become U+FFFD.
  std::string marked(std::string text) {
    if (jinja::has_marks(text)) text = jinja::without_marks(text, kNoCharacter);
    auto places = tokenizer_.special_tokens_in(text);
    for (const auto& [begin, end] : tokenizer_.added_tokens_in(text)) {
      if (is_control(std::string_view(text).substr(begin, end - begin))) places.emplace_back(begin, end);
    }
    if (places.empty()) return text;
    any_ = true;
    std::ranges::sort(places);
    std::string out;
    size_t done = 0;
    for (size_t i = 0; i < places.size();) {  // tokens that overlap get one pair of marks
      const size_t begin = places[i].first;
      size_t end = places[i].second;
      for (++i; i < places.size() && places[i].first < end; ++i) end = std::max(end, places[i].second);
      out.append(text, done, begin - done).append(kBegin).append(text, begin, end - begin).append(kEnd);
      done = end;
    }
    return out.append(text, done);
  }

  // An added token is a control token when the template contains it, as in transformers (sanitize_control_tokens).
  // Whitespace tokens are excluded, because templates write whitespace as ordinary text.
  bool is_control(std::string_view token) const {
    return token.find_first_not_of(" \t\n\r\f\v") != token.npos && chat_.contains_literal_text(token);
  }

  const ChatTemplate& chat_;
  const Tokenizer& tokenizer_;
  bool any_ = false;
};

// Removes the marks that ControlTokenMarker has put around strings of the client from the rendered text. Returns the
// barriers for the tokenizer (EncodeOptions::barriers), sorted, so that these strings do not become control tokens.
// There is a barrier at the position of each mark, and at each character boundary between the two marks of a pair. A
// template may cut a text between two marks, so one mark of a pair may be missing. For this case there is also a
// barrier after the first character behind each begin mark, and one before the last character in front of each end
// mark. No token of several characters can then start at a begin mark or end at an end mark.
std::vector<size_t> remove_marks(std::string& text) {
  std::vector<size_t> places;
  std::string without;
  size_t opened = text.npos;  // in `without`
  for (size_t at = 0; at < text.size();) {
    const auto left = std::string_view(text).substr(at);
    const bool begins = left.starts_with(kBegin), ends = left.starts_with(kEnd);
    if (!begins && !ends) {
      const size_t length = std::max<size_t>(1, utf8_character(left));
      const bool first = opened == without.size();
      without.append(left, 0, length);
      if (first) places.push_back(without.size());
      at += length;
      continue;
    }
    if (ends && !without.empty()) {
      const auto before = [&](size_t from) {
        return static_cast<size_t>(previous_char(without.data() + from) - without.data());
      };
      size_t inside = before(without.size());
      places.push_back(inside);
      while (opened < inside) places.push_back(inside = before(inside));
    }
    places.push_back(without.size());
    opened = begins ? without.size() : text.npos;
    at += kBegin.size();
  }
  text = std::move(without);
  std::ranges::sort(places);
  places.erase(std::unique(places.begin(), places.end()), places.end());
  return places;
}

}  // namespace

std::vector<TokenId> chat_prompt(const ChatTemplate& chat, const Tokenizer& tokenizer, const Json& messages,
                                 const Json& extra) {
  auto safe = adapt_messages(chat, messages);
  auto safe_extra = extra.is_object() ? extra : Json::object();
  ControlTokenMarker marker(chat, tokenizer);
  marker.mark(safe);
  for (auto& [name, value] : safe_extra.items()) marker.mark(value);
  auto text = chat.render(safe, /*add_generation_prompt=*/true, safe_extra).text;
  const auto barriers = marker.any() ? remove_marks(text) : std::vector<size_t>();
  return tokenizer.encode(text, {.add_special_tokens = false, .barriers = barriers});
}

}  // namespace tessera::text
