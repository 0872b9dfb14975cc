// A training set: files are read, tokenized and packed into rows of one length, which are stored on disk.
//
//   auto dataset = Dataset::load({.sources = {DataSource("dialogues.jsonl")}, .sequence_length = 512}, tokenizer,
//                                chat_template);
//   Batch batch = dataset->rows({{0, 7}});  // int64 [2, 512]
//
// A record is one sample; samples.h says which of its tokens are trained on. A text file is one stream, and so is each
// document of token ids; a stream is cut into pieces of sequence_length. Packing puts samples into rows first-fit, in
// an order that depends only on the data, the seed and the sequence length. A sample is never split over rows.
// Positions restart with each sample, its document id bounds attention, and its last token has no label. A sample
// longer than a row is cut, dropped or rejected, depending on `overlong`. A sample without any label is left out.
// Sources with weights form a mixture: each source is packed separately, and the loader draws from the sources by
// mixture.h. Rows are stored in a file (cache.h), so memory does not depend on the size of the data. Immutable after
// load(); thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/data/records/data_source.h"
#include "tessera/data/rows/batch.h"
#include "tessera/data/rows/cache.h"
#include "tessera/data/rows/packed_rows.h"
#include "tessera/text/chat/chat_template.h"
#include "tessera/text/tokenizer.h"

namespace tessera::data {

struct DataOptions {
  std::vector<DataSource> sources;
  std::string purpose = "train";  // train | validation: the split of folders without an explicit split
  std::string format = "auto";    // format of sources without one
  std::map<std::string, std::string> columns = {};  // columns of sources without them
  int64_t sequence_length = 512;                    // tokens in a row
  bool packing = true;                              // false: one sample a row
  std::string overlong = "truncate";                // truncate | drop | error
  bool train_on_inputs = false;                     // true: prompts and user turns are trained on, too
  uint64_t seed = 42;
  bool shuffle = true;     // shuffle samples before packing; false keeps the order of the files
  int64_t vocab_size = 0;  // size of the model's vocabulary; 0: not checked
  std::vector<int32_t> end_tokens =
      {};  // tokens that end a generation (eos_token_id of config.json, generation_config.json)
  // Folder of the rows that are kept between runs (DataCache::folder_of); empty: rows are not kept.
  std::filesystem::path cache_folder = {};
  std::string tokenizer_identity = {};  // identifies tokenizer and chat template in the cache
  bool quiet = false;                   // true: no log of the recognised formats
  // Set to true from another thread to stop load() with an error at the next record. May be null.
  const std::atomic<bool>* stop = nullptr;
};

// The index of a row of padding. It has no labels and counts in no statistics.
inline constexpr int64_t kPaddingRow = -1;

class Dataset {
 public:
  // Reads, tokenizes and packs the files of options.sources, or takes the rows from options.cache_folder if an earlier
  // call has stored them there. Errors: kConfig for invalid options, chats without a chat template, preference pairs
  // (which are for DPO), tokens outside the vocabulary and files that change during the call; kIo for files that are
  // missing or cannot be read; kFormat for files with invalid content and for a source without any row.
  static std::shared_ptr<const Dataset> load(const DataOptions& options, const text::Tokenizer& tokenizer,
                                             const std::optional<text::ChatTemplate>& chat_template);

  int64_t rows() const { return rows_; }  // of all sources together
  int64_t sequence_length() const { return sequence_length_; }
  // The given rows in the given order; rows of a mixture are numbered source by source. An index may be kPaddingRow.
  // Errors: kInternal for an index out of range, kFormat for rows that were damaged on disk.
  Batch rows(std::span<const int64_t> indices) const;
  const DataStats& stats() const { return stats_; }
  // Hash of all contents of the rows, in hexadecimal. A resumed run compares it with the hash in the checkpoint.
  const std::string& fingerprint() const { return fingerprint_; }
  // A source file that was changed or deleted since it was read, if any. The rows made from it stay unchanged.
  std::optional<std::filesystem::path> changed_file() const;

  // Weights of a mixture; empty where rows are drawn evenly from all files.
  const std::vector<double>& weights() const { return weights_; }
  int64_t rows_of_source(size_t source) const { return parts_[source]->rows(); }
  int64_t first_row_of_source(size_t source) const { return first_row_[source]; }

 private:
  Dataset() = default;

  std::vector<std::shared_ptr<const PackedRows>> parts_;  // one; in a mixture one per source
  std::vector<int64_t> first_row_;                        // global index of each part's first row
  std::vector<double> weights_;
  int64_t rows_ = 0;
  int64_t sequence_length_ = 0;
  DataStats stats_;
  std::string fingerprint_;
  std::vector<UnchangedFiles> files_;  // of each part
};

}  // namespace tessera::data
