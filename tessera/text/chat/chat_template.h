// Chat templates turn messages into the text format that a model was trained on, like Hugging Face's
// apply_chat_template.
//
//   auto chat = ChatTemplate::from_folder("build/assets/smollm2");
//   nlohmann::ordered_json messages = {{{"role", "user"}, {"content", "Hello"}}};
//   std::string prompt = chat->render(messages, /*add_generation_prompt=*/true).text;
//
// Templates run in our own Jinja2 interpreter with the settings of transformers (sandboxed and immutable, trim_blocks,
// lstrip_blocks, break and continue, {% generation %}). A template is hostile input: it can read only the given values,
// and its steps, output, depth and size are limited. Every failure (a syntax error, a template that calls
// raise_exception, a limit) is an Error of kind kFormat that names the template and the line.
// A parsed template is an immutable value and cheap to copy; rendering is thread-safe.
#pragma once

#include <ctime>
#include <filesystem>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::text {

struct ChatTemplateLimits {
  size_t max_steps = 5'000'000;        // one per expression and statement, and one per 64 bytes that they produce
  size_t max_output_bytes = 16 << 20;  // of the result, and of each intermediate string
  size_t max_template_bytes = 1 << 20;
  int max_depth = 200;  // nesting of blocks, expressions, macro calls and values
};

struct RenderedChat {
  std::string text;
  std::vector<std::pair<size_t, size_t>> generation_spans;  // byte ranges [first, last) of {% generation %} blocks
};

// The forms of a message's content that a template prints. reads_text: a string. reads_parts: a list of parts
// ([{"type": "text", "text": ...}, ...]). reads_all_parts: all parts of the list. If reads_parts is true and
// reads_all_parts is false, the template prints only the first part.
struct ContentForm {
  bool reads_text = true, reads_parts = false, reads_all_parts = false;
};

class ChatTemplate {
 public:
  // Parses the template `source`; error messages use `name` as the name of the template.
  static ChatTemplate parse(std::string source, std::string name, const ChatTemplateLimits& limits = {});

  // Reads the template of a Hugging Face folder: chat_template.jinja if it exists, else "chat_template" of
  // tokenizer_config.json. This key holds a string, or a list of {"name", "template"}; render() uses the template
  // "tool_use" of the list when tools are given and the list has it, else "default". nullopt when the folder has no
  // template. The special tokens of tokenizer_config.json and special_tokens_map.json (bos_token, ...) are variables in
  // every render.
  static std::optional<ChatTemplate> from_folder(const std::filesystem::path& folder);

  // Renders a list of messages, each an object with "role" and usually "content". `extra` is an object with further
  // variables: tools, documents, bos_token, enable_thinking, ... Templates print tools as JSON in the order of their
  // keys; build the values as ordered_json, because nlohmann::json sorts its keys.
  RenderedChat render(const nlohmann::ordered_json& messages, bool add_generation_prompt) const;
  RenderedChat render(const nlohmann::ordered_json& messages, bool add_generation_prompt,
                      const nlohmann::ordered_json& extra) const;
  // The text of render(), or nullopt where render() raises an Error, e.g. because the template refuses an incomplete
  // conversation.
  std::optional<std::string> try_render(const nlohmann::ordered_json& messages, bool add_generation_prompt,
                                        const nlohmann::ordered_json& extra) const;

  // A copy in which strftime_now prints the time `seconds` (since 1970, in UTC) instead of the machine's local time.
  ChatTemplate at_time(std::time_t seconds) const;
  // True when the template names strftime_now; its output may then depend on the current time.
  bool reads_clock() const;

  // True when the template's own text, or one of its string literals, contains `text`.
  bool contains_literal_text(std::string_view text) const;
  // True when a whole string literal, or a whole piece of the template's own text, equals `text`.
  bool has_literal(std::string_view text) const;

  // Returns which forms of `content` the template prints in a message of this role: a string, a list of parts, or both
  // (see ContentForm). The first call for a role renders test conversations to find out; later calls return the stored
  // result.
  ContentForm content_form(const std::string& role) const;

  // True when the template marks the assistant's output with {% generation %}.
  bool marks_generation() const;
  const std::string& name() const;

 private:
  struct TemplateData;
  explicit ChatTemplate(std::shared_ptr<const TemplateData> state) : state_(std::move(state)) {}
  std::shared_ptr<const TemplateData> state_;
  std::optional<std::time_t> time_;  // printed by strftime_now; nullopt: the machine's clock
};

}  // namespace tessera::text
