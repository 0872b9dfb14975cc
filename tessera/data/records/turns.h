// Finds the assistant's turns in a rendered chat, for templates that do not mark them with {% generation %}.
//
//   TurnFinder turns(chat, messages, extra, text);      // text: the rendered conversation
//   for (const AssistantTurn& turn : turns.find(1)) text.substr(turn.first, turn.limit - turn.first) ...
//
// A template may print a message differently when more messages follow (Qwen3 drops its reasoning), so the render of
// the first messages need not be a prefix of the whole render. All positions are therefore found in the whole render,
// the render of all messages. For this, a mark (text/jinja/marks.h), which does not affect the template, is inserted at
// the end of a text of each message. Two renders are compared by the text after the mark of the same message. The
// prompt for message i is the render of the messages before it with the generation prompt: after its last mark come the
// end of the previous turn and the header of this turn. Where this same text ends in the whole render, the assistant's
// turn begins. The messages are rendered about twice for each turn.
//
// The arguments must outlive the TurnFinder; not thread-safe.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/text/chat/chat_template.h"

namespace tessera::data {

// Byte positions in the rendered text. The assistant's turn begins at `first`, its text ends at `text_end`, and the
// text that the template prints for this message ends at `limit`. The first special token after `text_end` ends the
// turn. With tool calls, which may hold special tokens of their own, the end of the text is not known; then the last
// special token before `limit` ends the turn.
struct AssistantTurn {
  size_t first = 0, text_end = 0, limit = 0;
  bool ends_in_special = false;  // true: the last special token before `limit` ends the turn
};

class TurnFinder {
 public:
  // The messages are in the form that the template reads (text/chat/chat_messages.h).
  TurnFinder(const text::ChatTemplate& chat, const nlohmann::ordered_json& messages,
             const nlohmann::ordered_json& extra, const std::string& text);

  // Returns the byte ranges that the turn of assistant message `index` occupies in the rendered text: one range, or two
  // if the template prints the message's text apart from its tool calls. Empty when the turn cannot be found.
  std::vector<AssistantTurn> find(size_t index) const;
  // Renders the conversation with one more message at its end. Returns the part of this render behind the place where
  // text_, the render without that message, ends: the text that closes the last turn, if any, then the added message.
  // Returns "" when that render fails or does not repeat what text_ has after the mark of the last message.
  std::string text_behind_last() const;
  // True for a message whose tool calls the template does not print.
  bool drops_calls(size_t index) const { return drops_calls_[index]; }

 private:
  // Returns the text of `rendered` after the mark of the message with index `message`, with all marks removed. A mark
  // is a text that choose_marks() inserts into a message, so that the position of the message in a render can be found.
  // Returns nullopt when the message has no mark or `rendered` does not contain it.
  std::optional<std::string> behind_mark(const std::string& rendered, size_t message) const;
  std::optional<std::string> render_marked(size_t count, bool prompt, std::optional<size_t> one) const;
  std::optional<std::string> behind_in_whole(size_t message) const;
  // The result of common_end(), which renders the first `count` messages and compares this render with text_, the
  // render of all messages. The two are compared after the last mark (choose_marks()) that both renders contain when
  // they are made with marks, or from the beginning if there is no such mark. `place` is the position in text_ where
  // they begin to differ. `all`: they do not differ before the end of the render of the first `count` messages.
  struct CommonPrefix {
    size_t place;
    bool all;
  };
  std::optional<CommonPrefix> common_end(size_t count, bool prompt) const;
  std::optional<std::pair<size_t, size_t>> around_bare_text(size_t index) const;
  std::optional<size_t> first_of(size_t index) const;
  size_t behind_next_character(size_t place) const;
  std::optional<AssistantTurn> text_elsewhere(size_t index, const AssistantTurn& calls) const;
  void choose_marks();

  const text::ChatTemplate& chat_;
  const nlohmann::ordered_json& messages_;
  const nlohmann::ordered_json& extra_;
  const std::string& text_;
  nlohmann::ordered_json marked_;   // the messages with their marks
  std::vector<std::string> marks_;  // by message; empty: no mark
  std::vector<bool> drops_calls_, marks_content_;
  std::optional<std::string> whole_;  // rendered with all marks; nullopt if the marks changed the text
};

}  // namespace tessera::data
