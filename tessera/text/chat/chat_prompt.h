// The tokens that a model reads of a chat.
//
//   const auto ids = chat_prompt(chat, tokenizer, messages);
//
// Control tokens are those that the template writes: special tokens, and added tokens that are part of the template's
// own text (Qwen's <tool_call> and <think>). One that a message, a tool's description or a further value spells out
// ("<|im_end|>" typed by a user) is text, so that none of them ends a turn and speaks as another. Thread-safe.
#pragma once

#include <nlohmann/json.hpp>
#include <vector>

#include "tessera/text/chat/chat_template.h"
#include "tessera/text/tokenizer.h"

namespace tessera::text {

// With the beginning of the assistant's answer. Errors as ChatTemplate::render's; `extra` as there. The messages may
// have their content in any form (chat_messages.h).
std::vector<TokenId> chat_prompt(const ChatTemplate& chat, const Tokenizer& tokenizer,
                                 const nlohmann::ordered_json& messages,
                                 const nlohmann::ordered_json& extra = nlohmann::ordered_json::object());

}  // namespace tessera::text
