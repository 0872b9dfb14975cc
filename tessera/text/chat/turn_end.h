// Finds the token with which a chat template ends a turn.
//
//   const auto token = turn_end_token(chat, tokenizer);        // Qwen: <|im_end|>, Gemma: <end_of_turn>
#pragma once

#include <optional>

#include "tessera/text/chat/chat_template.h"
#include "tessera/text/tokenizer.h"

namespace tessera::text {

// The first special or added token that the template prints after the assistant's content. In a format without a
// turn-end token (GLM), the result is the first such token between this content and the next message. nullopt when the
// template prints no such token, and when it refuses a chat of one question and one answer. Thread-safe.
std::optional<TokenId> turn_end_token(const ChatTemplate& chat, const Tokenizer& tokenizer);

}  // namespace tessera::text
