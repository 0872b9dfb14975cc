// Writes a zip archive of stored entries in one pass, laid out as torch.save does: the data of each entry begins at a
// multiple of 64 bytes from the start of the archive.
//
//   ZipWriter writer(sink);
//   writer.add("archive/data.pkl", as_bytes(text));
//   writer.add("archive/data/0", tensor_bytes, [&](const ByteSink& data) { data(piece); data(another); });
//   const uint64_t length = writer.finish();
//   zip_archive_bytes(entries);                      // the same length, before anything is written
//
// Checksums are written after the data, so no entry is held in memory. ZIP64 is used where sizes need it. Exceptions of
// the sink are passed on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace tessera {

// Receives bytes in order, piece by piece. The bytes are valid only during the call.
using ByteSink = std::function<void(std::span<const std::byte>)>;

struct ZipEntrySize {
  std::string name;
  uint64_t size_bytes = 0;
};

class ZipWriter {
 public:
  // The sink must outlive the writer.
  explicit ZipWriter(const ByteSink& sink) : sink_(sink) {}
  // `produce` must write exactly size_bytes to the sink that it receives.
  void add(const std::string& name, uint64_t size_bytes, const std::function<void(const ByteSink&)>& produce);
  void add(const std::string& name, std::span<const std::byte> bytes);
  // Writes the directory. Returns the length of the archive in bytes.
  uint64_t finish();
  // 40 digits computed from the names and data so far: torch's "serialization id".
  std::string content_id() const;

 private:
  struct WrittenEntry {
    std::string name;
    uint64_t header;
    uint64_t size;
    uint32_t crc;
  };
  static std::string local_header(const std::string& name, uint64_t size, uint64_t position);
  static std::string descriptor(const WrittenEntry& entry);
  static std::string directory(const std::vector<WrittenEntry>& entries, uint64_t position);
  friend uint64_t zip_archive_bytes(std::span<const ZipEntrySize> entries);
  void put(const std::string& bytes);

  const ByteSink& sink_;
  std::vector<WrittenEntry> entries_;
  uint64_t position_ = 0;
};

// Returns the length in bytes of an archive with these entries.
uint64_t zip_archive_bytes(std::span<const ZipEntrySize> entries);

}  // namespace tessera
