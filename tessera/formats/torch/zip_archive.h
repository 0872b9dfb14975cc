// A zip archive in memory whose entries are stored without compression: the format of torch.save.
//
//   const auto archive = ZipArchive::parse(bytes, "model.pt");
//   if (const ZipEntry* entry = archive.find("archive/data.pkl")) unpickle(archive.data(*entry), ...);
//
// parse() checks the directory and the headers of all entries, but does not read the data of the entries; only
// check_crc() compares checksums. Error kFormat for archives that are cut off, compressed or encrypted entries,
// names that occur twice or lead out of a folder, overlapping entries, and local headers that disagree with the
// directory. ZIP64 is supported. The bytes must outlive the archive. Thread-safe.
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
  uint64_t header = 0;  // byte position of the local header
  uint64_t begin = 0;   // byte range of the data
  uint64_t end = 0;
  uint32_t crc = 0;  // CRC-32 of the data, from the directory; 0 when the writer did not compute it
  uint64_t size_bytes() const { return end - begin; }
};

// Compares the CRC-32 of `data` with `crc`, unless `crc` is 0. Error kFormat, which names `name` and `where`, when they
// differ.
void check_zip_crc(std::span<const std::byte> data, uint32_t crc, const std::string& name, const std::string& where);

class ZipArchive {
 public:
  // `bytes` is exactly one archive.
  static ZipArchive parse(std::span<const std::byte> bytes, const std::string& where);

  // The entries, in the order of the central directory.
  const std::vector<ZipEntry>& entries() const { return entries_; }
  // Null when no entry has this name.
  const ZipEntry* find(const std::string& name) const;
  std::span<const std::byte> data(const ZipEntry& entry) const {
    return bytes_.subspan(entry.begin, entry.size_bytes());
  }
  // Reads the entry's data and compares its CRC-32 with ZipEntry::crc; a ZipEntry::crc of 0 is not compared. Error
  // kFormat if they differ.
  void check_crc(const ZipEntry& entry, const std::string& where) const {
    check_zip_crc(data(entry), entry.crc, entry.name, where);
  }

 private:
  std::span<const std::byte> bytes_;
  std::vector<ZipEntry> entries_;
  std::unordered_map<std::string, size_t> by_name_;
};

}  // namespace tessera
