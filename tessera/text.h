// Tokenizers and chat templates from Hugging Face model folders, and grammars from JSON Schemas. This layer does not
// use libtorch.
//
//   const auto tokenizer = text::Tokenizer::from_folder("SmolLM2-135M-Instruct");
#pragma once

#include "tessera/base/error.h"
#include "tessera/text/chat/chat_messages.h"
#include "tessera/text/chat/chat_prompt.h"
#include "tessera/text/chat/chat_template.h"
#include "tessera/text/document.h"
#include "tessera/text/grammar/json_schema.h"
#include "tessera/text/grammar/token_constraint.h"
#include "tessera/text/tokenizer.h"
