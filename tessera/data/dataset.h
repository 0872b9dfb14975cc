// A training set in memory: files read, tokenized and packed into rows of one length.
//
//   auto dataset = Dataset::load({.paths = {"dialogues.jsonl"}, .sequence_length = 512}, tokenizer, chat_template);
//   Batch batch = dataset->rows({{0, 7}});                       // int64 [2, 512]
//
// A record is a sample (see samples.h for what is learnt); a text file is one stream, cut into pieces of
// sequence_length. Packing puts samples into rows first-fit, in an order that depends on the data, the seed and the
// sequence length alone; a sample is never split over rows. Positions restart with each sample, its document id bounds
// attention, and its last token predicts nothing. A sample longer than a row is cut, left out or refused, as `overlong`
// says; samples without anything to learn are left out. Immutable after load; thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/data/batch.h"
#include "tessera/text/chat_template.h"
#include "tessera/text/tokenizer.h"

namespace tessera::data {

struct DataOptions {
  std::vector<std::string> paths;
  std::string format = "auto";        // auto | text | jsonl | chat, see sources.h
  int64_t sequence_length = 512;      // tokens in a row
  bool packing = true;                // false: one sample a row
  std::string overlong = "truncate";  // truncate | drop | error
  uint64_t seed = 42;
  bool shuffle = true;     // of the samples before they are packed; false keeps the order of the files
  int64_t vocab_size = 0;  // tokens that the model knows; 0: any
};

struct DataStats {
  int64_t documents = 0;     // samples in the rows
  int64_t tokens = 0;        // of them, without padding
  int64_t label_tokens = 0;  // tokens that are predicted and learnt
  int64_t truncated = 0;     // samples cut to sequence_length
  int64_t dropped = 0;       // overlong samples left out
  int64_t unlabelled = 0;    // samples left out because nothing of them is learnt
};

class Dataset {
 public:
  // Error kConfig for wrong options, for chats without a template and for tokens that the model does not know, kIo and
  // kFormat for files, kFormat for a set without a single row.
  static std::shared_ptr<const Dataset> load(const DataOptions& options, const text::Tokenizer& tokenizer,
                                             const std::optional<text::ChatTemplate>& chat_template);

  int64_t rows() const { return static_cast<int64_t>(row_begin_.size()) - 1; }
  int64_t sequence_length() const { return options_.sequence_length; }
  // The given rows, in that order. Error kInternal for an index out of range.
  Batch rows(std::span<const int64_t> indices) const;
  const DataStats& stats() const { return stats_; }
  // Hash of everything that the rows hold, in hexadecimal: a resumed run checks it.
  const std::string& fingerprint() const { return fingerprint_; }

 private:
  struct Builder;
  Dataset() = default;

  DataOptions options_;
  int64_t padding_token_ = 0;
  std::vector<int32_t> tokens_;       // of all samples
  std::vector<uint8_t> learnt_;       // one for each token
  std::vector<size_t> sample_begin_;  // into tokens_, one more than samples
  std::vector<size_t> row_begin_;     // into row_samples_, one more than rows
  std::vector<size_t> row_samples_;   // samples in row order
  DataStats stats_;
  std::string fingerprint_;
};

}  // namespace tessera::data
