// Converts conversations to the form that chat templates expect.
//
//   Json messages = openai_messages(row.at("conversations"), "conversations", where);  // [{"role", "content", ...}]
//
// Pure, thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/base/text/json.h"

namespace tessera::data {

// Converts a list of OpenAI's messages (role, content) or ShareGPT's (from, value) to OpenAI's form. ShareGPT's roles
// are renamed (human: user, gpt: assistant, observation: tool, function_call: a tool call of the assistant). Tool call
// arguments that are JSON text are parsed, as transformers asks for. A content stays a text or a list of parts of type
// text (text/chat/chat_messages.h converts it for a template); with tool calls it may be missing and becomes "". Error
// kFormat, which names `where`, `column` and the message: not a list, an empty list, no role, an unknown ShareGPT role,
// arguments that are not JSON.
Json openai_messages(const Json& list, const char* column, const std::string& where);

// 1 for each message that is excluded from training: "weight": 0 (OpenAI) or "train": false (axolotl).
std::vector<uint8_t> excluded_messages(const Json& messages);

// Adds the row's "tools" to `chat`. A text is parsed as JSON; error kFormat when it is not JSON.
void add_tools(const Json& row, Json& chat, const std::string& where);

}  // namespace tessera::data
