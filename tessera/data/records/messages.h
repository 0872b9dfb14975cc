// Conversations as chat templates take them.
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

// A list of OpenAI's messages (role, content) or ShareGPT's (from, value) as OpenAI's. ShareGPT's roles get their usual
// names (human: user, gpt: assistant, observation: tool, function_call: an assistant's tool call). Arguments of tool
// calls that are text become the JSON that it is, as transformers asks for. A content stays a text or parts of type
// text (text/chat/chat_messages.h makes of it what a template reads); beside tool calls it may be missing, and becomes
// "". Error kFormat, which names `where`, `column` and the message: no list, an empty one, no role, a role that
// ShareGPT has not, arguments that are no JSON.
Json openai_messages(const Json& list, const char* column, const std::string& where);

// 1 for each message with "weight": 0 (OpenAI's) or "train": false (axolotl's).
std::vector<uint8_t> silent_messages(const Json& messages);

// Puts the row's "tools" into `chat`; text is taken for the JSON that it is. Error kFormat when it is none.
void add_tools(const Json& row, Json& chat, const std::string& where);

}  // namespace tessera::data
