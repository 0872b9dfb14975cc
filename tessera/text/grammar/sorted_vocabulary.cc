#include "tessera/text/grammar/sorted_vocabulary.h"

#include <algorithm>

namespace tessera::text {

SortedVocabulary::SortedVocabulary(const Tokenizer& tokenizer) : index_of_id_(tokenizer.vocab_size(), -1) {
  for (size_t i = 0; i < size(); ++i) {
    const auto id = static_cast<TokenId>(i);
    if (tokenizer.is_special(id)) continue;
    if (auto bytes = tokenizer.token_bytes(id); !bytes.empty()) tokens_.push_back({std::move(bytes), id, 0});
  }
  std::ranges::sort(
      tokens_, [](const Token& a, const Token& b) { return a.bytes != b.bytes ? a.bytes < b.bytes : a.id < b.id; });
  for (size_t i = 0; i < tokens_.size(); ++i) {
    auto& token = tokens_[i];
    index_of_id_[static_cast<size_t>(token.id)] = static_cast<int32_t>(i);
    if (i == 0) continue;
    const auto& before = tokens_[i - 1].bytes;
    const auto ends = std::mismatch(before.begin(), before.end(), token.bytes.begin(), token.bytes.end());
    token.common_prefix_bytes = static_cast<size_t>(ends.first - before.begin());
  }
}

const std::string& SortedVocabulary::bytes(int64_t id) const {
  static const std::string none;
  if (id < 0 || static_cast<size_t>(id) >= index_of_id_.size()) return none;
  const int32_t index = index_of_id_[static_cast<size_t>(id)];
  return index < 0 ? none : tokens_[static_cast<size_t>(index)].bytes;
}

}  // namespace tessera::text
