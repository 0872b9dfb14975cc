#include "tessera/data/records/turns.h"

#include <algorithm>

#include "tessera/base/text/json.h"
#include "tessera/base/text/utf8.h"

namespace tessera::data {
namespace {

constexpr uint32_t kMarkBegin = 0xFDD2, kFirstDigit = 0xFDE0;  // Unicode noncharacters; 16 digits

// Returns the mark of a message: one begin character and 8 digits. A mark is put into a message before the template
// renders it, so that the position of the message in the rendered text can be found. Marks of different messages differ
// and never overlap.
std::string mark_of(size_t message) {
  std::string mark;
  append_utf8(kMarkBegin, mark);
  for (int shift = 28; shift >= 0; shift -= 4) {
    append_utf8(kFirstDigit + static_cast<uint32_t>(message >> shift & 15), mark);
  }
  return mark;
}

// Removes all marks that mark_of() can make from `text`. Noncharacters that are not part of such a mark stay.
std::string without_marks(std::string_view text) {
  static const std::string begin = mark_of(0).substr(0, 3);
  const size_t bytes = mark_of(0).size();
  std::string plain;
  size_t done = 0;
  for (size_t at = text.find(begin); at != text.npos; at = text.find(begin, at + 1)) {
    bool digits = at + bytes <= text.size();
    for (size_t i = begin.size(); digits && i < bytes; i += begin.size()) {
      digits = text.substr(at + i, 2) == "\xEF\xB7" && static_cast<unsigned char>(text[at + i + 2]) >= 0xA0;
    }
    if (!digits) continue;
    plain.append(text, done, at - done);
    done = at + bytes;
  }
  return plain.append(text, done);
}

bool has_calls(const Json& message) {
  return message.contains("tool_calls") && message["tool_calls"].is_array() && !message["tool_calls"].empty();
}

// Inserts `mark` into the text `value`, after the last character that is not white space, because templates trim texts.
// Returns false, without a change, if `value` is not a text or has only white space.
bool mark_text(Json& value, const std::string& mark) {
  if (!value.is_string()) return false;
  auto& text = value.get_ref<std::string&>();
  const size_t last = text.find_last_not_of(" \t\n\r\f\v");
  if (last == text.npos) return false;
  text.insert(last + 1, mark);
  return true;
}

bool mark_content(Json& message, const std::string& mark) {
  if (!message.contains("content")) return false;
  Json& content = message["content"];
  if (content.is_string()) return mark_text(content, mark);
  if (!content.is_array()) return false;
  for (size_t i = content.size(); i-- > 0;) {
    Json& part = content[i];
    if (part.is_object() && part.contains("text") && mark_text(part["text"], mark)) return true;
  }
  return false;
}

// Inserts the text `mark` before the first character of the message's content that is not white space. Returns false if
// there is no such character.
bool mark_content_begin(Json& message, const std::string& mark) {
  Json* text = message.contains("content") ? &message["content"] : nullptr;
  if (text && text->is_array()) {
    text = text->empty() || !text->front().contains("text") ? nullptr : &text->front()["text"];
  }
  if (!text || !text->is_string()) return false;
  auto& characters = text->get_ref<std::string&>();
  const size_t first = characters.find_first_not_of(" \t\n\r\f\v");
  if (first == characters.npos) return false;
  characters.insert(first, mark);
  return true;
}

bool mark_call(Json& message, const char* key, const std::string& mark) {
  if (!has_calls(message)) return false;
  Json& call = message["tool_calls"].front();  // some templates print only one call
  if (!call.is_object()) return false;
  Json& function = call.contains("function") && call["function"].is_object() ? call["function"] : call;
  Json& holder = std::string_view(key) == "id" ? call : function;
  return holder.contains(key) && mark_text(holder[key], mark);
}

bool is_blank(Json message) { return !mark_content(message, "-"); }

// The places of a message at which TurnFinder::choose_marks() can insert a mark, which shows where the template prints
// the message. They are in the order of preference: the name of the first tool call, the id of this call, the content,
// the reasoning. A later place is used when the template does not print the earlier places.
enum class MarkPlace { kName, kId, kContent, kReasoning, kNone };

bool mark_reasoning(Json& message, const std::string& mark) {
  for (const char* key : {"reasoning_content", "thinking", "reasoning"}) {
    if (message.contains(key) && !message[key].is_null()) return mark_text(message[key], mark);
  }
  return false;
}

bool mark_at(MarkPlace place, Json& message, const std::string& mark) {
  if (place == MarkPlace::kName) return mark_call(message, "name", mark);
  if (place == MarkPlace::kId) return mark_call(message, "id", mark);
  if (place == MarkPlace::kContent) return mark_content(message, mark);
  return place == MarkPlace::kReasoning && mark_reasoning(message, mark);
}

MarkPlace next_place(MarkPlace place) {
  return place == MarkPlace::kNone ? place : static_cast<MarkPlace>(static_cast<int>(place) + 1);
}

size_t common_prefix(std::string_view a, std::string_view b) {
  return static_cast<size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
}

}  // namespace

TurnFinder::TurnFinder(const text::ChatTemplate& chat, const Json& messages, const Json& extra, const std::string& text)
    : chat_(chat),
      messages_(messages),
      extra_(extra),
      text_(text),
      drops_calls_(messages.size()),
      marks_content_(messages.size()) {
  choose_marks();
}

// Inserts a mark into each message, at the first MarkPlace at which the template prints the mark. Each pass of the loop
// renders the conversation with all marks; a mark that the render does not contain moves to the next place of its
// message. The loop ends when no mark moved or a render failed. A message of which the template prints no place gets no
// mark. whole_, the last render, is kept only if it equals text_ apart from the marks. If whole_ is not kept, later
// renders contain the mark of one message only.
void TurnFinder::choose_marks() {
  marked_ = messages_;
  marks_.assign(messages_.size(), "");
  std::vector<MarkPlace> places(messages_.size(), MarkPlace::kName);
  const auto place_mark = [&](size_t i) {
    marked_[i] = messages_[i];
    marks_[i].clear();
    for (; places[i] != MarkPlace::kNone; places[i] = next_place(places[i])) {
      const auto mark = mark_of(i);
      if (!mark_at(places[i], marked_[i], mark)) continue;
      marks_[i] = mark;
      return;
    }
  };
  for (size_t i = 0; i < messages_.size(); ++i) place_mark(i);
  for (bool moved = true; moved;) {  // at most once for each place
    moved = false;
    whole_ = chat_.try_render(marked_, false, extra_);
    if (!whole_) break;
    for (size_t i = 0; i < messages_.size(); ++i) {
      if (marks_[i].empty() || whole_->find(marks_[i]) != std::string::npos) continue;
      places[i] = next_place(places[i]);
      place_mark(i);
      moved = true;
    }
  }
  for (size_t i = 0; i < messages_.size(); ++i) {
    drops_calls_[i] = has_calls(messages_[i]) && places[i] != MarkPlace::kName && places[i] != MarkPlace::kId;
    marks_content_[i] = places[i] == MarkPlace::kContent;
  }
  if (whole_ && without_marks(*whole_) != text_) whole_.reset();
}

// Returns the part of `rendered` after the mark (mark_of) of message `message`, without any marks. Returns nullopt if
// the message has no mark or `rendered` does not contain it.
std::optional<std::string> TurnFinder::behind_mark(const std::string& rendered, size_t message) const {
  const size_t at = marks_[message].empty() ? std::string::npos : rendered.find(marks_[message]);
  if (at == std::string::npos) return std::nullopt;
  return without_marks(std::string_view(rendered).substr(at));
}

// Renders the first `count` messages with the marks of choose_marks(): with the marks of all messages or, if `one` is
// set, with only the mark of message `one`. If `prompt` is true, the render ends with the generation prompt.
std::optional<std::string> TurnFinder::render_marked(size_t count, bool prompt, std::optional<size_t> one) const {
  Json messages = Json::array();
  for (size_t i = 0; i < count; ++i) messages.push_back(!one || *one == i ? marked_[i] : messages_[i]);
  return chat_.try_render(messages, prompt, extra_);
}

// Renders all messages with marks (mark_of) and returns the text after the mark of message `message`, without marks.
// Returns nullopt if the message has no mark in this render, or if the returned text would not be a suffix of text_,
// which is the render without marks. The position of the mark in text_ is text_.size() minus the length of this suffix.
std::optional<std::string> TurnFinder::behind_in_whole(size_t message) const {
  const auto whole = whole_ ? whole_ : render_marked(messages_.size(), false, message);
  const auto tail = whole ? behind_mark(*whole, message) : std::nullopt;
  if (!tail || !text_.ends_with(*tail)) return std::nullopt;
  return tail;
}

// Renders the first `count` messages and compares this render with text_, the render of all messages. Returns the
// position in text_ from which the two renders differ. They are compared after the mark of the last message that has a
// mark in both. Before this mark they may differ, because a template may print a message differently when more messages
// follow. If no message has a mark in both renders, they are compared from the beginning.
std::optional<TurnFinder::CommonPrefix> TurnFinder::common_end(size_t count, bool prompt) const {
  auto part = whole_ ? render_marked(count, prompt, std::nullopt) : std::nullopt;
  if (whole_ && !part) return std::nullopt;
  for (size_t message = count; message-- > 0;) {
    if (marks_[message].empty()) continue;
    if (!whole_) part = render_marked(count, prompt, message);
    if (!part) return std::nullopt;
    const auto tail = behind_mark(*part, message), whole_tail = behind_in_whole(message);
    if (!tail || !whole_tail) continue;
    const size_t same = common_prefix(*tail, *whole_tail);
    return CommonPrefix{text_.size() - whole_tail->size() + same, same == tail->size()};
  }
  if (!part) part = render_marked(count, prompt, messages_.size());
  if (!part) return std::nullopt;
  const auto plain = without_marks(*part);
  const size_t same = common_prefix(plain, text_);
  return CommonPrefix{same, same == plain.size()};
}

// Returns two positions in text_ around the content of message `index`: the end of the header before the content, and
// the start of the text that ends the turn after the content. To find them, the conversation is rendered again, with a
// message `index` whose content is only a mark (no tool calls, no reasoning). The first position is the length of the
// rendered text before the mark, or npos if text_ does not begin with this rendered text. For message 0 the first
// position is never npos: it is the length of the longest common prefix of text_ and the rendered text before the mark.
// The second position is npos if text_ does not end with the rendered text after the mark. Returns nullopt if the
// render fails or does not have the mark exactly once.
std::optional<std::pair<size_t, size_t>> TurnFinder::around_bare_text(size_t index) const {
  const std::string mark = mark_of(messages_.size());
  Json bare = messages_;
  const bool parts = messages_[index].contains("content") && messages_[index]["content"].is_array();
  bare[index] = {{"role", messages_[index].at("role")}, {"content", mark}};
  if (parts) bare[index]["content"] = Json::array({{{"type", "text"}, {"text", mark}}});
  const auto other = chat_.try_render(bare, false, extra_);
  const size_t at = other ? other->find(mark) : std::string::npos;
  if (at == std::string::npos || other->find(mark, at + 1) != std::string::npos) return std::nullopt;
  const std::string_view before = std::string_view(*other).substr(0, at),
                         after = std::string_view(*other).substr(at + mark.size());
  // The first returned position is the end of `before` in text_ if text_ begins with `before`. Otherwise text_ and
  // `*other` may already differ in a message before message `index`, so the end of their common prefix may lie in that
  // earlier message; the position is then npos. No message precedes message 0, so for message 0 the end of the common
  // prefix of `before` and text_ is returned instead of npos.
  const size_t same = common_prefix(before, text_);
  return std::pair{same == before.size() || index == 0 ? same : std::string::npos,
                   text_.ends_with(after) ? text_.size() - after.size() : std::string::npos};
}

// The position where the assistant's turn begins. The usual case: the prompt for this message (the messages before it,
// rendered with a generation prompt) is part of the whole conversation, and the turn begins at the prompt's end.
std::optional<size_t> TurnFinder::first_of(size_t index) const {
  const auto prompt = common_end(index, true);
  // The prompt for message 0 is the render of an empty list of messages. For an empty list some templates print
  // nothing, although they print a default system prompt before the first message. An empty prompt does not show where
  // the turn of message 0 begins, so it is not used.
  if (prompt && prompt->all && (index > 0 || prompt->place > 0)) return prompt->place;
  // The remaining cases: the prompt for this message ends with text that the whole conversation does not have (such as
  // an open <think>), the prompt cannot be rendered or compared, or the prompt is empty for message 0. Then
  // around_bare_text() gives the end of the header before this message's content. If the generation prompt (`header`)
  // occurs between the end of the previous turn and this place, the turn begins after its last occurrence there,
  // otherwise at this place.
  const auto bare = around_bare_text(index);
  if (!bare || bare->first == std::string::npos) return prompt ? std::optional(prompt->place) : std::nullopt;
  const auto asked = chat_.try_render(messages_, true, extra_);
  if (!asked || asked->size() <= text_.size() || !asked->starts_with(text_)) return bare->first;
  // `header` is the generation prompt: the text that add_generation_prompt adds at the end of the conversation. Its
  // last occurrence before this message's content, but after the end of the previous turn, is the header of this turn.
  const std::string header = asked->substr(text_.size());
  const size_t min_position = index > 0 ? common_end(index, false).value_or(CommonPrefix{0, false}).place : 0;
  const size_t found = text_.rfind(header, bare->first);
  const bool fits = found != std::string::npos && found >= min_position && found + header.size() <= bare->first;
  return fits ? found + header.size() : bare->first;
}

// Returns the limit (AssistantTurn::limit) of a turn whose end is unknown: the position after the first byte at or
// after `place` that is not a space or newline.
size_t TurnFinder::behind_next_character(size_t place) const {
  const size_t next = text_.find_first_not_of(" \n", place);
  return next == std::string::npos ? text_.size() : next + 1;
}

// first_of() finds where the turn begins. How its end is found depends on what the template prints of message `index`:
// - choose_marks() put the message's mark into the content, and the template prints this mark. Then the turn's text
//   ends at the mark.
// - The template prints neither the content nor tool calls of the message. Then find() returns no turn.
// - The template prints tool calls of the message, or the content is empty. Then around_bare_text() renders the
//   conversation with only a text in this message, and finds the end of the turn's text by comparison with that render.
//   If this gives no position, the turn ends with the last special token before the next message
//   (AssistantTurn::ends_in_special).
std::vector<AssistantTurn> TurnFinder::find(size_t index) const {
  const auto first = first_of(index);
  if (!first) return {};
  const auto end =
      index + 1 == messages_.size() ? std::optional(CommonPrefix{text_.size(), true}) : common_end(index + 1, false);
  const auto limit_behind = [&](size_t text_end) {
    return end ? std::max(end->place, text_end) : behind_next_character(text_end);
  };
  const bool calls = has_calls(messages_[index]) && !drops_calls_[index];
  const auto tail = marks_content_[index] ? behind_in_whole(index) : std::nullopt;
  if (tail) {
    const size_t text_end = text_.size() - tail->size();
    if (text_end < *first) return {};
    return {{.first = *first, .text_end = text_end, .limit = limit_behind(text_end)}};
  }
  if (!calls && !is_blank(messages_[index])) return {};  // the template does not print the text
  // around_bare_text() finds the end of the turn in a render in which this message has a text and no tool calls. The
  // template is assumed to print the same text at the end of a turn with tool calls as at the end of a turn with only a
  // text. around_bare_text() is not needed if the template prints tool calls of this message and the render of all
  // messages begins with the render of the messages up to this one (CommonPrefix::all of `end`). In this case
  // CommonPrefix::place of `end` is the end of what the template prints for this message.
  const auto bare = calls && end && end->all ? std::nullopt : around_bare_text(index);
  size_t next_mark = text_.size();  // position of the next message that has a printed mark
  for (size_t next = index + 1; next < messages_.size() && next_mark == text_.size(); ++next) {
    if (const auto next_tail = behind_in_whole(next)) next_mark -= next_tail->size();
  }
  if (bare && bare->second != std::string::npos && *first <= bare->second && bare->second <= next_mark) {
    return {{.first = *first, .text_end = bare->second, .limit = limit_behind(bare->second)}};
  }
  if (!end || end->place < *first) return {};
  std::vector<AssistantTurn> turns = {
      {.first = *first, .text_end = *first, .limit = end->place, .ends_in_special = true}};
  if (const auto text = text_elsewhere(index, turns[0])) turns.push_back(*text);
  return turns;
}

// The content of a message with tool calls, if the template prints it apart from the calls (Gemma 4 prints it after the
// tool results).
std::optional<AssistantTurn> TurnFinder::text_elsewhere(size_t index, const AssistantTurn& calls) const {
  const std::string mark = mark_of(messages_.size());
  const auto place = [&](bool (*set_mark)(Json&, const std::string&)) {
    Json messages = messages_;
    if (!set_mark(messages[index], mark)) return std::string::npos;
    const auto whole = chat_.try_render(messages, false, extra_);
    const size_t at = whole ? whole->find(mark) : std::string::npos;
    if (at == std::string::npos) return std::string::npos;
    const size_t behind = whole->size() - at - mark.size();
    return text_.size() < behind ? std::string::npos : text_.size() - behind;
  };
  const size_t text_end = place(mark_content);
  if (text_end == std::string::npos || (calls.first <= text_end && text_end <= calls.limit)) return std::nullopt;
  const size_t first = place(mark_content_begin);
  if (first == std::string::npos || first > text_end) return std::nullopt;
  return AssistantTurn{.first = first, .text_end = text_end, .limit = behind_next_character(text_end)};
}

std::string TurnFinder::text_behind_last() const {
  const size_t last = messages_.size() - 1;
  Json messages = messages_;
  messages[last] = marked_[last];
  Json next = {{"role", has_calls(messages_[last]) ? "tool" : "user"}, {"content", "x"}};
  const auto reads_text = chat_.content_form(next["role"].get_ref<const std::string&>()).reads_text;
  if (!reads_text) next["content"] = Json::array({{{"type", "text"}, {"text", "x"}}});
  messages.push_back(next);
  const auto longer = chat_.try_render(messages, false, extra_);
  const auto tail = behind_in_whole(last);
  const auto longer_tail = longer ? behind_mark(*longer, last) : std::nullopt;
  if (!tail || !longer_tail || !longer_tail->starts_with(*tail)) return "";
  return longer_tail->substr(tail->size());
}

}  // namespace tessera::data
