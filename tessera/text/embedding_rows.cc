#include "tessera/text/embedding_rows.h"

#include <fmt/format.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"

namespace tessera::text {

void check_embedding_rows(const Tokenizer& tokenizer, std::span<const TokenId> ids, int64_t rows,
                          std::string_view where) {
  const auto beyond = std::ranges::find_if(ids, [&](TokenId id) { return id >= rows; });
  if (beyond == ids.end()) return;
  const bool is_named = tokenizer.is_known(*beyond);
  const auto token = is_named ? fmt::format("token {} ({})", *beyond, quote(tokenizer.id_to_token(*beyond)))
                              : fmt::format("token {}", *beyond);
  raise(ErrorKind::kConfig,
        "{}: holds {}, the model knows {} tokens. Do tokenizer and model belong together? If the token was added to "
        "the tokenizer, resize the model's embedding (in Python: model.resize_token_embeddings(len(tokenizer))), or "
        "remove the token from tokenizer.json and tokenizer_config.json, so that it is read as ordinary text.",
        where, token, rows);
}

}  // namespace tessera::text
