#include "tessera/formats/torch/zip_archive.h"

#include <algorithm>
#include <cstring>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/base/text/utf8.h"
#include "tessera/formats/folder_links.h"
#include "tessera/formats/torch/crc32.h"
#include "tessera/formats/torch/detail/zip_layout.h"

namespace tessera {
namespace {

// Bounds-checked reads of the archive's bytes. Error kFormat.
class ZipByteReader {
 public:
  ZipByteReader(std::span<const std::byte> bytes, const std::string& where) : bytes_(bytes), where_(where) {}

  uint64_t size() const { return bytes_.size(); }
  template <class... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) const {
    raise(ErrorKind::kFormat, "[zip] {}: {}", where_, fmt::format(format, std::forward<Args>(args)...));
  }
  // Error kFormat unless the archive has `count` bytes at `offset`. The message calls these bytes `part_name`.
  void check_range(uint64_t offset, uint64_t count, const char* part_name) const {
    if (offset > size() || count > size() - offset) {
      fail("{} would be at bytes {} to {} + {}, but the archive has {}. The archive is cut off or damaged.", part_name,
           offset, offset, count, size());
    }
  }
  template <class T>
  T number(uint64_t offset, const char* part_name) const {
    check_range(offset, sizeof(T), part_name);
    T value;
    std::memcpy(&value, bytes_.data() + offset, sizeof value);
    return value;
  }
  std::string_view text(uint64_t offset, uint64_t count, const char* part_name) const {
    check_range(offset, count, part_name);
    return {reinterpret_cast<const char*>(bytes_.data()) + offset, static_cast<size_t>(count)};
  }

 private:
  std::span<const std::byte> bytes_;
  const std::string& where_;
};

struct ZipDirectory {
  uint64_t entries = 0;
  uint64_t begin = 0;
  uint64_t size = 0;
  uint64_t limit = 0;  // the directory must end here
};

// The directory is found from the end of the archive, with the ZIP64 record if there is a locator. It must end exactly
// where the end record begins, so bytes cut off or inserted anywhere before it are found. Archives with a comment are
// rejected; torch.save writes no comment.
ZipDirectory find_zip_directory(const ZipByteReader& bytes) {
  constexpr const char* kWhat = "the end of the archive's directory";
  if (bytes.size() < detail::kZipEndBytes ||
      bytes.number<uint32_t>(bytes.size() - detail::kZipEndBytes, kWhat) != detail::kZipEnd) {
    bytes.fail("no zip archive, or one that is cut off: the last {} bytes are not the end of a directory",
               detail::kZipEndBytes);
  }
  const uint64_t end = bytes.size() - detail::kZipEndBytes;
  ZipDirectory found;
  found.entries = bytes.number<uint16_t>(end + 10, kWhat);
  found.size = bytes.number<uint32_t>(end + 12, kWhat);
  found.begin = bytes.number<uint32_t>(end + 16, kWhat);
  found.limit = end;
  if (bytes.number<uint16_t>(end + 20, kWhat) != 0) {
    bytes.fail("an archive comment is announced, but nothing follows the end record");
  }
  const bool has_locator = end >= detail::kZip64LocatorBytes &&
                           bytes.number<uint32_t>(end - detail::kZip64LocatorBytes, kWhat) == detail::kZip64Locator;
  if (has_locator) {
    const uint64_t zip64 = bytes.number<uint64_t>(end - detail::kZip64LocatorBytes + 8, kWhat);
    if (bytes.number<uint32_t>(zip64, "the ZIP64 directory's end") != detail::kZip64End) {
      bytes.fail("no ZIP64 record at byte {}, where one is announced", zip64);
    }
    found.entries = bytes.number<uint64_t>(zip64 + 32, "the ZIP64 directory's end");
    found.size = bytes.number<uint64_t>(zip64 + 40, "the ZIP64 directory's end");
    found.begin = bytes.number<uint64_t>(zip64 + 48, "the ZIP64 directory's end");
    found.limit = zip64;
  }
  if (found.begin > found.limit || found.size != found.limit - found.begin) {
    bytes.fail("its directory would be at bytes {} to {} + {}, but must end at {}. The archive is cut off or damaged.",
               found.begin, found.begin, found.size, found.limit);
  }
  return found;
}

void check_zip_name(const ZipByteReader& bytes, std::string_view name) {
  if (!is_path_inside_folder(name) || !is_valid_utf8(name)) {
    bytes.fail("entry {}: the name is not a valid path inside a folder", quote(name));
  }
}

// Replaces each value of `values` that equals kZip32Max by the next 64-bit value of the ZIP64 extra field.
void read_zip64_extra(const ZipByteReader& bytes, uint64_t offset, uint64_t size,
                      std::initializer_list<uint64_t*> values, std::string_view name) {
  const uint64_t end = offset + size;
  while (offset + 4 <= end) {
    const auto id = bytes.number<uint16_t>(offset, "an extra field");
    const uint64_t length = bytes.number<uint16_t>(offset + 2, "an extra field");
    offset += 4;
    if (length > end - offset) bytes.fail("entry {}: an extra field of {} bytes is cut off", quote(name), length);
    if (id == detail::kZip64Extra) {
      const uint64_t field_end = offset + length;
      for (uint64_t* value : values) {
        if (*value != detail::kZip32Max) continue;
        if (field_end - offset < 8) bytes.fail("entry {}: its ZIP64 field is cut off", quote(name));
        *value = bytes.number<uint64_t>(offset, "a ZIP64 field");
        offset += 8;
      }
      return;
    }
    offset += length;
  }
}

void check_zip_method(const ZipByteReader& bytes, uint64_t flags, uint64_t method, std::string_view name) {
  if (flags & detail::kZipEncrypted) bytes.fail("entry {} is encrypted", quote(name));
  if (method != 0) {
    bytes.fail(
        "entry {} is compressed (method {}). torch.save stores entries uncompressed. Save the file again with torch.",
        quote(name), method);
  }
}

// Reads the directory entry at `at` and moves `at` to the entry after it.
ZipEntry read_central_header(const ZipByteReader& bytes, uint64_t& at) {
  constexpr const char* kWhat = "an entry of the directory";
  bytes.check_range(at, detail::kZipCentralHeaderBytes, kWhat);
  if (bytes.number<uint32_t>(at, kWhat) != detail::kZipCentralHeader) bytes.fail("no entry at byte {}", at);
  const auto flags = bytes.number<uint16_t>(at + 8, kWhat);
  const auto method = bytes.number<uint16_t>(at + 10, kWhat);
  const auto crc = bytes.number<uint32_t>(at + 16, kWhat);
  uint64_t packed = bytes.number<uint32_t>(at + 20, kWhat);
  uint64_t size = bytes.number<uint32_t>(at + 24, kWhat);
  const uint64_t name_bytes = bytes.number<uint16_t>(at + 28, kWhat);
  const uint64_t extra_bytes = bytes.number<uint16_t>(at + 30, kWhat);
  const uint64_t comment_bytes = bytes.number<uint16_t>(at + 32, kWhat);
  uint64_t header = bytes.number<uint32_t>(at + 42, kWhat);
  at += detail::kZipCentralHeaderBytes;
  const auto name = bytes.text(at, name_bytes, kWhat);
  check_zip_name(bytes, name);
  bytes.check_range(at + name_bytes, extra_bytes + comment_bytes, kWhat);
  read_zip64_extra(bytes, at + name_bytes, extra_bytes, {&size, &packed, &header}, name);
  at += name_bytes + extra_bytes + comment_bytes;
  check_zip_method(bytes, flags, method, name);
  if (packed != size) bytes.fail("entry {} is stored, but has {} bytes and {} packed bytes", quote(name), size, packed);
  ZipEntry entry{std::string(name), header, 0, size, crc};  // `end` holds the size until the data's position is known
  return entry;
}

// Finds the data behind the local header and checks that the local header agrees with the directory. With a data
// descriptor the local header has no sizes; the sizes of the directory are used then. The data must end before the
// directory.
void locate_zip_entry(const ZipByteReader& bytes, ZipEntry& entry, uint64_t directory_begin) {
  constexpr const char* kWhat = "the header of an entry";
  const uint64_t at = entry.header;
  bytes.check_range(at, detail::kZipLocalHeaderBytes, kWhat);
  if (bytes.number<uint32_t>(at, kWhat) != detail::kZipLocalHeader) {
    bytes.fail("entry {} has no header at byte {}", quote(entry.name), at);
  }
  const auto flags = bytes.number<uint16_t>(at + 6, kWhat);
  check_zip_method(bytes, flags, bytes.number<uint16_t>(at + 8, kWhat), entry.name);
  uint64_t packed = bytes.number<uint32_t>(at + 18, kWhat);
  uint64_t size = bytes.number<uint32_t>(at + 22, kWhat);
  const uint64_t name_bytes = bytes.number<uint16_t>(at + 26, kWhat);
  const uint64_t extra_bytes = bytes.number<uint16_t>(at + 28, kWhat);
  const auto name = bytes.text(at + detail::kZipLocalHeaderBytes, name_bytes, kWhat);
  if (name != entry.name) bytes.fail("entry {} has the name {} in its local header", quote(entry.name), quote(name));
  const uint64_t extra = at + detail::kZipLocalHeaderBytes + name_bytes;
  bytes.check_range(extra, extra_bytes, kWhat);
  read_zip64_extra(bytes, extra, extra_bytes, {&size, &packed}, name);
  const uint64_t wanted = entry.end;
  if ((flags & detail::kZipHasDescriptor) == 0 && (size != wanted || packed != wanted)) {
    bytes.fail("entry {} has {} bytes by its header, {} by the directory", quote(name), size, wanted);
  }
  entry.begin = extra + extra_bytes;
  if (entry.begin > directory_begin || wanted > directory_begin - entry.begin) {
    bytes.fail("entry {} would be at bytes {} to {} + {}, but the directory begins at {}", quote(name), entry.begin,
               entry.begin, wanted, directory_begin);
  }
  entry.end = entry.begin + wanted;
}

// Entries are visited by rising position of their headers, so comparing neighbours finds every overlap.
void check_zip_overlap(const ZipByteReader& bytes, const std::vector<ZipEntry>& entries) {
  std::vector<const ZipEntry*> order;
  for (const auto& entry : entries) order.push_back(&entry);
  std::ranges::sort(order, [](const auto* a, const auto* b) { return a->header < b->header; });
  for (size_t i = 1; i < order.size(); ++i) {
    if (order[i]->header < order[i - 1]->end) {
      bytes.fail("entry {} begins at byte {}, inside entry {}", quote(order[i]->name), order[i]->header,
                 quote(order[i - 1]->name));
    }
  }
}

}  // namespace

ZipArchive ZipArchive::parse(std::span<const std::byte> bytes, const std::string& where) {
  const ZipByteReader reader(bytes, where);
  const auto directory = find_zip_directory(reader);
  ZipArchive archive;
  archive.bytes_ = bytes;
  uint64_t at = directory.begin;
  while (at < directory.limit) {
    auto entry = read_central_header(reader, at);
    locate_zip_entry(reader, entry, directory.begin);
    if (!archive.by_name_.emplace(entry.name, archive.entries_.size()).second) {
      reader.fail("entry {} is there twice", quote(entry.name));
    }
    archive.entries_.push_back(std::move(entry));
  }
  if (at != directory.limit || archive.entries_.size() != directory.entries) {
    reader.fail("its directory announces {} entries and holds {}", directory.entries, archive.entries_.size());
  }
  check_zip_overlap(reader, archive.entries_);
  return archive;
}

void check_zip_crc(std::span<const std::byte> data, uint32_t crc, const std::string& name, const std::string& where) {
  if (crc == 0) return;
  const uint32_t found = crc32(0, data);
  TESSERA_CHECK(found == crc, ErrorKind::kFormat,
                "[zip] {}: entry {}: its {} bytes have the CRC {:08x}, the directory has {:08x}. They changed after "
                "they were written; take another copy.",
                where, quote(name), data.size(), found, crc);
}

const ZipEntry* ZipArchive::find(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &entries_[found->second];
}

}  // namespace tessera
