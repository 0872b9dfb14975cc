// Tokenized samples packed into rows, in the files of one folder: written once from front to back, then read row by row
// by any number of processes. docs/format/packed_rows.md.
//
//   PackedRowsWriter writer(folder, {.sequence_length = 512});
//   writer.add(tokens, learnt);
//   writer.finish(key, description);
//   auto rows = PackedRows::open(folder, key);
//   rows->read(7, [&](std::span<const PackedToken> sample) { ... });
//
// Memory does not grow with the data: neither side keeps more than a row and the rows still open. A PackedRows is
// thread-safe, a writer is not.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <vector>

#include "tessera/base/files/unique_fd.h"

namespace tessera::data {

struct DataStats {
  int64_t documents = 0;     // samples in the rows
  int64_t tokens = 0;        // of them, without padding
  int64_t label_tokens = 0;  // tokens that are predicted and learnt
  int64_t truncated = 0;     // samples cut to sequence_length
  int64_t dropped = 0;       // overlong samples left out
  int64_t unlabelled = 0;    // samples left out because nothing of them is learnt
  int64_t cut_away = 0;      // of those, samples whose learnt tokens all lie behind the cut

  // "3 cut to data.sequence_length 512, 2 longer ones dropped, 1 left out without anything to learn"; empty: nothing
  // was cut or left out.
  std::string losses(int64_t sequence_length) const;
};

// A token id, and whether the model learns to predict it, in the highest bit.
struct PackedToken {
  uint32_t bits = 0;
  int32_t id() const { return static_cast<int32_t>(bits & 0x7fffffffu); }
  bool learnt() const { return (bits >> 31) != 0; }
};

struct PackingOptions {
  int64_t sequence_length = 512;
  bool packing = true;  // false: one sample a row
  bool shuffle = true;  // of the samples before they are packed
  uint64_t seed = 42;
};

// One array of a set, appended to in pieces.
class ArrayFile {
 public:
  explicit ArrayFile(std::filesystem::path path);

  // Error kIo, a full disk among them.
  void append(const void* data, size_t bytes);
  void close();  // with fsync

 private:
  void flush();
  std::filesystem::path path_;
  UniqueFd file_;
  std::vector<char> buffer_;
};

class PackedRowsWriter {
 public:
  // The folder is there and empty.
  PackedRowsWriter(std::filesystem::path folder, const PackingOptions& options);

  // A sample of at most sequence_length tokens with something to learn.
  void add(std::span<const int32_t> tokens, std::span<const uint8_t> learnt);
  int64_t samples() const { return samples_; }
  // Packs all samples and writes set.json, the last of the files. First-fit over the 64 rows last begun. `description`
  // is kept for readers.
  void finish(const std::string& key, const DataStats& stats, int64_t padding_token,
              const std::vector<std::string>& description);

 private:
  void pack();
  std::string fingerprint() const;

  std::filesystem::path folder_;
  PackingOptions options_;
  ArrayFile tokens_, entries_;
  std::vector<PackedToken> sample_;
  int64_t samples_ = 0;
  uint64_t token_count_ = 0;
  int64_t rows_ = 0;
};

// A file of an entry that says which host made it; its time of change is that of the entry's last use.
inline constexpr const char* kMakerName = "maker";

class PackedRows {
 public:
  // Null for a folder that holds no whole set of this version and key, with the reason. Error kIo when its files are
  // there and cannot be opened or read: too many open files, another user's, a broken disk.
  static std::shared_ptr<const PackedRows> open(const std::filesystem::path& folder, const std::string& key,
                                                std::string* why_not = nullptr);

  int64_t rows() const { return rows_; }
  int64_t sequence_length() const { return sequence_length_; }
  int64_t padding_token() const { return padding_token_; }
  const DataStats& stats() const { return stats_; }
  // Hash of everything that the rows hold, in hexadecimal.
  const std::string& fingerprint() const { return fingerprint_; }
  const std::vector<std::string>& description() const { return description_; }

  // The samples of a row, one after the other. Error kFormat for a set that was damaged or cut off since it was opened,
  // found by a hash of each sample.
  void read(int64_t row, const std::function<void(std::span<const PackedToken>)>& visit) const;

 private:
  PackedRows() = default;
  void read_at(const UniqueFd& file, const char* name, uint64_t offset, void* data, size_t bytes) const;
  [[noreturn]] void damaged(const std::string& what) const;

  std::filesystem::path folder_;
  UniqueFd tokens_file_, entries_file_, bounds_file_, order_file_;
  UniqueFd set_file_;  // locked for reading: DataCache removes no entry that is in use
  int64_t rows_ = 0, samples_ = 0, sequence_length_ = 0, padding_token_ = 0;
  uint64_t token_count_ = 0;
  DataStats stats_;
  std::string fingerprint_;
  std::vector<std::string> description_;
};

}  // namespace tessera::data
