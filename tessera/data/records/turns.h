// Where the assistant speaks in a rendered chat, for templates that do not mark it with {% generation %}.
//
//   TurnFinder turns(chat, messages, extra, text);      // text: the whole conversation, rendered
//   for (const Turn& turn : turns.find(1)) text.substr(turn.first, turn.limit - turn.first) ...
//
// A template may print a message otherwise when further messages follow (Qwen3 drops its reasoning), so a conversation
// up to a message need not be a prefix of the whole. What is looked for is therefore always a place in the whole:
// messages carry marks at the ends of their texts (text/jinja/marks.h), which templates do not see, and what two
// renders print behind the mark of one message is compared. The prompt for message i, rendered of the messages before
// it, ends with the end of the turn before and the header of this one; where the same text stands in the whole, behind
// the same mark, the assistant begins to speak. Renders the messages about twice for each turn.
//
// Borrows everything; not thread-safe.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/text/chat/chat_template.h"

namespace tessera::data {

// Byte places in the rendered text. The assistant's turn begins at `first`, its text ends at `text_end`, and what the
// template prints behind the text for this message ends at `limit`. The first special token behind the text ends the
// turn. Where no end of a text is known, as with tool calls, which may hold special tokens of their own, it is the
// last.
struct Turn {
  size_t first = 0, text_end = 0, limit = 0;
  bool ends_in_special = false;  // true: the last special token before `limit`
};

class TurnFinder {
 public:
  // The messages are in the form that the template reads (text/chat/chat_messages.h).
  TurnFinder(const text::ChatTemplate& chat, const nlohmann::ordered_json& messages,
             const nlohmann::ordered_json& extra, const std::string& text);

  // The turn of a message of the assistant, in two parts where the template prints its text apart from its calls. Empty
  // where what the template prints does not show it.
  std::vector<Turn> find(size_t index) const;
  // What the template prints behind the last message when another speaks after it, without what it prints anyway.
  // Empty where it does not show.
  std::string text_behind_last() const;
  // True for a message with tool calls of which the template prints nothing.
  bool drops_calls(size_t index) const { return drops_calls_[index]; }

 private:
  // The text behind a place, without marks. nullopt where the mark is not printed.
  std::optional<std::string> behind_mark(const std::string& rendered, size_t message) const;
  std::optional<std::string> render_marked(size_t count, bool prompt, std::optional<size_t> one) const;
  std::optional<std::string> behind_in_whole(size_t message) const;
  // Where `wanted`, another render up to a message, and the whole part behind the last mark that both have; and whether
  // all of `wanted` stands there.
  struct Common {
    size_t place;
    bool all;
  };
  std::optional<Common> common_end(size_t count, bool prompt) const;
  std::optional<std::pair<size_t, size_t>> around_bare_text(size_t index) const;
  std::optional<size_t> first_of(size_t index) const;
  size_t behind_next_character(size_t place) const;
  std::optional<Turn> text_elsewhere(size_t index, const Turn& calls) const;
  void choose_marks();

  const text::ChatTemplate& chat_;
  const nlohmann::ordered_json& messages_;
  const nlohmann::ordered_json& extra_;
  const std::string& text_;
  nlohmann::ordered_json marked_;   // the messages with their marks
  std::vector<std::string> marks_;  // of each message, empty: none
  std::vector<bool> drops_calls_, marks_content_;
  std::optional<std::string> whole_;  // rendered with all marks, where that prints the same text
};

}  // namespace tessera::data
