#include "tessera/formats/safetensors/safetensors.h"

#include <ATen/ATen.h>

#include <array>
#include <bit>
#include <cstring>

#include "tessera/base/error.h"
#include "tessera/base/files/mapped_file.h"
#include "tessera/base/text/quote.h"
#include "tessera/formats/safetensors/safetensors_header.h"

namespace tessera {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian and is mapped as it is");

constexpr uint64_t kMaxHeaderBytes = 100'000'000;

struct DtypeName {
  c10::ScalarType dtype;
  std::string_view name;
};
constexpr std::array kDtypes = {
    DtypeName{c10::ScalarType::Double, "F64"},
    DtypeName{c10::ScalarType::Float, "F32"},
    DtypeName{c10::ScalarType::Half, "F16"},
    DtypeName{c10::ScalarType::BFloat16, "BF16"},
    DtypeName{c10::ScalarType::Long, "I64"},
    DtypeName{c10::ScalarType::Int, "I32"},
    DtypeName{c10::ScalarType::Short, "I16"},
    DtypeName{c10::ScalarType::Char, "I8"},
    DtypeName{c10::ScalarType::Byte, "U8"},
    DtypeName{c10::ScalarType::UInt16, "U16"},
    DtypeName{c10::ScalarType::UInt32, "U32"},
    DtypeName{c10::ScalarType::UInt64, "U64"},
    DtypeName{c10::ScalarType::Bool, "BOOL"},
    DtypeName{c10::ScalarType::Float8_e4m3fn, "F8_E4M3"},
    DtypeName{c10::ScalarType::Float8_e5m2, "F8_E5M2"},
};

// Checks that the tensors cover the data section without gap, overlap or remaining bytes, then makes their offsets
// absolute. Tensors are visited by rising offset, so each must begin exactly where the one before it ends.
void place_entries(std::map<std::string, SafetensorsEntry, std::less<>>& entries, uint64_t data_begin,
                   uint64_t data_bytes, const std::string& file_name) {
  std::vector<std::pair<const std::string, SafetensorsEntry>*> order;
  for (auto& entry : entries) order.push_back(&entry);
  std::ranges::sort(order, [](const auto* a, const auto* b) {
    return std::pair(a->second.begin, a->second.end) < std::pair(b->second.begin, b->second.end);
  });
  uint64_t covered = 0;
  for (auto* item : order) {
    auto& [name, entry] = *item;
    TESSERA_CHECK(entry.end <= data_bytes, ErrorKind::kFormat,
                  "[safetensors] {}: tensor {} ends at data byte {}, but the file holds {}. The file is cut off; fetch "
                  "it again.",
                  file_name, quote(name), entry.end, data_bytes);
    TESSERA_CHECK(entry.begin == covered, ErrorKind::kFormat,
                  "[safetensors] {}: tensor {} begins at data byte {}, wanted {}: tensors must neither overlap nor "
                  "leave gaps",
                  file_name, quote(name), entry.begin, covered);
    covered = entry.end;
  }
  TESSERA_CHECK(covered == data_bytes, ErrorKind::kFormat,
                "[safetensors] {}: {} bytes of data, but the tensors cover {}", file_name, data_bytes, covered);
  for (auto* item : order) {
    item->second.begin += data_begin;
    item->second.end += data_begin;
  }
}

std::vector<IndexRange> whole_ranges(const SafetensorsEntry& entry) {
  std::vector<IndexRange> ranges;
  for (const int64_t size : entry.shape) ranges.push_back({0, size});
  return ranges;
}

}  // namespace

std::string_view safetensors_dtype_name(c10::ScalarType dtype) {
  for (const auto& known : kDtypes) {
    if (known.dtype == dtype) return known.name;
  }
  raise(ErrorKind::kFormat, "[safetensors] dtype {} cannot be stored in a safetensors file", c10::toString(dtype));
}

std::optional<c10::ScalarType> find_safetensors_dtype(std::string_view name) {
  for (const auto& known : kDtypes) {
    if (known.name == name) return known.dtype;
  }
  return std::nullopt;
}

std::shared_ptr<const SafetensorsFile> SafetensorsFile::open(const std::filesystem::path& path) {
  std::shared_ptr<SafetensorsFile> result(new SafetensorsFile);
  result->file_ = MappedFile::open(path);
  const auto bytes = result->file_->bytes();
  const auto file_name = path.string();
  TESSERA_CHECK(bytes.size() >= 8, ErrorKind::kFormat, "[safetensors] {}: {} bytes are too few for a header", file_name,
                bytes.size());
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), sizeof header_bytes);
  TESSERA_CHECK(
      header_bytes <= bytes.size() - 8 && header_bytes <= kMaxHeaderBytes, ErrorKind::kFormat,
      "[safetensors] {}: announces a header of {} bytes in a file of {} (at most {} are allowed). The file is "
      "cut off or no safetensors file.",
      file_name, header_bytes, bytes.size(), kMaxHeaderBytes);
  auto header = parse_safetensors_header(
      {reinterpret_cast<const char*>(bytes.data()) + 8, static_cast<size_t>(header_bytes)}, file_name);
  place_entries(header.entries, 8 + header_bytes, bytes.size() - 8 - header_bytes, file_name);
  result->entries_ = std::move(header.entries);
  result->metadata_ = std::move(header.metadata);
  return result;
}

const std::filesystem::path& SafetensorsFile::path() const { return file_->path(); }

const SafetensorsEntry& SafetensorsFile::entry(std::string_view name) const {
  const auto found = entries_.find(name);
  TESSERA_CHECK(found != entries_.end(), ErrorKind::kFormat,
                "[safetensors] {}: holds no tensor {}. List the file with 'tessera ckpt ls PATH'.", path().string(),
                quote(name));
  return found->second;
}

at::Tensor SafetensorsFile::tensor(std::string_view name) const { return read_slice(name, whole_ranges(entry(name))); }

at::Tensor SafetensorsFile::read_rows(std::string_view name, int64_t begin, int64_t end) const {
  auto ranges = whole_ranges(entry(name));
  TESSERA_CHECK(!ranges.empty(), ErrorKind::kShape, "[safetensors] {}: tensor {} has no dimension to take rows of",
                path().string(), quote(name));
  ranges[0] = {begin, end};
  return read_slice(name, ranges);
}

// Narrows a view of the whole tensor, so only pages with the wanted bytes are read from the file.
at::Tensor SafetensorsFile::read_slice(std::string_view name, std::span<const IndexRange> ranges) const {
  const auto& found = entry(name);
  const auto rank = static_cast<int64_t>(found.shape.size());
  TESSERA_CHECK(ranges.size() == found.shape.size(), ErrorKind::kShape,
                "[safetensors] {}: tensor {} has {} dimensions, {} ranges were given", path().string(), quote(name),
                rank, ranges.size());
  for (int64_t dim = 0; dim < rank; ++dim) {
    const auto& range = ranges[static_cast<size_t>(dim)];
    TESSERA_CHECK(0 <= range.begin && range.begin <= range.end && range.end <= found.shape[static_cast<size_t>(dim)],
                  ErrorKind::kShape, "[safetensors] {}: tensor {}: [{}, {}) is no range of dimension {}, which has {}",
                  path().string(), quote(name), range.begin, range.end, dim, found.shape[static_cast<size_t>(dim)]);
  }
  auto* data = const_cast<std::byte*>(file_->bytes().data()) + found.begin;
  const auto item_bytes = static_cast<int64_t>(c10::elementSize(found.dtype));
  const bool is_bool = found.dtype == c10::ScalarType::Bool;
  const bool aligned = reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(item_bytes) == 0;
  // Data that cannot be viewed in the dtype (BOOL, or an unaligned address) is viewed as uint8 [..., item_bytes],
  // narrowed and copied. The copy is then viewed in the dtype.
  const bool as_bytes = is_bool || !aligned;
  auto sizes = found.shape;
  if (as_bytes) sizes.push_back(item_bytes);
  at::Tensor view = at::from_blob(
      data, sizes, [keep = file_](void*) {}, at::TensorOptions().dtype(as_bytes ? c10::ScalarType::Byte : found.dtype));
  for (int64_t dim = 0; dim < rank; ++dim) {
    const auto& range = ranges[static_cast<size_t>(dim)];
    view = view.narrow(dim, range.begin, range.end - range.begin);
  }
  if (is_bool) return view.squeeze(-1).ne(0);
  if (!aligned) return view.clone(at::MemoryFormat::Contiguous).view(found.dtype).squeeze(-1);
  return view.contiguous();
}

}  // namespace tessera
