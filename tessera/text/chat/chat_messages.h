// Messages in the form that a template reads.
//
//   const Json messages = messages_for(chat, openai_messages(...));
//   chat.render(messages, true);
//
// OpenAI's API lets a content be a text or a list of parts, and calls the one who rules over the user "developer".
// Templates read the one, the other, or both. Thread-safe.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "tessera/text/chat/chat_template.h"

namespace tessera::text {

// A content in parts stays as it is for a template that prints parts, and becomes one text for another; a text becomes
// one part for a template that prints parts only. The role "developer" becomes "system" where the template does not
// name it. `messages` is an array of objects; parts are of type text.
nlohmann::ordered_json messages_for(const ChatTemplate& chat, nlohmann::ordered_json messages);

// What ChatTemplate::content_form answers: renders small conversations. A role that the template refuses reads texts.
ContentForm find_content_form(const ChatTemplate& chat, const std::string& role);

}  // namespace tessera::text
