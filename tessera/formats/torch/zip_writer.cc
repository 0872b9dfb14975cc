#include "tessera/formats/torch/zip_writer.h"

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/formats/torch/crc32.h"
#include "tessera/formats/torch/detail/zip_layout.h"

namespace tessera {
namespace {

constexpr size_t kZipPiece = size_t{1} << 20;  // stays in the CPU cache between checksum and write

template <class T>
void put_zip(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}
void put_zip32(std::string& out, uint64_t value) {
  put_zip(out, static_cast<uint32_t>(std::min(value, detail::kZip32Max)));
}
void put_zip16(std::string& out, uint64_t value) {
  put_zip(out, static_cast<uint16_t>(std::min(value, detail::kZip16Max)));
}

uint16_t zip_flags(uint64_t size) {
  return size == 0 ? detail::kZipUtf8 : static_cast<uint16_t>(detail::kZipUtf8 | detail::kZipHasDescriptor);
}

}  // namespace

// The checksum is 0 in the local header and is written after the data (data descriptor), so the data is passed only
// once. The sizes are 0 too and are written after the data; a ZIP64 entry has kZip32Max in place of 0, and its sizes
// are also in the ZIP64 extra field of the local header. The padding extra field moves the start of the data to a
// multiple of 64 bytes.
std::string ZipWriter::local_header(const std::string& name, uint64_t size, uint64_t position) {
  const bool zip64 = size >= detail::kZip32Max;
  std::string out;
  put_zip(out, detail::kZipLocalHeader);
  put_zip16(out, 0);  // version needed, as torch writes it
  put_zip16(out, zip_flags(size));
  put_zip16(out, 0);  // stored
  put_zip32(out, 0);  // time and date
  put_zip32(out, 0);  // checksum and sizes follow the data
  put_zip32(out, zip64 ? detail::kZip32Max : 0);
  put_zip32(out, zip64 ? detail::kZip32Max : 0);
  put_zip16(out, name.size());
  const uint64_t zip64_bytes = zip64 ? 20 : 0;
  const uint64_t unpadded = position + detail::kZipLocalHeaderBytes + name.size() + zip64_bytes + 4;
  const uint64_t padding = (detail::kZipAlignment - unpadded % detail::kZipAlignment) % detail::kZipAlignment;
  put_zip16(out, zip64_bytes + 4 + padding);
  out += name;
  if (zip64) {
    put_zip16(out, detail::kZip64Extra);
    put_zip16(out, 16);
    put_zip(out, size);
    put_zip(out, size);
  }
  put_zip16(out, detail::kPaddingExtra);
  put_zip16(out, padding);
  out.append(padding, 'Z');
  return out;
}

std::string ZipWriter::descriptor(const WrittenEntry& entry) {
  std::string out;
  if (entry.size == 0) return out;
  put_zip(out, detail::kZipDescriptor);
  put_zip(out, entry.crc);
  for (int i = 0; i < 2; ++i) {
    if (entry.size >= detail::kZip32Max) {
      put_zip(out, entry.size);
    } else {
      put_zip32(out, entry.size);
    }
  }
  return out;
}

// The central directory, then the ZIP64 end record, its locator, and the plain end record.
std::string ZipWriter::directory(const std::vector<WrittenEntry>& entries, uint64_t position) {
  std::string out;
  for (const auto& entry : entries) {
    std::string extra;
    if (entry.size >= detail::kZip32Max) {
      put_zip(extra, entry.size);
      put_zip(extra, entry.size);
    }
    if (entry.header >= detail::kZip32Max) put_zip(extra, entry.header);
    put_zip(out, detail::kZipCentralHeader);
    put_zip32(out, 0);  // version made by and needed, as torch writes them
    put_zip16(out, zip_flags(entry.size));
    put_zip16(out, 0);  // stored
    put_zip32(out, 0);  // time and date
    put_zip(out, entry.crc);
    put_zip32(out, entry.size);
    put_zip32(out, entry.size);
    put_zip16(out, entry.name.size());
    put_zip16(out, extra.empty() ? 0 : extra.size() + 4);
    put_zip16(out, 0);  // comment
    put_zip32(out, 0);  // disk, internal attributes
    put_zip32(out, 0);  // external attributes
    put_zip32(out, entry.header);
    out += entry.name;
    if (extra.empty()) continue;
    put_zip16(out, detail::kZip64Extra);
    put_zip16(out, extra.size());
    out += extra;
  }
  const uint64_t size = out.size();
  put_zip(out, detail::kZip64End);  // torch writes the record for small archives, too
  put_zip(out, uint64_t{detail::kZip64EndBytes - 12});
  put_zip16(out, 45);  // versions
  put_zip16(out, 45);
  put_zip(out, uint64_t{0});  // disks
  put_zip(out, uint64_t{entries.size()});
  put_zip(out, uint64_t{entries.size()});
  put_zip(out, size);
  put_zip(out, position);
  put_zip(out, detail::kZip64Locator);
  put_zip32(out, 0);
  put_zip(out, position + size);
  put_zip32(out, 1);
  put_zip(out, detail::kZipEnd);
  put_zip32(out, 0);  // disks
  put_zip16(out, entries.size());
  put_zip16(out, entries.size());
  put_zip32(out, size);
  put_zip32(out, position);
  put_zip16(out, 0);  // comment
  return out;
}

void ZipWriter::put(const std::string& bytes) {
  sink_(std::as_bytes(std::span(bytes)));
  position_ += bytes.size();
}

// Passes the data to the sink in pieces and computes the checksum of each piece, which is small enough to stay in the
// CPU's cache.
void ZipWriter::add(const std::string& name, uint64_t size_bytes, const std::function<void(const ByteSink&)>& produce) {
  TESSERA_CHECK(name.size() < 1024, ErrorKind::kInternal, "[zip] a name of {} bytes: {}", name.size(), quote(name));
  WrittenEntry entry{name, position_, size_bytes, 0};
  put(local_header(name, size_bytes, position_));
  uint64_t written_bytes = 0;
  produce([&](std::span<const std::byte> bytes) {
    written_bytes += bytes.size();
    TESSERA_CHECK(written_bytes <= size_bytes, ErrorKind::kInternal, "[zip] {}: more than the announced {} bytes", name,
                  size_bytes);
    while (!bytes.empty()) {
      const auto piece = bytes.first(std::min(kZipPiece, bytes.size()));
      bytes = bytes.subspan(piece.size());
      entry.crc = crc32(entry.crc, piece);
      sink_(piece);
      position_ += piece.size();
    }
  });
  TESSERA_CHECK(written_bytes == size_bytes, ErrorKind::kInternal, "[zip] {}: {} bytes of the announced {}", name,
                written_bytes, size_bytes);
  put(descriptor(entry));
  entries_.push_back(std::move(entry));
}

void ZipWriter::add(const std::string& name, std::span<const std::byte> bytes) {
  add(name, bytes.size(), [bytes](const ByteSink& data) { data(bytes); });
}

uint64_t ZipWriter::finish() {
  put(directory(entries_, position_));
  return position_;
}

// Returns an id of the archive's content: an FNV-1a hash of the entries' names, followed by a polynomial hash of the
// checksums of the entries' data.
std::string ZipWriter::content_id() const {
  uint64_t names = 0xcbf29ce484222325;  // FNV-1a
  uint64_t data = 0;
  for (const auto& entry : entries_) {
    for (const char byte : entry.name) names = (names ^ static_cast<uint8_t>(byte)) * 0x100000001b3;
    data = data * 0x9E3779B97F4A7C15 + entry.crc + 1;
  }
  return fmt::format("{:020}{:020}", names, data);
}

// Adds up the lengths of all parts of the archive. Headers and directory are made by the functions that
// ZipWriter::add() and finish() use, so the result always equals the length of the archive that ZipWriter writes.
uint64_t zip_archive_bytes(std::span<const ZipEntrySize> entries) {
  std::vector<ZipWriter::WrittenEntry> written;
  uint64_t position = 0;
  for (const auto& [name, size] : entries) {
    written.push_back({name, position, size, 0});
    position += ZipWriter::local_header(name, size, position).size() + size;
    position += ZipWriter::descriptor(written.back()).size();
  }
  return position + ZipWriter::directory(written, position).size();
}

}  // namespace tessera
