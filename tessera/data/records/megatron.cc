#include "tessera/data/records/megatron.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <string_view>

#include "tessera/base/error.h"
#include "tessera/base/files/copy_bytes.h"

namespace tessera::data {
namespace {

constexpr std::string_view kMagic{"MMIDIDX\0\0", 9};
constexpr size_t kHeaderBytes =
    9 + 8 + 1 + 8 + 8;  // magic, version, type of ids, number of sequences, number of document bounds
constexpr uint8_t kInt32 = 4, kUint16 = 8;  // Megatron's type codes

template <class T>
T number_at(const MappedFile& file, size_t offset) {
  T value;
  std::memcpy(&value, file.bytes().data() + offset, sizeof(T));
  return value;
}

}  // namespace

// The .idx has, after the header: an int32 length for each sequence, the int64 byte position of each sequence in the
// .bin, and int64 document bounds, the first sequence of each document and last the number of sequences.
int32_t MegatronIndex::length_of(uint64_t sequence) const {
  return number_at<int32_t>(*index_, kHeaderBytes + sequence * 4);
}
uint64_t MegatronIndex::pointer_of(uint64_t sequence) const {
  return number_at<uint64_t>(*index_, kHeaderBytes + sequences_ * 4 + sequence * 8);
}
uint64_t MegatronIndex::document_begin(uint64_t document) const {
  return number_at<uint64_t>(*index_, kHeaderBytes + sequences_ * 12 + document * 8);
}

MegatronIndex MegatronIndex::open(const std::filesystem::path& path) {
  MegatronIndex index;
  auto stem = path;
  if (stem.extension() == ".idx" || stem.extension() == ".bin") stem.replace_extension();
  index.idx_path_ = stem.string() + ".idx";
  index.bin_path_ = stem.string() + ".bin";
  index.index_ = MappedFile::open(index.idx_path_);
  index.bin_.reset(::open(index.bin_path_.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat info {};
  TESSERA_CHECK(index.bin_.open() && ::fstat(index.bin_.get(), &info) == 0, ErrorKind::kIo,
                "[data.read] {}: cannot be opened for reading: {}. The ids of {} are in it.", index.bin_path_.string(),
                std::strerror(errno), index.idx_path_.string());
  const auto& file = *index.index_;
  const auto name = index.idx_path_.string();
  const uint64_t size = file.bytes().size();
  TESSERA_CHECK(
      size >= kHeaderBytes && std::memcmp(file.bytes().data(), kMagic.data(), kMagic.size()) == 0, ErrorKind::kFormat,
      "[data.read] {}: is not an index of Megatron: its {} bytes do not begin with MMIDIDX and a header of {} bytes.",
      name, size, kHeaderBytes);
  const auto version = number_at<uint64_t>(file, 9);
  TESSERA_CHECK(version == 1, ErrorKind::kFormat, "[data.read] {}: found version {}, wanted 1.", name, version);
  const auto code = number_at<uint8_t>(file, 17);
  TESSERA_CHECK(code == kInt32 || code == kUint16, ErrorKind::kFormat,
                "[data.read] {}: ids of type {}, wanted {} (int32) or {} (uint16).", name, code, kInt32, kUint16);
  index.id_bytes_ = code == kInt32 ? 4 : 2;
  index.sequences_ = number_at<uint64_t>(file, 18);
  const auto bounds = number_at<uint64_t>(file, 26);
  const uint64_t room = size - kHeaderBytes;
  const bool fits =
      index.sequences_ <= room / 12 && bounds >= 1 && bounds <= room / 8 && index.sequences_ * 12 + bounds * 8 == room;
  TESSERA_CHECK(fits, ErrorKind::kFormat,
                "[data.read] {}: {} sequences and {} bounds of documents, which its {} bytes do not hold exactly. It "
                "is cut off, or another kind of index.",
                name, index.sequences_, bounds, size);
  index.documents_ = static_cast<int64_t>(bounds) - 1;
  index.check(static_cast<uint64_t>(info.st_size));
  return index;
}

// Sequences must be stored one after another without gaps and fill the .bin, and documents must divide the sequences in
// order. Then document() needs no checks of its own, and can read all ids of a document with one read.
void MegatronIndex::check(uint64_t bin_bytes) const {
  const auto name = idx_path_.string();
  uint64_t expected = 0;
  for (uint64_t i = 0; i < sequences_; ++i) {
    const int32_t length = length_of(i);
    TESSERA_CHECK(length >= 0 && pointer_of(i) == expected, ErrorKind::kFormat,
                  "[data.read] {}: sequence {} has {} ids at byte {}, wanted 0 or more at byte {}.", name, i, length,
                  pointer_of(i), expected);
    expected += static_cast<uint64_t>(length) * id_bytes_;
  }
  TESSERA_CHECK(expected == bin_bytes, ErrorKind::kFormat,
                "[data.read] {}: {} bytes, but {} describes {}. The files do not belong together, or one is cut off.",
                bin_path_.string(), bin_bytes, name, expected);
  uint64_t before = 0;
  for (int64_t i = 0; i <= documents_; ++i) {
    const uint64_t begin = document_begin(static_cast<uint64_t>(i));
    const bool good =
        begin >= before && begin <= sequences_ && (i > 0 || begin == 0) && (i < documents_ || begin == sequences_);
    TESSERA_CHECK(good, ErrorKind::kFormat,
                  "[data.read] {}: document {} begins at sequence {}, wanted {} to {}; the first begins at 0, the last "
                  "ends with the last sequence.",
                  name, i, begin, before, sequences_);
    before = begin;
  }
}

std::vector<int32_t> MegatronIndex::document(int64_t index) const {
  const uint64_t first = document_begin(static_cast<uint64_t>(index)),
                 last = document_begin(static_cast<uint64_t>(index) + 1);
  if (first == last) return {};
  const uint64_t begin = pointer_of(first);
  const uint64_t bytes = pointer_of(last - 1) + static_cast<uint64_t>(length_of(last - 1)) * id_bytes_ - begin;
  std::string raw(bytes, '\0');
  for (uint64_t done = 0; done < bytes;) {
    const ssize_t count = ::pread(bin_.get(), raw.data() + done, bytes - done, static_cast<off_t>(begin + done));
    if (count < 0 && errno == EINTR) continue;
    TESSERA_CHECK(count >= 0, ErrorKind::kIo, "[data.read] {}: cannot be read: {}", bin_path_.string(),
                  std::strerror(errno));
    TESSERA_CHECK(count > 0, ErrorKind::kFormat, "[data.read] {}: became shorter while it was read.",
                  bin_path_.string());
    done += static_cast<uint64_t>(count);
  }
  std::vector<int32_t> ids(bytes / id_bytes_);
  if (id_bytes_ == 4) {
    copy_bytes(ids.data(), raw.data(), bytes);
    for (const int32_t id : ids) {
      TESSERA_CHECK(id >= 0, ErrorKind::kFormat, "[data.read] {} document {}: found the token {}, wanted 0 or more.",
                    bin_path_.string(), index, id);
    }
  } else {
    for (size_t i = 0; i < ids.size(); ++i) {
      uint16_t id = 0;
      std::memcpy(&id, raw.data() + i * 2, 2);
      ids[i] = id;
    }
  }
  return ids;
}

}  // namespace tessera::data
