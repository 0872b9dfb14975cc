// Chat templates: messages to the text a model was trained on, as Hugging Face's apply_chat_template renders them.
//
//   auto chat = ChatTemplate::from_folder("build/assets/smollm2");
//   nlohmann::ordered_json messages = {{{"role", "user"}, {"content", "Hello"}}};
//   std::string prompt = chat->render(messages, /*add_generation_prompt=*/true).text;
//
// The template language is our own interpreter of Jinja2 with the settings of transformers (sandboxed and immutable,
// trim_blocks, lstrip_blocks, break and continue, {% generation %}). A template is hostile input: it sees the given
// values and nothing else, and steps, output, depth and size are limited. Every failure (syntax, a template that calls
// raise_exception, a limit) is one Error of kind kFormat that names the template and the line.
// Parsed templates are immutable values, cheap to copy; rendering is thread-safe.
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
  size_t max_steps = 5'000'000;        // expressions and statements, plus one for each 64 bytes that they produce
  size_t max_output_bytes = 16 << 20;  // of the result, and of any one string on the way to it
  size_t max_template_bytes = 1 << 20;
  int max_depth = 200;  // of nested blocks, expressions, macro calls and values
};

struct RenderedChat {
  std::string text;
  std::vector<std::pair<size_t, size_t>> generation_spans;  // byte ranges [first, last) of {% generation %} blocks
};

// Which forms of a message's content a template prints: a text, and parts ([{"type": "text", "text": ...}, ...]), all
// of them or only the first.
struct ContentForm {
  bool reads_text = true, reads_parts = false, reads_all_parts = false;
};

class ChatTemplate {
 public:
  // Parses a template; `name` is what errors call it.
  static ChatTemplate parse(std::string source, std::string name, const ChatTemplateLimits& limits = {});

  // The template of a Hugging Face folder: chat_template.jinja if there, else "chat_template" of tokenizer_config.json
  // (a string, or a list of {"name", "template"} of which "default" is used, "tool_use" when tools are given).
  // nullopt when the folder has none. The special tokens of tokenizer_config.json and special_tokens_map.json
  // (bos_token, ...) become values that every render of it sees.
  static std::optional<ChatTemplate> from_folder(const std::filesystem::path& folder);

  // Renders a list of messages, each an object with "role" and mostly "content". `extra` is an object of further
  // values: tools, documents, bos_token, enable_thinking, ... Keys keep their order (tools are printed as JSON), which
  // nlohmann::json does not: give an ordered_json where it matters.
  RenderedChat render(const nlohmann::ordered_json& messages, bool add_generation_prompt) const;
  RenderedChat render(const nlohmann::ordered_json& messages, bool add_generation_prompt,
                      const nlohmann::ordered_json& extra) const;
  // The text; nothing where render() fails, as with half a conversation that the template refuses.
  std::optional<std::string> try_render(const nlohmann::ordered_json& messages, bool add_generation_prompt,
                                        const nlohmann::ordered_json& extra) const;

  // A copy in which strftime_now prints this time, in seconds since 1970, in UTC. Without it, it prints the machine's.
  ChatTemplate at_time(std::time_t seconds) const;
  // True when the template names strftime_now: what it prints may depend on the day.
  bool reads_clock() const;

  // True when the text is part of the template's own text or of one of its string literals.
  bool writes(std::string_view text) const;
  // True when the whole of a string literal, or of a piece of the template's text, is this text.
  bool has_literal(std::string_view text) const;

  // How the template reads the content of messages of this role. Found by small renders the first time it is asked.
  ContentForm content_form(const std::string& role) const;

  // True when the template marks what the assistant says with {% generation %}.
  bool marks_generation() const;
  const std::string& name() const;

 private:
  struct State;
  explicit ChatTemplate(std::shared_ptr<const State> state) : state_(std::move(state)) {}
  std::shared_ptr<const State> state_;
  std::optional<std::time_t> time_;  // that strftime_now prints; none: the machine's
};

}  // namespace tessera::text
