// A zip archive whose entries are stored without compression, inside bytes in memory: what torch.save writes.
//
//   const auto archive = ZipArchive::parse(bytes, "model.pt");
//   if (const ZipEntry* entry = archive.find("archive/data.pkl")) unpickle(archive.data(*entry), ...);
//
// parse() checks the directory and the headers of all entries: what is cut off, compressed or encrypted, names that are
// twice or lead out of a folder, entries that overlap, and disagreeing headers are Error kFormat. It reads no data, so
// that checksums are compared by check_crc() alone. ZIP64 is read. The bytes are borrowed. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

namespace tessera {

struct ZipEntry {
  std::string name;
  uint64_t header = 0;  // byte positions in the archive: of its local header,
  uint64_t begin = 0;   // and of its data
  uint64_t end = 0;
  uint32_t crc = 0;  // CRC-32 of the data as the directory has it; 0 where the writer was told not to compute it
  uint64_t size_bytes() const { return end - begin; }
};

// Error kFormat, naming `name` in `where`, when `data` has another checksum; 0 is none.
void check_zip_crc(std::span<const std::byte> data, uint32_t crc, const std::string& name, const std::string& where);

class ZipArchive {
 public:
  // `bytes` is the whole archive and nothing around it.
  static ZipArchive parse(std::span<const std::byte> bytes, const std::string& where);

  // In the order of the directory.
  const std::vector<ZipEntry>& entries() const { return entries_; }
  // Null when there is none.
  const ZipEntry* find(const std::string& name) const;
  std::span<const std::byte> data(const ZipEntry& entry) const {
    return bytes_.subspan(entry.begin, entry.size_bytes());
  }
  // Reads the entry's data and compares its checksum where it has one. Error kFormat.
  void check_crc(const ZipEntry& entry, const std::string& where) const {
    check_zip_crc(data(entry), entry.crc, entry.name, where);
  }

 private:
  std::span<const std::byte> bytes_;
  std::vector<ZipEntry> entries_;
  std::unordered_map<std::string, size_t> by_name_;
};

}  // namespace tessera
