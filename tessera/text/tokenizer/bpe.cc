#include "tessera/text/tokenizer/bpe.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <unordered_set>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/text/tokenizer/byte_level.h"
#include "tessera/text/tokenizer/unicode.h"

namespace tessera::text {
namespace {

constexpr std::string_view kSpaceMark = "\xE2\x96\x81";  // U+2581, SentencePiece's space
constexpr size_t kMaxJoined = 64;
constexpr size_t kShortWord = 40;  // symbols; for longer words a heap is faster than a linear scan

// Checks the vocabulary of an untrusted file. Ids are indices into tables, so one huge id must not allocate a huge
// table. Merges are stored by id, so no two tokens may have the same id.
std::vector<std::pair<std::string, int32_t>> checked_vocab(TokenizerFile& file) {
  const uint64_t limit = std::max<uint64_t>(1 << 20, file.vocab.size() * 8);
  std::vector<std::pair<std::string, int32_t>> tokens;
  tokens.reserve(file.vocab.size());
  for (auto& [token, id] : file.vocab) {
    TESSERA_CHECK(id < limit, ErrorKind::kFormat,
                  "[text.load] {}: model.vocab: token {} has id {}, wanted less than {}", file.name, quote(token, 60),
                  id, limit);
    tokens.emplace_back(std::move(token), static_cast<int32_t>(id));
  }
  file.vocab = {};
  std::vector<uint32_t> owners;  // by id: 1 + the index into `tokens` of the token with this id; 0: none
  for (uint32_t i = 0; i < tokens.size(); ++i) {
    const auto& [token, id] = tokens[i];
    if (static_cast<size_t>(id) >= owners.size()) owners.resize(std::max<size_t>(id + 1, tokens.size()));
    const uint32_t owner = owners[id];
    TESSERA_CHECK(owner == 0 || tokens[owner - 1].first == token, ErrorKind::kFormat,
                  "[text.load] {}: model.vocab: {} and {} both have id {}, wanted an id for each token", file.name,
                  quote(tokens[owner - 1].first, 60), quote(token, 60), id);
    owners[id] = i + 1;
  }
  return tokens;
}

}  // namespace

BpeModel::BpeModel(TokenizerFile& file, bool byte_level) : where_(file.name), byte_level_(byte_level) {
  TESSERA_CHECK(file.has_vocab, ErrorKind::kFormat,
                "[text.load] {}: model.vocab: found no object of tokens and ids, wanted one", where_);
  vocab_ = std::make_unique<TokenTable>(checked_vocab(file));
  read_options(file.root().at("model"));
  read_merges(file);
  build_unit_tables();
  if (!byte_level_ && prefix_.empty() && suffix_.empty() && !ignore_merges_) find_cut_points(file);
  file.merges = {};
}

void BpeModel::read_options(const JsonReader& model) {
  if (model.has("dropout")) {
    raise(ErrorKind::kFormat, "[text.load] {}: model.dropout is set, wanted null: encoding is deterministic here",
          where_);
  }
  fuse_unk_ = model.boolean("fuse_unk", false);
  byte_fallback_ = model.boolean("byte_fallback", false);
  ignore_merges_ = model.boolean("ignore_merges", false);
  prefix_ = model.string("continuing_subword_prefix", "");
  suffix_ = model.string("end_of_word_suffix", "");
  if (model.has("unk_token")) {
    const std::string unk = model.string("unk_token");
    unk_id_ = vocab_->find(unk);
    TESSERA_CHECK(unk_id_ != TokenTable::kNone, ErrorKind::kFormat,
                  "[text.load] {}: model.unk_token: {} is not in the vocabulary", where_, quote(unk, 60));
  }
  for (int byte = 0; byte < 256; ++byte) {
    fallback_ids_[byte] = byte_fallback_ ? vocab_->find(fmt::format("<0x{:02X}>", byte)) : TokenTable::kNone;
  }
}

void BpeModel::read_merges(TokenizerFile& file) {
  TESSERA_CHECK(file.merges.size() < std::numeric_limits<uint32_t>::max() / 4, ErrorKind::kFormat,
                "[text.load] {}: {} merges are too many", where_, file.merges.size());
  // A hash table with linear probing, at most half full: a lookup ends at an empty slot after a few steps.
  const size_t slots = std::bit_ceil(file.merges.size() * 2 + 2);
  merges_.assign(slots, {kNoMerge, 0, 0});
  merge_mask_ = slots - 1;
  merge_shift_ = static_cast<unsigned>(64 - std::countr_zero(slots));
  std::string product;
  for (uint32_t rank = 0; rank < file.merges.size(); ++rank) {
    const auto& [left, right] = file.merges[rank];
    const auto wanted_in_vocab = [&](std::string_view token) {
      const int32_t id = vocab_->find(token);
      TESSERA_CHECK(id != TokenTable::kNone, ErrorKind::kFormat,
                    "[text.load] {}: model.merges[{}]: {} is not in the vocabulary", where_, rank, quote(token, 60));
      return id;
    };
    const int32_t left_id = wanted_in_vocab(left), right_id = wanted_in_vocab(right);
    TESSERA_CHECK(right.size() >= prefix_.size(), ErrorKind::kFormat,
                  "[text.load] {}: model.merges[{}]: {} is shorter than continuing_subword_prefix", where_, rank,
                  quote(right, 60));
    product.assign(left).append(right, prefix_.size());
    const int32_t product_id = wanted_in_vocab(product);
    const uint64_t pair = uint64_t{static_cast<uint32_t>(left_id)} << 32 | static_cast<uint32_t>(right_id);
    size_t slot = (pair * 0x9E3779B97F4A7C15u) >> merge_shift_;
    while (merges_[slot].pair != kNoMerge && merges_[slot].pair != pair) slot = (slot + 1) & merge_mask_;
    merges_[slot] = {pair, rank, product_id};  // a later merge of the same pair replaces the earlier one
  }
}

void BpeModel::build_unit_tables() {
  const auto& alphabet = byte_alphabet();
  for (int byte = 0; byte < 256; ++byte) byte_ids_[byte] = vocab_->find(alphabet.utf8_of[byte]);
  char_pages_.resize(CharTable::kPages);
  for (const auto& [token, id] : vocab_->tokens()) {
    if (token.empty() || utf8_length(token[0]) != token.size()) continue;
    const uint32_t code = decode_utf8(token.data()).code;
    auto& page = char_pages_[code >> 8];
    if (!page) {
      page = std::make_unique<std::array<int32_t, 256>>();
      page->fill(TokenTable::kNone);
    }
    (*page)[code & 255] = id;
  }
}

// SentencePiece-style files have no pre-tokenizer, so a whole line is one word, which is too long for the word cache.
// Such a word may be split in front of U+2581 if no merge joins the symbols on both sides: the two sides are then
// merged independently, and the ids stay the same. If a merge joins the two sides, a character of the merge's product
// comes directly before a U+2581 of this product. `joined` collects these characters, and a word is not split between
// such a character and U+2581. This search needs symbols that are spelled like the text that they stand for. The
// unknown token and byte tokens are not, so no word is split if a merge of the file contains one of them.
void BpeModel::find_cut_points(const TokenizerFile& file) {
  const int32_t mark_id = vocab_->find(kSpaceMark);
  if (mark_id == TokenTable::kNone) return;
  // If the file has no unknown token and lacks a byte token, a character without a token may be dropped. If such a
  // character stands before U+2581 and is dropped, the character before it becomes the neighbour of U+2581.
  // segment_end() would then search joined_before_mark_ for the dropped character instead of the new neighbour. So
  // words are not split for such files.
  const bool all_fall_back = std::count(std::begin(fallback_ids_), std::end(fallback_ids_), TokenTable::kNone) == 0;
  if (unk_id_ == TokenTable::kNone && !all_fall_back) return;
  std::unordered_set<int32_t> respelled_tokens = {unk_id_};  // tokens that represent text other than their own spelling
  respelled_tokens.insert(std::begin(fallback_ids_), std::end(fallback_ids_));
  respelled_tokens.erase(TokenTable::kNone);
  std::unordered_set<uint32_t> joined;
  for (const auto& [left, right] : file.merges) {
    if (respelled_tokens.contains(vocab_->find(left)) || respelled_tokens.contains(vocab_->find(right))) return;
    const std::string product = left + right;
    for (size_t at = product.find(kSpaceMark, 1); at != std::string::npos; at = product.find(kSpaceMark, at + 1)) {
      joined.insert(decode_utf8(previous_char(product.data() + at)).code);
    }
    if (joined.size() > kMaxJoined) return;
  }
  joined_before_mark_.assign(joined.begin(), joined.end());
  std::ranges::sort(joined_before_mark_);
  cuts_ = true;
}

size_t BpeModel::segment_end(std::string_view word, size_t begin) const {
  if (!cuts_) return word.size();
  for (size_t at = begin + 1;; ++at) {
    const void* found = at < word.size() ? std::memchr(word.data() + at, kSpaceMark[0], word.size() - at) : nullptr;
    if (!found) return word.size();
    at = static_cast<size_t>(static_cast<const char*>(found) - word.data());
    if (word.substr(at, kSpaceMark.size()) != kSpaceMark) continue;
    const uint32_t before = decode_utf8(previous_char(word.data() + at)).code;
    if (!std::ranges::binary_search(joined_before_mark_, before)) return at;
  }
}

void BpeModel::encode(std::string_view word, size_t readable, BpeScratch& scratch, std::vector<int32_t>& ids) const {
  for (size_t begin = 0; begin < word.size();) {
    const size_t end = segment_end(word, begin);
    encode_segment(word.substr(begin, end - begin), readable - begin, scratch, ids);
    begin = end;
  }
}

void BpeModel::encode_segment(std::string_view segment, size_t readable, BpeScratch& scratch,
                              std::vector<int32_t>& ids) const {
  if (segment.size() > WordCache::kMaxBytes) {
    encode_symbols(segment, scratch);
    for (const auto& symbol : scratch.symbols) ids.push_back(symbol.id);
    return;
  }
  const auto key = WordCache::key_of(segment, readable);
  if (const auto* hit = scratch.cache.find(key)) {
    ids.insert(ids.end(), hit->ids, hit->ids + hit->count);
    return;
  }
  encode_symbols(segment, scratch);
  const size_t before = ids.size();
  for (const auto& symbol : scratch.symbols) ids.push_back(symbol.id);
  scratch.cache.insert(key, std::span(ids).subspan(before));
}

void BpeModel::encode_symbols(std::string_view word, BpeScratch& scratch) const {
  scratch.symbols.clear();
  scratch.dropped_bytes.clear();
  if (ignore_merges_) {
    std::string_view spelling = word;
    if (byte_level_) {
      scratch.spelled.clear();
      for (const char c : word) scratch.spelled += byte_alphabet().utf8_of[static_cast<unsigned char>(c)];
      spelling = scratch.spelled;
    }
    if (const int32_t id = vocab_->find(spelling); id != TokenTable::kNone) {
      scratch.symbols.push_back({id, static_cast<uint32_t>(word.size())});
      return;
    }
  }
  split_units(word, scratch);
  if (scratch.symbols.size() <= kShortWord) {
    merge_short(scratch);
  } else {
    merge_long(scratch);
  }
}

// Splits the word into symbols of one character (byte-level: one byte). A character that is not in the vocabulary
// becomes byte tokens if the file sets byte_fallback and has a byte token for each byte of the character; else it
// becomes the unknown token. If the file has no unknown token, the character is dropped, and its byte positions go to
// scratch.dropped_bytes.
void BpeModel::split_units(std::string_view word, BpeScratch& scratch) const {
  auto& symbols = scratch.symbols;
  BpeSymbol unknown = {TokenTable::kNone, 0};  // pending unknown token; with fuse_unk it grows with unknown neighbours
  std::string& spelled = scratch.spelled;
  const bool affixes = !prefix_.empty() || !suffix_.empty();
  for (size_t at = 0; at < word.size();) {
    const Utf8Character c =
        byte_level_ ? Utf8Character{static_cast<unsigned char>(word[at]), 1} : decode_utf8(word.data() + at);
    std::string_view unit = byte_level_ ? std::string_view(byte_alphabet().utf8_of[c.code]) : word.substr(at, c.length);
    int32_t id;
    if (affixes) {
      spelled.assign(at > 0 ? prefix_ : std::string()).append(unit);
      if (at + c.length == word.size()) spelled += suffix_;
      unit = spelled;
      id = vocab_->find(unit);
    } else {
      id = byte_level_ ? byte_ids_[c.code] : id_of_char(c.code);
    }
    at += c.length;
    if (id != TokenTable::kNone) {
      if (unknown.bytes > 0) symbols.push_back(unknown);
      unknown.bytes = 0;
      symbols.push_back({id, c.length});
      continue;
    }
    const auto has_fallback = [&](char byte) {
      return fallback_ids_[static_cast<unsigned char>(byte)] != TokenTable::kNone;
    };
    if (byte_fallback_ && std::ranges::all_of(unit, has_fallback)) {
      for (const char byte : unit) symbols.push_back({fallback_ids_[static_cast<unsigned char>(byte)], 1});
      continue;  // as in the `tokenizers` library, a pending unknown token comes after these byte tokens
    }
    if (unk_id_ == TokenTable::kNone) {
      for (size_t byte = at - c.length; byte < at; ++byte) scratch.dropped_bytes.push_back(static_cast<uint32_t>(byte));
      continue;
    }
    if (unknown.bytes > 0 && !fuse_unk_) {
      symbols.push_back(unknown);
      unknown.bytes = 0;
    }
    unknown = {unk_id_, unknown.bytes + c.length};
  }
  if (unknown.bytes > 0) symbols.push_back(unknown);
}

// Merges with a linear scan for the lowest rank, O(n^2) with small constants. ranked[i] is merge_of() of symbols i and
// i + 1; a merge changes only the two entries next to it. Strict < finds the leftmost of equal ranks.
void BpeModel::merge_short(BpeScratch& scratch) const {
  auto& symbols = scratch.symbols;
  size_t count = symbols.size();
  if (count < 2) return;
  uint64_t ranked[kShortWord];
  for (size_t i = 0; i + 1 < count; ++i) ranked[i] = merge_of(symbols[i].id, symbols[i + 1].id);
  BpeSymbol* s = symbols.data();
  while (count > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < count; ++i) {
      if (ranked[i] < ranked[best]) best = i;
    }
    if (ranked[best] == kNoMerge) break;
    s[best] = {static_cast<int32_t>(ranked[best]), s[best].bytes + s[best + 1].bytes};
    std::copy(s + best + 2, s + count, s + best + 1);
    std::copy(ranked + best + 1, ranked + count - 1, ranked + best);
    --count;
    if (best > 0) ranked[best - 1] = merge_of(s[best - 1].id, s[best].id);
    if (best + 1 < count) ranked[best] = merge_of(s[best].id, s[best + 1].id);
  }
  symbols.resize(count);
}

// Merges with a heap in O(n log n). Symbols form a doubly linked list (next, previous); a symbol that was merged into
// its left neighbour has 0 bytes and is erased at the end. Heap entries are not removed when their pair changes. A
// popped entry is valid if the pair at its position still has the entry's rank: ranks differ between pairs, so an equal
// rank means an equal pair.
void BpeModel::merge_long(BpeScratch& scratch) const {
  auto& symbols = scratch.symbols;
  auto& heap = scratch.ranked;
  const auto count = static_cast<uint32_t>(symbols.size());
  constexpr uint32_t kEnd = ~uint32_t{0};
  scratch.next.resize(count);
  scratch.previous.resize(count);
  heap.clear();
  // Heap entries are rank << 32 | position of the left symbol, so the leftmost of equal ranks comes first.
  const auto entry_of = [&](uint32_t left, uint32_t right) {
    const uint64_t merge = merge_of(symbols[left].id, symbols[right].id);
    return merge == kNoMerge ? kNoMerge : (merge & ~uint64_t{0xFFFFFFFF}) | left;
  };
  for (uint32_t i = 0; i < count; ++i) {
    scratch.previous[i] = i == 0 ? kEnd : i - 1;
    scratch.next[i] = i + 1 == count ? kEnd : i + 1;
    if (i + 1 == count) break;
    if (const uint64_t entry = entry_of(i, i + 1); entry != kNoMerge) heap.push_back(entry);
  }
  std::make_heap(heap.begin(), heap.end(), std::greater<>());
  const auto push = [&](uint32_t left, uint32_t right) {
    if (left == kEnd || right == kEnd) return;
    const uint64_t entry = entry_of(left, right);
    if (entry == kNoMerge) return;
    heap.push_back(entry);
    std::push_heap(heap.begin(), heap.end(), std::greater<>());
  };
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    const uint64_t entry = heap.back();
    heap.pop_back();
    const auto left = static_cast<uint32_t>(entry);
    if (symbols[left].bytes == 0 || scratch.next[left] == kEnd) continue;
    const uint32_t right = scratch.next[left];
    const uint64_t merge = merge_of(symbols[left].id, symbols[right].id);
    if (merge == kNoMerge || merge >> 32 != entry >> 32) continue;
    symbols[left] = {static_cast<int32_t>(merge), symbols[left].bytes + symbols[right].bytes};
    symbols[right].bytes = 0;
    scratch.next[left] = scratch.next[right];
    if (scratch.next[left] != kEnd) scratch.previous[scratch.next[left]] = left;
    push(scratch.previous[left], left);
    push(left, scratch.next[left]);
  }
  std::erase_if(symbols, [](const BpeSymbol& symbol) { return symbol.bytes == 0; });
}

}  // namespace tessera::text
