// Reading one safetensors file.
//
//   auto file = SafetensorsFile::open("model.safetensors");
//   at::Tensor weight = file->tensor("lm_head.weight");            // a view into the map, no copy
//   at::Tensor rows = file->read_rows("lm_head.weight", 0, 4096);  // reads only these rows
//
// open() checks the whole header: JSON types, names, offsets in bounds, no gap and no overlap, and dtype x shape equal
// to the byte count. Errors: kFormat for an invalid file, kIo for a file that cannot be read. Tensors keep the map
// alive and are READ ONLY: a write into one ends the process, so clone a tensor before changing it in place.
// Thread-safe after open(). docs/format/safetensors.md describes the format.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace at {
class Tensor;
}

namespace tessera {

class MappedFile;

struct SafetensorsEntry {
  c10::ScalarType dtype;
  std::vector<int64_t> shape;
  uint64_t begin = 0;  // byte positions in the file
  uint64_t end = 0;
  uint64_t size_bytes() const { return end - begin; }
};

// Half-open range of one dimension.
struct IndexRange {
  int64_t begin = 0;
  int64_t end = 0;
};

class SafetensorsFile {
 public:
  static std::shared_ptr<const SafetensorsFile> open(const std::filesystem::path& path);

  const std::filesystem::path& path() const;
  const std::map<std::string, SafetensorsEntry, std::less<>>& entries() const { return entries_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  bool contains(std::string_view name) const { return entries_.find(name) != entries_.end(); }
  // Returns dtype, shape and byte positions of the tensor `name`. Error kFormat when the file has no such tensor.
  const SafetensorsEntry& entry(std::string_view name) const;

  // The whole tensor as a view into the map. BOOL, and a tensor whose address is not aligned for its dtype, are copied.
  at::Tensor tensor(std::string_view name) const;
  // Rows [begin, end) of dimension 0. Error kShape when they are out of range.
  at::Tensor read_rows(std::string_view name, int64_t begin, int64_t end) const;
  // Returns a box of the tensor, given as one range for each dimension. The result is contiguous: a view where the
  // bytes are contiguous, else a copy of only these bytes.
  at::Tensor read_slice(std::string_view name, std::span<const IndexRange> ranges) const;

 private:
  SafetensorsFile() = default;
  std::shared_ptr<const MappedFile> file_;
  std::map<std::string, SafetensorsEntry, std::less<>> entries_;
  std::map<std::string, std::string> metadata_;
};

// Returns the safetensors name of a dtype, such as "F32" or "BF16". Error kFormat for a dtype that safetensors does not
// have.
std::string_view safetensors_dtype_name(c10::ScalarType dtype);
// Returns the dtype of a safetensors dtype name; nullopt for a name that has no dtype in libtorch.
std::optional<c10::ScalarType> find_safetensors_dtype(std::string_view name);

}  // namespace tessera
