// Reading GGUF files, version 2 and 3, little-endian.
//
//   auto file = GgufFile::open("model.gguf");
//   uint64_t layers = file->require_uint("llama.block_count");
//   at::Tensor weight = file->tensor("blk.0.attn_q.weight");
//
// A tensor of type F32, F16 or BF16 is a view into the mapped file; a quantised tensor, or a plain tensor that is not
// aligned to 4 bytes, is decoded to float32. Views keep the map alive and are READ ONLY. Shapes are in libtorch's
// order: slowest dimension first.
//
// open() checks all counts, lengths, array nesting, alignment, offsets and overlaps against the file's size before it
// allocates memory. An invalid file is Error kFormat. Thread-safe after open(). docs/format/gguf.md describes the
// format.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "tessera/formats/gguf/gguf_quants.h"

namespace at {
class Tensor;
}

namespace tessera {

class MappedFile;

// Values of the metadata. In GgufArray::items and in GgufValue, the index of each variant alternative is the type's
// number in the file.
struct GgufArray {
  std::variant<std::vector<uint8_t>, std::vector<int8_t>, std::vector<uint16_t>, std::vector<int16_t>,
               std::vector<uint32_t>, std::vector<int32_t>, std::vector<float>, std::vector<bool>,
               std::vector<std::string>, std::vector<GgufArray>, std::vector<uint64_t>, std::vector<int64_t>,
               std::vector<double>>
      items;
};
using GgufValue = std::variant<uint8_t, int8_t, uint16_t, int16_t, uint32_t, int32_t, float, bool, std::string,
                               GgufArray, uint64_t, int64_t, double>;

// The dtype of a plain type (F32, F16, BF16), nullopt for a type that encodes blocks of values.
std::optional<c10::ScalarType> plain_dtype(GgmlType type);

struct GgufTensorInfo {
  GgmlType type;
  std::vector<int64_t> shape;  // slowest dimension first
  uint64_t begin = 0;          // byte positions in the file
  uint64_t end = 0;
  std::string_view type_name() const { return ggml_type_info(static_cast<uint32_t>(type))->name; }
};

class GgufFile {
 public:
  static std::shared_ptr<const GgufFile> open(const std::filesystem::path& path);

  const std::filesystem::path& path() const;
  uint32_t version() const { return version_; }
  const std::map<std::string, GgufValue, std::less<>>& metadata() const { return metadata_; }
  const std::map<std::string, GgufTensorInfo, std::less<>>& tensors() const { return tensors_; }

  // Return the metadata value of a key. The result is nullopt (or null) when the key is absent; Error kFormat when the
  // value has another type. The integer functions accept an integer type of any width and sign if the value fits.
  std::optional<uint64_t> find_uint(std::string_view key) const;
  std::optional<double> find_float(std::string_view key) const;
  std::optional<bool> find_bool(std::string_view key) const;
  std::optional<std::string> find_string(std::string_view key) const;
  const std::vector<std::string>* find_strings(std::string_view key) const;
  const std::vector<float>* find_floats(std::string_view key) const;
  std::optional<std::vector<int64_t>> find_ints(std::string_view key) const;
  // Like find_uint(), but an absent key is Error kFormat, too.
  uint64_t require_uint(std::string_view key) const;

  bool contains(std::string_view name) const { return tensors_.find(name) != tensors_.end(); }
  const GgufTensorInfo& tensor_info(std::string_view name) const;
  at::Tensor tensor(std::string_view name) const;
  // The encoded rows of a tensor as a view: uint8 [rows, bytes of a row], where a row is the last dimension and `rows`
  // counts all other dimensions. Error kFormat for rows that are not whole blocks.
  at::Tensor packed_rows(std::string_view name) const;

 private:
  GgufFile() = default;
  const GgufValue* find(std::string_view key) const;
  // Returns the metadata value of a key; null when the key is absent. Error kFormat for a value of another type; the
  // message names the expected type.
  template <class T>
  const T* find_value_of_type(std::string_view key, const char* expected_type) const;
  template <class T>
  const std::vector<T>* find_items(std::string_view key, const char* expected_type) const;
  std::shared_ptr<const MappedFile> file_;
  uint32_t version_ = 0;
  std::map<std::string, GgufValue, std::less<>> metadata_;
  std::map<std::string, GgufTensorInfo, std::less<>> tensors_;
};

}  // namespace tessera
