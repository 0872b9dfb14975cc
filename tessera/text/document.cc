#include "tessera/text/document.h"

namespace tessera::text {

Document encode_document(const Tokenizer& tokenizer, std::string_view text) {
  Document document{tokenizer.encode(text)};
  auto& ids = document.ids;
  // Of two equal special tokens at the beginning, one is removed only if the text itself begins with the token and the
  // post-processor adds the token again. `own`, the text encoded without special tokens, shows the former. `added`, the
  // empty text encoded with special tokens, shows the latter.
  if (ids.size() < 2 || ids[0] != ids[1] || !tokenizer.is_special(ids[0])) return document;
  const auto own = tokenizer.encode(text, {.add_special_tokens = false});
  const auto added = tokenizer.encode("");
  if (own.empty() || own[0] != ids[0] || added.empty() || added[0] != ids[0]) return document;
  document.begins_with_bos = true;
  ids.erase(ids.begin());
  return document;
}

}  // namespace tessera::text
