#include "tessera/text/chat/chat_messages.h"

#include <nlohmann/json.hpp>
#include <string>

#include "tessera/base/text/json.h"

namespace tessera::text {
namespace {

constexpr const char* kFirst = "qfirstq";
constexpr const char* kSecond = "qsecondq";
constexpr const char* kUnread = "qunreadq";  // the value of a key that no template reads

Json part(const std::string& text) { return {{"type", "text"}, {"text", text}}; }

// A conversation with one message of `role` that has `content`. The content of the other messages is a list of one text
// part if `others_in_parts` is true, else a string. A "tool" message comes after an assistant message with a tool call,
// as templates require.
Json probe_conversation(const std::string& role, const Json& content, bool others_in_parts) {
  const auto text = [&](const char* words) { return others_in_parts ? Json::array({part(words)}) : Json(words); };
  const Json user = {{"role", "user"}, {"content", text("a")}};
  Json message = {{"role", role}, {"content", content}};
  if (role == "user") return Json::array({message});
  if (role == "assistant") return Json::array({user, message, user});
  if (role != "tool") return Json::array({message, user});
  const Json call = {
      {"type", "function"}, {"id", "call00001"}, {"function", {{"name", "f"}, {"arguments", Json::object()}}}};
  message["tool_call_id"] = "call00001";
  message["name"] = "f";
  const Json caller = {{"role", "assistant"}, {"content", ""}, {"tool_calls", Json::array({call})}};
  return Json::array({user, caller, message});
}

// The text that the template prints for the conversation of probe_conversation(); empty when the template refuses the
// conversation. A template that reads only strings, or only lists of parts, may refuse the messages around `content` in
// the other form. So both values of `others_in_parts` are tried.
std::string rendered_text(const ChatTemplate& chat, const std::string& role, const Json& content) {
  for (const bool others_in_parts : {false, true}) {
    const auto messages = probe_conversation(role, content, others_in_parts);
    if (auto text = chat.try_render(messages, /*add_generation_prompt=*/false, Json::object())) return std::move(*text);
  }
  return "";
}

bool holds(const std::string& text, const char* word) { return text.find(word) != std::string::npos; }

}  // namespace

ContentForm find_content_form(const ChatTemplate& chat, const std::string& role) {
  ContentForm form;
  const bool prints_text = holds(rendered_text(chat, role, kFirst), kFirst);
  Json first = part(kFirst);
  first["unread"] = kUnread;
  const auto parts = rendered_text(chat, role, Json::array({first, part(kSecond)}));
  // A template that reads only strings prints a list of parts as Python's str() does, with all keys and values of each
  // part. So its output contains kUnread, the value of the key "unread" of the part `first`. A template that reads
  // parts prints only the texts of the parts.
  form.reads_parts = holds(parts, kFirst) && !holds(parts, kUnread);
  form.reads_all_parts = form.reads_parts && holds(parts, kSecond);
  form.reads_text = prints_text || !form.reads_parts;
  return form;
}

Json adapt_messages(const ChatTemplate& chat, Json messages) {
  for (auto& message : messages) {
    if (!message.is_object() || !message.contains("role") || !message["role"].is_string()) continue;
    if (message["role"] == "developer" && !chat.has_literal("developer")) message["role"] = "system";
    const auto content = message.find("content");
    if (content == message.end() || !(content->is_string() || content->is_array())) continue;
    const auto form = chat.content_form(message["role"].get_ref<const std::string&>());
    if (content->is_string()) {
      if (!form.reads_text) *content = Json::array({part(content->get<std::string>())});
      continue;
    }
    if (form.reads_all_parts || (form.reads_parts && content->size() == 1)) continue;
    std::string text;
    for (const Json& each : *content) {
      if (each.is_object() && each.contains("text") && each["text"].is_string()) {
        text += each["text"].get_ref<const std::string&>();
      }
    }
    *content = form.reads_parts ? Json::array({part(text)}) : Json(text);
  }
  return messages;
}

}  // namespace tessera::text
