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

#include <filesystem>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
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

class ChatTemplate {
 public:
  // Parses a template; `name` is what errors call it.
  static ChatTemplate parse(std::string source, std::string name, const ChatTemplateLimits& limits = {});

  // The template of a Hugging Face folder: chat_template.jinja if there, else "chat_template" of tokenizer_config.json
  // (a string, or a list of {"name", "template"} of which "default" is used, "tool_use" when tools are given).
  // nullopt when the folder has none. The special tokens of tokenizer_config.json (bos_token, ...) become values
  // that every render of it sees.
  static std::optional<ChatTemplate> from_folder(const std::filesystem::path& folder);

  // Renders a list of messages, each an object with "role" and mostly "content". `extra` is an object of further
  // values: tools, documents, bos_token, enable_thinking, ... Keys keep their order (tools are printed as JSON), which
  // nlohmann::json does not: give an ordered_json where it matters.
  RenderedChat render(const nlohmann::ordered_json& messages, bool add_generation_prompt) const;
  RenderedChat render(const nlohmann::ordered_json& messages, bool add_generation_prompt,
                      const nlohmann::ordered_json& extra) const;

  // True when the template marks what the assistant says with {% generation %}.
  bool marks_generation() const;
  const std::string& name() const;

 private:
  struct State;
  explicit ChatTemplate(std::shared_ptr<const State> state) : state_(std::move(state)) {}
  std::shared_ptr<const State> state_;
};

}  // namespace tessera::text
