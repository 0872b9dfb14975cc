// The token that ends a turn of a chat, as the chat template has it.
//
//   const auto token = turn_end_token(chat, tokenizer);        // Qwen: <|im_end|>, Gemma: <end_of_turn>
#pragma once

#include <optional>

#include "tessera/text/chat/chat_template.h"
#include "tessera/text/tokenizer.h"

namespace tessera::text {

// The first special or added token that the template prints behind an assistant's content. Where a turn has no end of
// its own, as in GLM's chats, the first one in front of the next message. Nothing where no such token is printed, and
// for a template that refuses a chat of one question and one answer. Thread-safe.
std::optional<TokenId> turn_end_token(const ChatTemplate& chat, const Tokenizer& tokenizer);

}  // namespace tessera::text
