// A training set: files read, tokenized and packed into rows of one length, on disk.
//
//   auto dataset = Dataset::load({.sources = {DataSource("dialogues.jsonl")}, .sequence_length = 512}, tokenizer,
//                                chat_template);
//   Batch batch = dataset->rows({{0, 7}});  // int64 [2, 512]
//
// A record is a sample (see samples.h for what is learnt); a text file is one stream, and so is each document of token
// ids, cut into pieces of sequence_length. Packing puts samples into rows first-fit, in an order that depends on the
// data, the seed and the sequence length alone; a sample is never split over rows. Positions restart with each sample,
// its document id bounds attention, and its last token predicts nothing. A sample longer than a row is cut, left out or
// refused, as `overlong` says; samples without anything to learn are left out. Sources with weights are a mixture: each
// is packed for itself, and the loader draws from them by mixture.h. Rows lie in a file (cache.h), so that memory does
// not depend on the size of the data. Immutable after load; thread-safe.
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
  std::string purpose = "train";                    // train | validation: the split of folders that name none
  std::string format = "auto";                      // of sources that have none of their own
  std::map<std::string, std::string> columns = {};  // likewise
  int64_t sequence_length = 512;                    // tokens in a row
  bool packing = true;                              // false: one sample a row
  std::string overlong = "truncate";                // truncate | drop | error
  bool train_on_inputs = false;                     // true: prompts and users are learnt, too
  uint64_t seed = 42;
  bool shuffle = true;                   // of the samples before they are packed; false keeps the order of the files
  int64_t vocab_size = 0;                // tokens that the model knows; 0: any
  std::vector<int32_t> end_tokens = {};  // that end a generation (eos_token_id of config.json, generation_config.json)
  // Where rows are kept between runs (DataCache::folder_of), empty: nowhere; and what tells tokenizer and template.
  std::filesystem::path cache_folder = {};
  std::string tokenizer_identity = {};
  bool quiet = false;  // true: what was recognised is not logged
  // Set from another thread, it ends the making of rows with an error at the next record. Null: nobody does.
  const std::atomic<bool>* stop = nullptr;
};

// An index that stands for a row of padding, of which nothing counts and nothing is learnt.
inline constexpr int64_t kPaddingRow = -1;

class Dataset {
 public:
  // Error kConfig for wrong options, for chats without a template, for preference pairs, for tokens that the model does
  // not know and for files that change meanwhile; kIo and kFormat for files, kFormat for a source without a single row.
  static std::shared_ptr<const Dataset> load(const DataOptions& options, const text::Tokenizer& tokenizer,
                                             const std::optional<text::ChatTemplate>& chat_template);

  int64_t rows() const { return rows_; }  // of all sources
  int64_t sequence_length() const { return sequence_length_; }
  // The given rows, in that order; those of a mixture source by source. An index may be kPaddingRow. Error kInternal
  // for an index out of range, kFormat for rows that were damaged on disk.
  Batch rows(std::span<const int64_t> indices) const;
  const DataStats& stats() const { return stats_; }
  // Hash of everything that the rows hold, in hexadecimal: a resumed run checks it.
  const std::string& fingerprint() const { return fingerprint_; }
  // A file of it that has been written to, or is gone, since it was read; what was made of it stays as it is.
  std::optional<std::filesystem::path> changed_file() const;

  // Of a mixture; empty where rows are drawn evenly from all files.
  const std::vector<double>& weights() const { return weights_; }
  int64_t rows_of_source(size_t source) const { return parts_[source]->rows(); }
  int64_t first_row_of_source(size_t source) const { return first_row_[source]; }

 private:
  Dataset() = default;

  std::vector<std::shared_ptr<const PackedRows>> parts_;  // one, or one for each source of a mixture
  std::vector<int64_t> first_row_;                        // of each part, in all
  std::vector<double> weights_;
  int64_t rows_ = 0;
  int64_t sequence_length_ = 0;
  DataStats stats_;
  std::string fingerprint_;
  std::vector<UnchangedFiles> files_;  // of each part
};

}  // namespace tessera::data
