// Stores tokenized samples, packed into rows, in the files of one folder. They are written once in one pass, then read
// row by row by any number of processes. docs/format/packed_rows.md.
//
//   PackedRowsWriter writer(folder, {.sequence_length = 512});
//   writer.add(tokens, loss_mask);
//   writer.finish(key, stats, padding_token, description);
//   auto rows = PackedRows::open(folder, key);
//   rows->read(7, [&](std::span<const PackedToken> sample) { ... });
//
// Memory does not grow with the data: the writer holds the rows that are still open, a reader one row. PackedRows is
// thread-safe, PackedRowsWriter is not.
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
  int64_t documents = 0;     // number of samples in the rows
  int64_t tokens = 0;        // their tokens, without padding
  int64_t label_tokens = 0;  // number of labels: tokens that the model is trained to predict
  int64_t truncated = 0;     // samples cut to sequence_length
  int64_t dropped = 0;       // samples longer than sequence_length that were left out
  int64_t unlabelled = 0;    // samples left out because they have no label
  int64_t cut_away = 0;      // unlabelled samples that had labels before they were cut

  // Returns a text about the samples that were cut or left out, such as "3 cut to data.sequence_length 512, 2 longer
  // than data.sequence_length 512 dropped, 1 left out without anything to learn". Returns an empty text when no sample
  // was cut or left out.
  std::string describe_dropped(int64_t sequence_length) const;
};

// A token id, and in the highest bit whether the model is trained to predict it.
struct PackedToken {
  uint32_t bits = 0;
  int32_t id() const { return static_cast<int32_t>(bits & 0x7fffffffu); }
  bool has_label() const { return (bits >> 31) != 0; }
};

struct PackingOptions {
  int64_t sequence_length = 512;
  bool packing = true;  // false: one sample in each row
  bool shuffle = true;  // shuffle samples before packing
  uint64_t seed = 42;
};

// Writes the file of one array of an entry, piece by piece.
class ArrayFile {
 public:
  explicit ArrayFile(std::filesystem::path path);

  // Appends `bytes` bytes to the file. Error kIo when the file cannot be written, e.g. because the disk is full.
  void append(const void* data, size_t bytes);
  void close();  // flushes and syncs the file

 private:
  void flush();
  std::filesystem::path path_;
  UniqueFd file_;
  std::vector<char> buffer_;
};

class PackedRowsWriter {
 public:
  // The folder must exist and be empty.
  PackedRowsWriter(std::filesystem::path folder, const PackingOptions& options);

  // Adds a sample of at most sequence_length tokens with at least one label.
  void add(std::span<const int32_t> tokens, std::span<const uint8_t> loss_mask);
  int64_t samples() const { return samples_; }
  // Packs all samples (first-fit over the 64 rows begun last) and writes set.json, the last of the files. `description`
  // is stored for readers.
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

// The name of a file in the folder of each cache entry. The file contains the name of the host that made the entry. The
// file's modification time is the time of the entry's last use.
inline constexpr const char* kMakerName = "maker";

class PackedRows {
 public:
  // Opens the cache entry in `folder`. Returns null if the folder has no complete entry of the format version that this
  // program reads with this `key`, or if another process is removing or replacing the entry. `failure_reason` then
  // receives the reason; it is empty when the folder does not exist. Error kIo when the files of the entry exist and
  // cannot be opened or read: too many open files, another user's files, a broken disk.
  static std::shared_ptr<const PackedRows> open(const std::filesystem::path& folder, const std::string& key,
                                                std::string* failure_reason = nullptr);

  int64_t rows() const { return rows_; }
  int64_t sequence_length() const { return sequence_length_; }
  int64_t padding_token() const { return padding_token_; }
  const DataStats& stats() const { return stats_; }
  // Hash of the contents of all rows, in hexadecimal.
  const std::string& fingerprint() const { return fingerprint_; }
  const std::vector<std::string>& description() const { return description_; }

  // Visits the samples of a row in order. Error kFormat if the files were damaged or cut off after open(); the hash of
  // each sample shows damage.
  void read(int64_t row, const std::function<void(std::span<const PackedToken>)>& visit) const;

 private:
  PackedRows() = default;
  void read_at(const UniqueFd& file, const char* name, uint64_t offset, void* data, size_t bytes) const;
  [[noreturn]] void damaged(const std::string& problem) const;

  std::filesystem::path folder_;
  UniqueFd tokens_file_, entries_file_, bounds_file_, order_file_;
  UniqueFd set_file_;  // locked for reading, so DataCache does not remove an entry in use
  int64_t rows_ = 0, samples_ = 0, sequence_length_ = 0, padding_token_ = 0;
  uint64_t token_count_ = 0;
  DataStats stats_;
  std::string fingerprint_;
  std::vector<std::string> description_;
};

}  // namespace tessera::data
