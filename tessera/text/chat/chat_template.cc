#include "tessera/text/chat/chat_template.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/text/json.h"
#include "tessera/base/text/json_numbers.h"
#include "tessera/base/text/quote.h"
#include "tessera/base/text/utf8.h"
#include "tessera/text/chat/chat_messages.h"
#include "tessera/text/jinja/evaluator.h"
#include "tessera/text/jinja/parser.h"
#include "tessera/text/tokenizer/special_tokens.h"

namespace tessera::text {

using jinja::Value;

struct ChatTemplate::TemplateData {
  std::string name;
  ChatTemplateLimits limits;
  jinja::ParsedTemplate tree;
  std::optional<jinja::ParsedTemplate> with_tools;  // the template named "tool_use", where chat_template is a list
  Json special_tokens = Json::object();
  mutable std::mutex content_forms_mutex;
  mutable std::map<std::string, ContentForm> content_forms;  // by role, filled by content_form()
};

namespace {

[[noreturn]] void raise_at(const std::string& name, int line, const std::string& message) {
  constexpr size_t kMaxMessageBytes = 1000;  // the text that a template passes to raise_exception has any length
  std::string one_line = message.substr(0, kMaxMessageBytes);
  std::replace_if(
      one_line.begin(), one_line.end(), [](char c) { return c == '\n' || c == '\r'; }, ' ');
  raise(ErrorKind::kFormat, "[text.chat_template] {} line {}: {}", name, line, escape(one_line, kMaxMessageBytes));
}

jinja::ParsedTemplate parse_source(const std::string& source, const std::string& name,
                                   const ChatTemplateLimits& limits) {
  TESSERA_CHECK(source.size() <= limits.max_template_bytes, ErrorKind::kFormat,
                "[text.chat_template] {}: the template has {} bytes, wanted at most {}.", name, source.size(),
                limits.max_template_bytes);
  TESSERA_CHECK(is_valid_utf8(source), ErrorKind::kFormat, "[text.chat_template] {}: the template is not UTF-8.", name);
  try {
    return jinja::parse_template(source, limits.max_depth);
  } catch (const jinja::TemplateSyntaxError& failure) {
    raise_at(name, failure.line, failure.message);
  }
}

// A budget without limits. It is used to convert the caller's values to template values, which does not count against
// the limits of the render.
jinja::Budget unlimited() { return {~size_t{0}, ~size_t{0}, 0}; }

// Converts a given value to a template value. The depth is limited here, before the evaluator sees the value, because
// the conversion recurses.
Value value_of(const Json& json, int depth, int max_depth) {
  if (depth > max_depth) jinja::fail("the given values are nested deeper than {}", max_depth);
  switch (json.type()) {
    case Json::value_t::boolean:
      return Value::boolean(json.get<bool>());
    case Json::value_t::number_integer:
      return Value::integer(json.get<int64_t>());
    case Json::value_t::number_unsigned:
      if (json.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) {
        return Value::big_integer(std::to_string(json.get<uint64_t>()));
      }
      return Value::integer(json.get<int64_t>());
    case Json::value_t::binary: {  // a number with its exact digits (base/text/json_numbers.h)
      const auto digits = *exact_digits(json);
      return is_integer_text(digits) ? Value::big_integer(std::string(digits)) : Value::real(nearest_double(digits));
    }
    case Json::value_t::number_float:
      return Value::real(json.get<double>());
    case Json::value_t::string:
      return Value::text(json.get_ref<const std::string&>());
    case Json::value_t::array: {
      std::vector<Value> items;
      items.reserve(json.size());
      for (const auto& item : json) items.push_back(value_of(item, depth + 1, max_depth));
      return Value::list(std::move(items));
    }
    case Json::value_t::object: {
      auto dict = std::make_shared<jinja::Dict>();
      auto budget = unlimited();
      for (const auto& [key, item] : json.items()) {
        dict->set(Value::text(key), value_of(item, depth + 1, max_depth), budget);
      }
      return Value::dict(std::move(dict));
    }
    default:
      return Value::none();
  }
}

// Clients send the reasoning of a message under one of three keys. Like transformers, this function copies it to
// "reasoning_content", the standard key, and to "thinking", the key that older templates read.
Value with_reasoning(const Value& message) {
  const auto& fields = message.get<jinja::Dict>();
  auto budget = unlimited();
  for (const char* name : {"reasoning_content", "thinking", "reasoning"}) {
    const Value* reasoning = fields.find(Value::text(name), budget);
    if (!reasoning || reasoning->is(jinja::ValueKind::kNone)) continue;
    auto made = std::make_shared<jinja::Dict>();
    made->set(Value::text("thinking"), *reasoning, budget);
    for (const auto& [key, value] : fields.entries) made->set(key, value, budget);
    made->set(Value::text("reasoning_content"), *reasoning, budget);
    return Value::dict(std::move(made));
  }
  return message;
}

}  // namespace

ChatTemplate ChatTemplate::parse(std::string source, std::string name, const ChatTemplateLimits& limits) {
  auto state = std::make_shared<TemplateData>();
  state->tree = parse_source(source, name, limits);
  state->name = std::move(name);
  state->limits = limits;
  return ChatTemplate(std::move(state));
}

// chat_template.jinja has precedence over "chat_template" of tokenizer_config.json, as in transformers.
std::optional<ChatTemplate> ChatTemplate::from_folder(const std::filesystem::path& folder) {
  auto state = std::make_shared<TemplateData>();
  const auto config_path = folder / "tokenizer_config.json";
  const auto file_path = folder / "chat_template.jinja";
  const Json config = read_optional_json_object(config_path, "[text.chat_template] " + config_path.string());
  state->special_tokens = special_tokens_of(read_special_tokens_map(folder), config);
  if (std::filesystem::exists(file_path)) {
    state->name = file_path.string();
    state->tree = parse_source(read_file(file_path, state->limits.max_template_bytes), state->name, state->limits);
    return ChatTemplate(std::move(state));
  }
  const auto found = config.find("chat_template");
  if (found == config.end() || found->is_null()) return std::nullopt;
  state->name = config_path.string();
  if (found->is_string()) {
    state->tree = parse_source(found->get<std::string>(), state->name, state->limits);
    return ChatTemplate(std::move(state));
  }
  bool has_default = false;
  if (found->is_array()) {
    for (const auto& entry : *found) {
      const bool named = entry.is_object() && entry.contains("name") && entry.contains("template") &&
                         entry["name"].is_string() && entry["template"].is_string();
      TESSERA_CHECK(
          named, ErrorKind::kFormat,
          "[text.chat_template] {}: an entry of chat_template is no object with the strings 'name' and 'template'.",
          state->name);
      const auto& name = entry["name"].get_ref<const std::string&>();
      if (name != "default" && name != "tool_use") continue;
      auto tree = parse_source(entry["template"].get<std::string>(), state->name + " '" + name + "'", state->limits);
      if (name == "default") {
        state->tree = std::move(tree);
        has_default = true;
      } else {
        state->with_tools = std::move(tree);
      }
    }
  }
  TESSERA_CHECK(
      has_default, ErrorKind::kFormat,
      "[text.chat_template] {}: chat_template is {}, wanted a string or a list with a template named 'default'.",
      state->name, found->type_name());
  return ChatTemplate(std::move(state));
}

RenderedChat ChatTemplate::render(const Json& messages, bool add_generation_prompt) const {
  return render(messages, add_generation_prompt, Json::object());
}

RenderedChat ChatTemplate::render(const Json& messages, bool add_generation_prompt, const Json& extra) const {
  const auto& limits = state_->limits;
  TESSERA_CHECK(messages.is_array(), ErrorKind::kFormat,
                "[text.chat_template] {}: the messages are {}, wanted an array.", state_->name, messages.type_name());
  TESSERA_CHECK(extra.is_object() || extra.is_null(), ErrorKind::kFormat,
                "[text.chat_template] {}: the extra values are {}, wanted an object.", state_->name, extra.type_name());
  for (size_t i = 0; i < messages.size(); ++i) {
    TESSERA_CHECK(messages[i].is_object(), ErrorKind::kFormat,
                  "[text.chat_template] {}: message {} is {}, wanted an object.", state_->name, i,
                  messages[i].type_name());
  }
  // A later definition of a variable replaces an earlier one. The order is: defaults, special tokens, `extra`, then
  // "messages" and "add_generation_prompt", so `extra` cannot replace these two.
  jinja::Evaluator evaluator({limits.max_steps, limits.max_output_bytes, limits.max_depth}, time_);
  try {
    evaluator.define("tools", Value::none());
    evaluator.define("documents", Value::none());
    for (const auto& [key, token] : state_->special_tokens.items()) {
      evaluator.define(key, value_of(token, 0, limits.max_depth));
    }
    if (extra.is_object()) {
      for (const auto& [key, value] : extra.items()) evaluator.define(key, value_of(value, 0, limits.max_depth));
    }
    std::vector<Value> chat;
    for (const auto& message : messages) chat.push_back(with_reasoning(value_of(message, 1, limits.max_depth)));
    evaluator.define("messages", Value::list(std::move(chat)));
    evaluator.define("add_generation_prompt", Value::boolean(add_generation_prompt));
    const bool tools = extra.is_object() && extra.contains("tools") && !extra["tools"].is_null();
    RenderedChat rendered;
    rendered.text = evaluator.run(tools && state_->with_tools ? state_->with_tools->body : state_->tree.body);
    rendered.generation_spans = evaluator.generation_spans();
    return rendered;
  } catch (const jinja::RenderError& failure) {
    raise_at(state_->name, evaluator.line(), failure.message);
  }
}

std::optional<std::string> ChatTemplate::try_render(const Json& messages, bool add_generation_prompt,
                                                    const Json& extra) const {
  try {
    return render(messages, add_generation_prompt, extra).text;
  } catch (const Error&) {
    return std::nullopt;
  }
}

ChatTemplate ChatTemplate::at_time(std::time_t seconds) const {
  ChatTemplate pinned = *this;
  pinned.time_ = seconds;
  return pinned;
}

bool ChatTemplate::marks_generation() const { return state_->tree.has_generation; }

ContentForm ChatTemplate::content_form(const std::string& role) const {
  // All unknown roles share one entry of content_forms, because a client may send any number of different role names,
  // and content_forms must not grow with their number.
  const bool known = role == "system" || role == "user" || role == "assistant" || role == "tool";
  const std::lock_guard lock(state_->content_forms_mutex);
  const auto [form, added] = state_->content_forms.try_emplace(known ? role : "other");
  if (added) form->second = find_content_form(*this, form->first);
  return form->second;
}

bool ChatTemplate::reads_clock() const {
  return state_->tree.reads_clock || (state_->with_tools && state_->with_tools->reads_clock);
}

bool ChatTemplate::contains_literal_text(std::string_view text) const {
  return state_->tree.literals.find(text) != std::string::npos ||
         (state_->with_tools && state_->with_tools->literals.find(text) != std::string::npos);
}

// `literals` has each literal between two null characters. The search is for `text` between two null characters, so it
// finds only whole literals.
bool ChatTemplate::has_literal(std::string_view text) const {
  return contains_literal_text(fmt::format("{0}{1}{0}", '\0', text));
}

const std::string& ChatTemplate::name() const { return state_->name; }

}  // namespace tessera::text
