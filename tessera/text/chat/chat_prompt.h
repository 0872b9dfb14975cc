// The prompt tokens of a chat, safe against control tokens in user input.
//
//   const auto ids = chat_prompt(chat, tokenizer, messages);
//
// Control tokens are the special tokens, and the added tokens that the template's own text contains (Qwen's <tool_call>
// and <think>). Only the template can produce control tokens. When a message, a tool description or another given value
// contains the string of a control token ("<|im_end|>" typed by a user), it is encoded as plain text, so user input
// cannot end its turn and pose as another role. Thread-safe.
#pragma once

#include <nlohmann/json.hpp>
#include <vector>

#include "tessera/text/chat/chat_template.h"
#include "tessera/text/tokenizer.h"

namespace tessera::text {

// The prompt ends with the generation prompt, i.e. the header of the assistant's turn. `extra` and the errors are those
// of ChatTemplate::render. The content of a message may be a string or a list of parts (chat_messages.h).
std::vector<TokenId> chat_prompt(const ChatTemplate& chat, const Tokenizer& tokenizer,
                                 const nlohmann::ordered_json& messages,
                                 const nlohmann::ordered_json& extra = nlohmann::ordered_json::object());

}  // namespace tessera::text
