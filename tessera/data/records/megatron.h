// Reads Megatron's pairs of files: NAME.bin has the token ids of all documents one after another, NAME.idx the position
// and length of each sequence. Supported is the output of Megatron's preprocess_data.py: version 1, ids of 16 bits
// (unsigned) or 32 bits.
//
//   MegatronIndex index = MegatronIndex::open("corpus_text_document.idx");
//   for (int64_t i = 0; i < index.documents(); ++i) std::vector<int32_t> ids = index.document(i);
//
// The index is checked against the size of the .bin before any id is read. One object belongs to one thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <vector>

#include "tessera/base/files/mapped_file.h"
#include "tessera/base/files/unique_fd.h"

namespace tessera::data {

class MegatronIndex {
 public:
  // `path` is the .idx, the .bin, or their common name without extension. Errors: kIo for a missing file; kFormat,
  // naming the file and the mismatch, for another magic number or version, ids of another type, an index that is too
  // short or too long, sequences that overlap or are outside the .bin, and documents out of order.
  static MegatronIndex open(const std::filesystem::path& path);

  int64_t documents() const { return documents_; }
  // The ids of all sequences of the document. Errors: kIo; kFormat for a .bin that has become shorter, and for an id
  // below 0.
  std::vector<int32_t> document(int64_t index) const;
  const std::filesystem::path& bin_path() const { return bin_path_; }

 private:
  MegatronIndex() = default;
  void check(uint64_t bin_bytes) const;
  int32_t length_of(uint64_t sequence) const;
  uint64_t pointer_of(uint64_t sequence) const;
  uint64_t document_begin(uint64_t document) const;

  std::filesystem::path idx_path_, bin_path_;
  std::shared_ptr<const MappedFile> index_;
  UniqueFd bin_;
  uint64_t id_bytes_ = 0;
  uint64_t sequences_ = 0;
  int64_t documents_ = 0;
};

}  // namespace tessera::data
