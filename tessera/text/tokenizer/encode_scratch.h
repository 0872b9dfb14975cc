// The buffers and the word cache of one encode call. A pool keeps them between calls; each concurrent caller has its
// own.
//
//   const auto lease = pool.acquire();      // thread-safe; returned to the pool at the end of the scope
//   lease->ids...
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "tessera/text/tokenizer/added_tokens.h"
#include "tessera/text/tokenizer/bpe.h"
#include "tessera/text/tokenizer/normalizer.h"
#include "tessera/text/tokenizer/pre_tokenizer.h"

namespace tessera::text {

struct EncodeScratch {
  BpeScratch bpe;
  NormalizeScratch normalize;
  PreTokens tokens;
  AlignedText input, normalized;
  std::vector<TextSegment> raw_parts, normalized_parts;

  size_t bytes() const {
    return tokens.pieces.capacity() * sizeof(Span) + tokens.cut.capacity() * sizeof(Span) +
           tokens.storage.text.capacity() + tokens.storage.origins.capacity() * sizeof(Span) +
           normalized.text.capacity() + normalize.other.text.capacity() +
           (normalized.origins.capacity() + input.origins.capacity()) * sizeof(Span) +
           bpe.symbols.capacity() * sizeof(BpeSymbol) + bpe.dropped_bytes.capacity() * sizeof(uint32_t);
  }
};

class ScratchPool {
 public:
  struct ScratchReleaser {
    ScratchPool* pool;
    void operator()(EncodeScratch* scratch) const { pool->release_scratch(std::unique_ptr<EncodeScratch>(scratch)); }
  };
  using Lease = std::unique_ptr<EncodeScratch, ScratchReleaser>;

  Lease acquire() {
    std::unique_ptr<EncodeScratch> scratch;
    {
      const std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        scratch = std::move(free_.back());
        free_.pop_back();
      }
    }
    if (!scratch) scratch = std::make_unique<EncodeScratch>();
    return Lease(scratch.release(), ScratchReleaser{this});
  }

 private:
  static constexpr size_t kMaxKept = 64;
  static constexpr size_t kMaxKeptBytes = size_t{64} << 20;  // larger buffers are freed, not kept in the pool

  void release_scratch(std::unique_ptr<EncodeScratch> scratch) {
    if (scratch->bytes() > kMaxKeptBytes) return;
    const std::lock_guard lock(mutex_);
    if (free_.size() < kMaxKept) free_.push_back(std::move(scratch));
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<EncodeScratch>> free_;
};

}  // namespace tessera::text
