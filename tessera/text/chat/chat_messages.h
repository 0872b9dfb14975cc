// Converts chat messages to the form that a chat template can read.
//
//   const Json messages = adapt_messages(chat, openai_messages(...));
//   chat.render(messages, true);
//
// In OpenAI's API the content of a message is a string or a list of parts, and instructions that have precedence over
// the user's come in the role "developer". A chat template reads strings, lists of parts, or both. Thread-safe.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "tessera/text/chat/chat_template.h"

namespace tessera::text {

// `messages` is an array of objects; all parts are of type "text". A list of parts is kept for a template that prints
// all parts; for a template that prints only the first part the texts are joined into one part, and for a template that
// prints strings only they become one string. A string becomes one part for a template that prints parts only. The role
// "developer" becomes "system" unless the template contains the string literal "developer".
nlohmann::ordered_json adapt_messages(const ChatTemplate& chat, nlohmann::ordered_json messages);

// Computes the result of ChatTemplate::content_form by rendering small conversations. The result is reads_text for a
// role that the template refuses.
ContentForm find_content_form(const ChatTemplate& chat, const std::string& role);

}  // namespace tessera::text
