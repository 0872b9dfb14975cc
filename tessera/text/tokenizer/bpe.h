// The BPE model converts one pre-token to ids. It applies the merge with the lowest rank first, and the leftmost of
// several merges with this rank.
//
//   BpeModel model(file, /*byte_level=*/true);
//   BpeScratch scratch;
//   model.encode(word, readable, scratch, ids);
//
// A byte-level model takes raw bytes. Its tables already contain the last step of the pre-tokenizer (ByteLevel), which
// spells each byte as a printable character. A BpeModel is immutable and thread-safe; a BpeScratch belongs to one
// thread at a time.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/text/tokenizer/token_table.h"
#include "tessera/text/tokenizer/tokenizer_file.h"
#include "tessera/text/tokenizer/word_cache.h"

namespace tessera::text {

struct BpeSymbol {
  int32_t id;
  uint32_t bytes;  // bytes of the pre-token that the symbol covers, without those in BpeScratch::dropped_bytes
};

struct BpeScratch {
  WordCache cache;
  std::vector<BpeSymbol> symbols;
  std::vector<uint32_t> dropped_bytes;  // ascending positions of the bytes of the pre-token that no symbol covers
  std::vector<uint64_t> ranked;         // the heap of merge_long()
  std::vector<uint32_t> next, previous;
  std::string spelled;
};

class BpeModel {
 public:
  BpeModel(TokenizerFile& file, bool byte_level);

  // Appends the ids of `word`. The caller guarantees that `readable` bytes from word.data() on may be read; the lookup
  // in the word cache is faster when these are at least WordCache::kMaxBytes.
  void encode(std::string_view word, size_t readable, BpeScratch& scratch, std::vector<int32_t>& ids) const;
  // Encodes `word` to symbols. A symbol has an id and the number of bytes that it covers, from which the caller
  // computes offsets. The result is in scratch.symbols and scratch.dropped_bytes.
  void encode_symbols(std::string_view word, BpeScratch& scratch) const;

  const TokenTable& vocab() const { return *vocab_; }

 private:
  struct Merge {
    uint64_t pair;
    uint32_t rank;
    int32_t product;
  };
  static constexpr uint64_t kNoMerge = ~uint64_t{0};

  void read_options(const JsonReader& model);
  void read_merges(TokenizerFile& file);
  void build_unit_tables();
  void find_cut_points(const TokenizerFile& file);

  // Returns (rank << 32 | id of the product) of the merge of the tokens `left` and `right`; kNoMerge if they have no
  // merge.
  uint64_t merge_of(int32_t left, int32_t right) const {
    const uint64_t pair = uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
    for (size_t slot = (pair * 0x9E3779B97F4A7C15u) >> merge_shift_;; slot = (slot + 1) & merge_mask_) {
      const Merge& merge = merges_[slot];
      if (merge.pair == pair) return uint64_t{merge.rank} << 32 | static_cast<uint32_t>(merge.product);
      if (merge.pair == kNoMerge) return kNoMerge;
    }
  }
  int32_t id_of_char(uint32_t code) const {
    const auto& page = char_pages_[code >> 8];
    return page ? (*page)[code & 255] : TokenTable::kNone;
  }
  void split_units(std::string_view word, BpeScratch& scratch) const;  // fills scratch.symbols
  void merge_short(BpeScratch& scratch) const;                         // merges scratch.symbols: at most kShortWord
  void merge_long(BpeScratch& scratch) const;                          // merges scratch.symbols: any number
  // A segment is a part of a word that is encoded and cached by itself. Words are split into segments at the places
  // that the comment of cuts_ describes.
  void encode_segment(std::string_view segment, size_t readable, BpeScratch& scratch, std::vector<int32_t>& ids) const;
  size_t segment_end(std::string_view word, size_t begin) const;

  std::string where_;
  bool byte_level_;
  bool fuse_unk_ = false, ignore_merges_ = false;
  bool byte_fallback_ = false;
  int32_t unk_id_ = TokenTable::kNone;
  std::string prefix_, suffix_;  // continuing_subword_prefix, end_of_word_suffix
  std::unique_ptr<TokenTable> vocab_;
  int32_t byte_ids_[256];                                              // byte-level: the id of each byte's character
  int32_t fallback_ids_[256];                                          // the ids of "<0x00>" to "<0xFF>"
  std::vector<std::unique_ptr<std::array<int32_t, 256>>> char_pages_;  // ids of one-character tokens by code point
  std::vector<Merge> merges_;  // open-addressing hash table by pair; the size is a power of two
  unsigned merge_shift_ = 63;
  size_t merge_mask_ = 1;
  // When cuts_ is set, a word may be split in front of U+2581 and the parts encoded (and cached) separately, except
  // after the characters in joined_before_mark_: only these have a merge that joins them with a U+2581 behind them.
  bool cuts_ = false;
  std::vector<uint32_t> joined_before_mark_;  // sorted
};

}  // namespace tessera::text
