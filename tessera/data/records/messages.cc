#include "tessera/data/records/messages.h"

#include <map>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/data/records/row_source.h"

namespace tessera::data {
namespace {

Json parsed(const Json& text, const std::string& value_name, const std::string& where) {
  return parse_json(text.get_ref<const std::string&>(), fmt::format("[data.read] {}: {}", where, value_name),
                    kRecordLimits);
}

// Tool call arguments that are JSON text become JSON, the form that chat templates expect.
void parse_arguments(Json& message, const std::string& name, const std::string& where) {
  const auto calls = message.find("tool_calls");
  if (calls == message.end() || !calls->is_array()) return;
  for (auto& call : *calls) {
    if (!call.is_object()) continue;
    Json& function = call.contains("function") && call["function"].is_object() ? call["function"] : call;
    const auto arguments = function.find("arguments");
    if (arguments == function.end() || !arguments->is_string()) continue;
    if (arguments->get_ref<const std::string&>().empty()) {
      *arguments = Json::object();
      continue;
    }
    *arguments = parsed(*arguments, name + ": the arguments of a tool call", where);
  }
}

void check_parts(const Json& parts, const std::string& name, const std::string& where) {
  for (const Json& part : parts) {
    const bool typed = part.is_object() && part.contains("type") && part["type"].is_string();
    TESSERA_CHECK(typed && part["type"] == "text" && part.contains("text") && part["text"].is_string(),
                  ErrorKind::kFormat,
                  "[data.read] {}: {}: a part of its content is {}, wanted a part of type text with a "
                  "'text': these models read only text.",
                  where, name, typed ? "of type " + quote(part["type"].get_ref<const std::string&>()) : describe(part));
  }
}

// In OpenAI's API a message with tool calls may have a null content or no content. Templates expect text, so
// check_content() then sets an empty text.
void check_content(Json& message, const std::string& name, const std::string& where) {
  const auto content = message.find("content");
  const bool absent = content == message.end() || content->is_null();
  if (absent && message.contains("tool_calls")) {
    message["content"] = "";
  } else if (!absent && content->is_array()) {
    check_parts(*content, name, where);
  } else {
    TESSERA_CHECK(!absent && content->is_string(), ErrorKind::kFormat,
                  "[data.read] {}: {}: 'content' is {}, wanted text, or parts of type text.", where, name,
                  absent ? "missing" : describe(*content));
  }
}

Json from_sharegpt(const Json& turn, const std::string& name, const std::string& where) {
  TESSERA_CHECK(turn["from"].is_string() && turn.contains("value") && turn["value"].is_string(), ErrorKind::kFormat,
                "[data.read] {}: {}: 'from' and 'value' must be strings.", where, name);
  static const std::map<std::string, std::string> kRoles = {{"human", "user"},
                                                            {"user", "user"},
                                                            {"gpt", "assistant"},
                                                            {"assistant", "assistant"},
                                                            {"chatgpt", "assistant"},
                                                            {"bing", "assistant"},
                                                            {"bard", "assistant"},
                                                            {"model", "assistant"},
                                                            {"bot", "assistant"},
                                                            {"system", "system"},
                                                            {"tool", "tool"},
                                                            {"observation", "tool"},
                                                            {"function_response", "tool"},
                                                            {"function_call", "assistant"}};
  const auto& from = turn["from"].get_ref<const std::string&>();
  const auto role = kRoles.find(from);
  TESSERA_CHECK(role != kRoles.end(), ErrorKind::kFormat,
                "[data.read] {}: {} is from {}, wanted human, gpt, system, tool, function_call or observation.", where,
                name, quote(from));
  Json message = {{"role", role->second}};
  if (from == "function_call") {
    Json call = parsed(turn["value"], name + ": the function call", where);
    TESSERA_CHECK(call.is_object() && call.contains("name"), ErrorKind::kFormat,
                  "[data.read] {}: {}: a function call is {}, wanted an object with 'name' and 'arguments'.", where,
                  name, describe(call));
    message["content"] = "";
    message["tool_calls"] = Json::array({{{"type", "function"}, {"function", std::move(call)}}});
  } else {
    message["content"] = turn["value"];
  }
  // Copies the keys that can exclude a message from training, which excluded_messages() reads, from `turn` to
  // `message`.
  for (const char* key : {"weight", "train"}) {
    if (turn.contains(key)) message[key] = turn[key];
  }
  return message;
}

}  // namespace

Json openai_messages(const Json& list, const char* column, const std::string& where) {
  TESSERA_CHECK(list.is_array() && !list.empty(), ErrorKind::kFormat,
                "[data.read] {}: {} is {}, wanted an array of at least one message.", where, quote(column),
                list.is_array() ? "empty" : list.type_name());
  Json messages = Json::array();
  for (size_t i = 0; i < list.size(); ++i) {
    const std::string name = fmt::format("message {} of {}", i, quote(column));
    Json message = list[i];
    const bool role = message.is_object() && message.contains("role") && message["role"].is_string();
    if (!role && message.is_object() && message.contains("from")) {
      message = from_sharegpt(message, name, where);
    } else {
      TESSERA_CHECK(role, ErrorKind::kFormat, "[data.read] {}: {} is not an object with a string 'role'.", where, name);
    }
    check_content(message, name, where);
    parse_arguments(message, name, where);
    messages.push_back(std::move(message));
  }
  return messages;
}

std::vector<uint8_t> excluded_messages(const Json& messages) {
  std::vector<uint8_t> is_excluded(messages.size(), 0);
  for (size_t i = 0; i < messages.size(); ++i) {
    const Json& message = messages[i];
    const auto weight = message.find("weight"), train = message.find("train");
    if (weight != message.end() && weight->is_number() && weight->get<double>() == 0) is_excluded[i] = 1;
    if (train != message.end() && train->is_boolean() && !train->get<bool>()) is_excluded[i] = 1;
  }
  return is_excluded;
}

void add_tools(const Json& row, Json& chat, const std::string& where) {
  const auto tools = row.find("tools");
  if (tools == row.end() || tools->is_null()) return;
  if (!tools->is_string()) {
    chat["tools"] = *tools;
  } else if (!tools->get_ref<const std::string&>().empty()) {
    chat["tools"] = parsed(*tools, "'tools'", where);
  }
}

}  // namespace tessera::data
