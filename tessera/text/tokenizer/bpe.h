// The BPE model: one pre-token to ids, by lowest merge rank first, leftmost first among equals.
//
//   BpeModel model(file, /*byte_level=*/true);
//   BpeScratch scratch;
//   model.encode(word, readable, scratch, ids);
//
// Byte-level models take raw bytes (the pre-tokenizer's last step, spelling bytes as characters, is folded into the
// tables). A BpeModel is immutable and thread-safe; a BpeScratch belongs to one thread at a time.
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
  uint32_t bytes;  // of the pre-token that it covers, those in BpeScratch::lost not counted
};

struct BpeScratch {
  WordCache cache;
  std::vector<BpeSymbol> symbols;
  std::vector<uint32_t> lost;    // places of the pre-token's bytes that no symbol stands for, rising
  std::vector<uint64_t> ranked;  // rank and product of each neighbouring pair, or the heap of long words
  std::vector<uint32_t> next, previous;
  std::string spelled;
};

class BpeModel {
 public:
  BpeModel(TokenizerFile& file, bool byte_level);

  // Appends the ids of `word`. `readable` bytes from word.data() on may be read.
  void encode(std::string_view word, size_t readable, BpeScratch& scratch, std::vector<int32_t>& ids) const;
  // The same as symbols with lengths, in scratch.symbols and scratch.lost.
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

  // rank << 32 | product, or kNoMerge.
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
  void split_units(std::string_view word, BpeScratch& scratch) const;
  void merge_short(BpeScratch& scratch) const;
  void merge_long(BpeScratch& scratch) const;
  void encode_segment(std::string_view segment, size_t readable, BpeScratch& scratch, std::vector<int32_t>& ids) const;
  size_t segment_end(std::string_view word, size_t begin) const;

  std::string where_;
  bool byte_level_;
  bool fuse_unk_ = false, ignore_merges_ = false;
  bool byte_fallback_ = false;
  int32_t unk_id_ = TokenTable::kNone;
  std::string prefix_, suffix_;  // continuing_subword_prefix, end_of_word_suffix
  std::unique_ptr<TokenTable> vocab_;
  int32_t byte_ids_[256];      // byte-level: the id of each byte's character
  int32_t fallback_ids_[256];  // of "<0x00>" to "<0xFF>"
  std::vector<std::unique_ptr<std::array<int32_t, 256>>> char_pages_;
  std::vector<Merge> merges_;
  unsigned merge_shift_ = 63;
  size_t merge_mask_ = 1;
  // No merge joins U+2581 with a character before it, but for these: words may be cut there, and the parts cached.
  bool cuts_ = false;
  std::vector<uint32_t> joined_before_mark_;  // sorted
};

}  // namespace tessera::text
